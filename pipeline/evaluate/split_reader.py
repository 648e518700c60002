"""How an evaluation reads a split: which images, in which view, in what batches, shared by which ranks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeline.data.dataset.manifest import Split
from pipeline.data.loading.loader import Batch, Loader, eval_view
from pipeline.distributed import Ranks, StopRequest
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig


class Progress(Protocol):
    """Is told how many images a batch had, as `tqdm.update` is."""

    def __call__(self, count: int, /) -> object: ...


@dataclass(frozen=True)
class SplitReader:
    """view: the preprocessing of evaluation. batch: images a forward pass. ranks: who share the split; all of them read.

    progress: told the size of each batch of this rank. stop: asked between batches; the ranks leave together.
    """

    split: Split
    image_size: ImageSize | int
    view: AugmentConfig
    batch: int
    threads: int
    ranks: Ranks
    progress: Progress | None = None
    stop: StopRequest | None = None

    @contextmanager
    def open(
        self, requests: Iterable[tuple[np.ndarray, np.ndarray]]
    ) -> Iterator[tuple[Iterator[Batch], dict[int, str]]]:
        """(this rank's batches, problems: row -> why it is unreadable, filled while they are read). Collective.

        Any number of unreadable images is allowed. The iteration raises Stopped on every rank when the ranks agree to stop.
        """
        is_stop_wanted = self.stop.is_wanted if self.stop else lambda: False
        with Loader(
            self.split, eval_view(self.view), self.image_size, self.threads, prefetch=2, max_bad_share=1.0,
            is_stop_wanted=is_stop_wanted,
        ) as loader:  # fmt: skip
            batches = loader.batches(requests)
            yield self._counted(self.stop.together(batches) if self.stop else batches), loader.bad

    def _counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield batch
            if self.progress is not None:
                self.progress(len(batch.rows))
