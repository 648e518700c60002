"""How an evaluation reads a split: view, batches, and the ranks that share it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from pipeline.data.dataset.manifest import Split
from pipeline.data.loading.loader import Batch, Loader, eval_view
from pipeline.distributed import Ranks, StopRequest
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig


@dataclass(frozen=True)
class SplitReader:
    """A split, and how to read it. view: the preprocessing. batch: images per forward pass. ranks: share the split.

    progress: called with the number of images after each batch of this rank. stop: polled between batches; all ranks stop together.
    """

    split: Split
    image_size: ImageSize | int
    view: AugmentConfig
    batch: int
    threads: int
    ranks: Ranks
    progress: Callable[[int], object] | None = None
    stop: StopRequest | None = None

    @contextmanager
    def open(
        self, requests: Iterable[tuple[np.ndarray, np.ndarray]]
    ) -> Iterator[tuple[Iterator[Batch], dict[int, str]]]:
        """Yields (this rank's batches, problems: row -> reason, filled while reading). Collective.

        Any number of unreadable images is allowed. Iterating raises Stopped on all ranks when they agree to stop.
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
