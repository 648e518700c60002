"""How an evaluation reads a split: view, batches, and the ranks that share it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import OneRankError, UserError
from pipeline.data.dataset.split import BadBudget, Split
from pipeline.data.loading.loader import Batch, Draw, Loader
from pipeline.data.loading.views import Views, eval_view, noting_left_out, read_by, train_views
from pipeline.process.distributed import Ranks, StopRequest
from pipeline.process.waits import Work
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig, RunConfig


@dataclass(frozen=True)
class SplitReader:
    """A split, and how to read it. view: the preprocessing. batch: images per forward pass. ranks: share the split.

    stop: polled between batches; all ranks
    stop together.
    budget: how many of the images that are read may be unreadable: a score on the rest says nothing about the weights.
    pixels: of the model.
    views: those of an objective; if there are several, they are read instead of the evaluation view, drawn from (seed,
    epoch, sample, view). The requests of `eval_requests` are of epoch 0, so these views are the same at each
    evaluation.
    draw: the objective's, for what it measures; None where only images are read.
    left_out: filled while images are read that no data set counts (`noting_left_out`).
    """

    split: Split
    image_size: ImageSize | int
    view: AugmentConfig
    batch: int
    threads: int
    ranks: Ranks
    stop: StopRequest | None = None
    budget: BadBudget = BadBudget(share=0.001)
    pixels: Pixels = RGB8
    views: tuple[Views, ...] = ()
    seed: int = 0
    draw: Draw | None = None
    left_out: dict[int, set[str]] = field(default_factory=dict)

    @classmethod
    def of_run(
        cls,
        config: RunConfig,
        split: Split,
        ranks: Ranks,
        pixels: Pixels,
        stop: StopRequest | None = None,
        views: tuple[Views, ...] = (),
        draw: Draw | None = None,
    ) -> "SplitReader":
        """A reader by the settings of a run."""
        return cls(
            split,
            config.model.image_size,
            config.augment,
            config.evaluate.batch,
            config.data.threads,
            ranks,
            stop=stop,
            budget=BadBudget(config.data.max_bad_share),
            pixels=pixels,
            views=views,
            seed=config.seed,
            draw=draw,
        )

    @contextmanager
    def open(
        self, requests: Iterable[tuple[np.ndarray, np.ndarray]], num_samples: int
    ) -> Iterator[tuple[Iterator[Batch], dict[int, str]]]:
        """Yields (this rank's batches, problems: row -> reason, filled while reading). Collective.

        num_samples: number of samples that all ranks read together. Raises UserError for images of other channels or
        another type. Iterating raises Stopped on all ranks when they agree to stop, and OneRankError when this rank
        alone exceeds the budget; `problems_of_all` checks that of all ranks.
        """
        is_stop_wanted = self.stop.is_wanted if self.stop else lambda: False
        reading = read_by(self.pixels, self.split)
        writer = eval_view(self.view, self.image_size, *reading)
        if sum(group.count for group in self.views) > 1:
            writer = train_views(self.views, self.seed, *reading)
        if self.split.left_out is None:
            writer = noting_left_out(writer, self.left_out)
        with Loader(self.split, writer, self.threads, is_stop_wanted=is_stop_wanted) as loader:

            def counted() -> Iterator[Batch]:
                batches = loader.batches(requests, self.draw)
                with Work(f"reading {self.split.name}", num_samples) as work:
                    for batch in self.stop.together(batches) if self.stop else batches:
                        if len(loader.bad) > self.budget.allowed(num_samples):
                            raise OneRankError(self.budget.excess(dict(loader.bad), self.split, num_samples))
                        yield batch
                        work.advance(len(batch.rows) * self.ranks.world_size)

            yield counted(), loader.bad

    def problems_of_all(self, of_ranks: Iterable[dict[int, str]], num_samples: int) -> dict[int, str]:
        """The problems of all ranks together. Raises UserError, on every rank, if they exceed the budget."""
        problems = {row: why for of_rank in of_ranks for row, why in of_rank.items()}
        if excess := self.budget.excess(problems, self.split, num_samples):
            raise UserError(excess)
        return problems
