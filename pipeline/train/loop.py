"""The training loop: forward, loss, backward, step; what is logged, saved and scored, and when; the micro-batches.

Read it from top to bottom. `setup.py` prepares what the loop uses, `start.py` starts and ends it. A name that ends in
`_on_all_ranks` is a collective call: when one rank makes it, all must.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from pipeline.data.loading.loader import Batch, Draw, Loader, train_requests
from pipeline.data.loading.mix import Mixing, draw_mixing
from pipeline.data.loading.order import batch_of_step
from pipeline.data.loading.views import read_by, train_views
from pipeline.data.mixture.order import MixtureOrder, train_order
from pipeline.monitor.profile import StepClock
from pipeline.objectives import kind
from pipeline.objectives.objective import Inputs, Objective
from pipeline.objectives.parameters.optimizers import learning_rate
from pipeline.process.console import LineClock
from pipeline.process.distributed import Ranks
from pipeline.settings.quantities import ImageSize

if TYPE_CHECKING:  # `training_step` is also used without it.
    from pipeline.train.bookkeeping import StartingPoint, TrainingRun


def train_on_all_ranks(run: "TrainingRun") -> None:
    """Train from `run.progress.step` to the end of the plan. Raises Stopped on all ranks when they agree to stop."""
    config, plan, feed, progress = run.config, run.plan, run.feed, run.progress
    draw = partial(run.engine.objective.draw, training=True)
    feed.go_to(progress.step, progress.skipped_batches, draw)
    run.meter.restart()  # What came before, an evaluation that was made up, is not training.
    while progress.step < plan.steps:
        micro_batches = feed.next_on_all_ranks()
        step = progress.step  # Number of this step, from 0; log lines count from 1.
        due = plan.due(step + 1)

        # ------------------------------------------------------------------ forward, loss, backward, step
        run.watchdog.at(step + 1, "step")
        lr = learning_rate(config.schedule, run.peak_lr, step, plan.steps, plan.warmup, plan.cooldown)
        size = ImageSize(*micro_batches[0].views[0].shape[-3:-1])
        mixing = draw_mixing(config.augment, size, config.seed, step)
        result = training_step(run.engine, micro_batches, step, lr, mixing)
        progress.step = step + 1
        run.record_step(micro_batches, result.loss)

        # ------------------------------------------------------------------ loss spikes: continue, skip, or roll back
        if (due.record or due.save) and run.rolled_back_after_spikes_on_all_ranks():
            feed.go_to(progress.step, progress.skipped_batches, draw)
            continue

        # ------------------------------------------------------------------ log, save, score
        line = due.line or feed.is_line_due
        if due.record or line:
            run.log_on_all_ranks(result.loss, result.values, float(result.grad_norm), lr, due.record, line)
        with run.meter.paused():
            if due.save:
                run.save_on_all_ranks(keep=due.keep)
                run.stop.leave_if_wanted_on_all_ranks()  # Stopping later would need another checkpoint.
            for evaluator in run.evaluators:
                if evaluator.name in due.evaluations:
                    evaluator.evaluate_on_all_ranks(progress.step)
        run.watchdog.at(progress.step, "data")
    feed.end_on_all_ranks()


class Trainer(Protocol):
    """An objective and its optimizer as `training_step` uses them: DeepSpeed's engine, or a single device without
    DeepSpeed.
    """

    objective: Objective
    ranks: Ranks
    clock: StepClock

    def begin_step(self, step: int, lr: float) -> None: ...
    def seed_dropout(self, micro_batch: int) -> None: ...
    def loss(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]: ...
    def backward(self, loss: Tensor, share: float) -> None: ...
    def update(self, is_last: bool) -> None: ...
    def end_step(self) -> Tensor | float: ...


@dataclass(frozen=True)
class StepResult:
    """loss, values: means over this rank's micro-batches, values as the objective names them. grad_norm: before
    clipping, NaN if unknown.

    Scalars on the device: `float` waits for it. The gradient norm is valid until the next step.
    """

    loss: Tensor
    values: dict[str, Tensor]
    grad_norm: Tensor | float


def training_step(
    trainer: Trainer,
    micro_batches: Sequence[Batch],
    step: int,
    lr: float,
    mixing: Mixing | None = None,
) -> StepResult:
    """One optimizer step on this rank's micro-batches. Collective, unless the trainer uses one device.

    step: from 0. mixing: how to mix images in pairs, None for not at all. A step is skipped when a gradient is
    non-finite on any rank: it leaves weights, moments and EMA unchanged.
    """
    trainer.begin_step(step, lr)
    num_samples = sum(len(batch.rows) for batch in micro_batches)
    total = torch.zeros((), device=trainer.ranks.device)
    means: dict[str, Tensor] = {}
    for i, batch in enumerate(micro_batches):
        trainer.seed_dropout(i)
        inputs = trainer.objective.inputs(batch, trainer.ranks.device, mixing)
        with trainer.clock.device("forward"):
            loss, values = trainer.loss(inputs)
        total += loss.detach()
        for name, value in values.items():
            means[name] = means.get(name, 0) + value.detach() / len(micro_batches)
        with trainer.clock.device("backward"):
            trainer.backward(loss, share=len(batch.rows) / num_samples)
        with trainer.clock.device("optimizer"):
            trainer.update(is_last=i == len(micro_batches) - 1)
    return StepResult(total / len(micro_batches), means, trainer.end_step())


class Feed:
    """Prefetches this rank's share of the training split; the clock counts the time spent waiting for it."""

    def __init__(self, start: "StartingPoint", clock: StepClock) -> None:
        """Raises UserError if the model cannot read the images of a set."""
        config, split = start.config, start.data.split
        self.plan, self.ranks, self.stop, self.clock = start.plan, start.ranks, start.stop, clock
        self.order = train_order(split, config.data, config.seed, start.plan.global_batch)
        pixels = read_by(start.model.config.pixels, split)
        self.loader = Loader(
            split,
            train_views(kind(config.train.loss).views(config), config.seed, *pixels),
            config.data.threads,
            config.data.prefetch,
            config.data.max_bad_share,
            pin=start.ranks.device.type == "cuda",
            is_stop_wanted=start.stop.is_wanted,
            processes=config.data.processes,
        )
        self._steps: Iterator[list[Batch]] = iter(())
        self._line_clock = LineClock(start.plan.log_seconds)

    def go_to(self, step: int, skipped_batches: Sequence[tuple[int, int]], draw: Draw) -> None:
        """Continue with step `step` (from 0). skipped_batches: see `Progress`. draw: the objective's."""
        first = batch_of_step(step, skipped_batches)
        last = first + self.plan.steps - step
        ranks = self.ranks
        requests = train_requests(self.order, first, last, self.plan.micro_batch, ranks.rank, ranks.world_size)
        is_due = self._line_clock.is_due if ranks.is_main else lambda: False
        self._steps = self.stop.together(self._of_steps(self.loader.batches(requests, draw)), is_due)

    def epochs(self, batches: int) -> float:
        """How often the training split of data.path was used in the first `batches` batches."""
        seen, main = batches * self.plan.global_batch, self.loader.split.parts[0]
        if isinstance(self.order, MixtureOrder):
            seen = int(self.order.first(seen)[0])
        return seen / len(main)

    def next_on_all_ranks(self) -> list[Batch]:
        """The micro-batches of the next step. Raises Stopped on all ranks when they agree to stop before it."""
        return next(self._steps)

    @property
    def is_line_due(self) -> bool:
        """Whether a line of the log is due by rank 0's clock after the step whose micro-batches were returned last; the
        same on all ranks.
        """
        return self.stop.flagged

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
