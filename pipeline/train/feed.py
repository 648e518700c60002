"""The micro-batches of each training step, from any step on, in the order defined by the seed."""

from collections.abc import Iterator, Sequence
from itertools import islice

from pipeline.architecture.pixels import Pixels
from pipeline.cluster.stop import Stop
from pipeline.data.dataset.split import Split
from pipeline.data.loading.loader import Batch, Loader, train_requests
from pipeline.data.loading.order import batch_of_step
from pipeline.data.loading.views import read_by, train_views
from pipeline.data.mixture.order import MixtureOrder, train_order
from pipeline.estimate.plan import Plan
from pipeline.monitor.profile import StepClock
from pipeline.objectives import kind
from pipeline.process.distributed import Ranks
from pipeline.settings.run import RunConfig


class Feed:
    """Prefetches this rank's share of the training split; the clock counts the time spent waiting for it."""

    def __init__(
        self, config: RunConfig, plan: Plan, split: Split, ranks: Ranks, stop: Stop, clock: StepClock, pixels: Pixels
    ) -> None:
        """pixels: of the model. Raises UserError if it cannot read the images of a set."""
        self.plan, self.ranks, self.stop, self.clock = plan, ranks, stop, clock
        self.order = train_order(split, config.data, config.seed, plan.global_batch)
        self.loader = Loader(
            split,
            train_views(kind(config.train.loss).views(config), config.seed, *read_by(pixels, split)),
            config.data.threads,
            config.data.prefetch,
            config.data.max_bad_share,
            pin=ranks.device.type == "cuda",
            is_stop_wanted=stop.is_wanted,
            processes=config.data.processes,
        )
        self._steps: Iterator[list[Batch]] = iter(())

    def go_to(self, step: int, skipped_batches: Sequence[tuple[int, int]]) -> None:
        """Continue with step `step` (from 0). skipped_batches: see `Progress`."""
        first = batch_of_step(step, skipped_batches)
        last = first + self.plan.steps - step
        ranks = self.ranks
        requests = train_requests(self.order, first, last, self.plan.micro_batch, ranks.rank, ranks.world_size)
        self._steps = self.stop.together(self._of_steps(self.loader.batches(requests)))

    def epochs(self, batches: int) -> float:
        """How often the training split of data.path was used in the first `batches` batches."""
        seen, main = batches * self.plan.global_batch, self.loader.split.parts[0]
        if isinstance(self.order, MixtureOrder):
            seen = int(self.order.first(seen)[0])
        return seen / len(main)

    def next_on_all_ranks(self) -> list[Batch]:
        """The micro-batches of the next step. Raises Stopped on all ranks when they agree to stop before it."""
        return next(self._steps)

    def end_on_all_ranks(self) -> None:
        """Check for a stop that was agreed during the last step. Raises Stopped on all ranks."""
        assert next(self._steps, None) is None

    def _of_steps(self, batches: Iterator[Batch]) -> Iterator[list[Batch]]:
        while True:
            with self.clock.host("data"):
                micro_batches = list(islice(batches, self.plan.accumulation))
            if not micro_batches:
                return
            yield micro_batches
