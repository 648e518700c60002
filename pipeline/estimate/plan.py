"""The plan of a run: batch arithmetic and lengths in steps."""

from dataclasses import dataclass, replace

from pipeline.architecture.objectives import OBJECTIVES
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.settings.quantities import Length
from pipeline.settings.run import RunConfig


@dataclass(frozen=True)
class Due:
    """What is due after a step. record: of metrics. line: of the log, beside those that are due by the clock. keep: the
    checkpoint is kept permanently. evaluations: names of evaluators.
    """

    record: bool
    line: bool
    save: bool
    keep: bool
    evaluations: frozenset[str]


# Steps between records where lines are logged by the clock.
_MAX_RECORD_EVERY = 50


@dataclass(frozen=True)
class Plan:
    """All lengths in optimizer steps. keep_every: 0 is never. evaluate_every: by evaluator, without those that the run
    does not have.

    log_seconds: between lines of the log; 0: a line for each record.
    best_from: the evaluator that measures checkpoint.best, which has a checkpoint at each of its evaluations, or "".
    heads_first: step after which all is trained (train.heads_first), and everything is evaluated; 0: from the start.
    """

    steps: int
    warmup: int
    evaluate_every: dict[str, int]
    checkpoint_every: int
    keep_every: int
    accumulation: int
    micro_batch: int
    num_samples: int
    global_batch: int
    world_size: int
    record_every: int = 1
    log_seconds: float = 0.0
    best_from: str = ""
    cooldown: int = 0
    heads_first: int = 0

    def measuring(self, config: RunConfig, num_classes: int) -> "Plan":
        """The plan without the evaluators that measure nothing. Raises UserError if none measures checkpoint.best."""
        from pipeline import objectives  # Late: imports torch.

        metrics = objectives.metrics(config)
        return replace(
            self,
            evaluate_every={name: every for name, every in self.evaluate_every.items() if metrics[name]},
            best_from=objectives.best_from(config, num_classes),
        )

    def due(self, step: int) -> Due:
        """What is due after step `step`, counted from 1; after the last step, everything but keep."""
        is_last = step == self.steps
        record = step % self.record_every == 0 or step == 1 or is_last
        keep = self.keep_every > 0 and step % self.keep_every == 0

        all_are = step in (self.heads_first, self.steps)
        evaluations = frozenset(name for name, every in self.evaluate_every.items() if all_are or step % every == 0)
        return Due(
            record=record,
            line=is_last or (record and not self.log_seconds),
            save=step % self.checkpoint_every == 0 or keep or is_last or self.best_from in evaluations,
            keep=keep,
            evaluations=evaluations,
        )

    @property
    def epochs(self) -> float:
        return self.steps * self.global_batch / self.num_samples

    def notes(self, config: RunConfig) -> list[str]:
        """A line for a run that no held-out split measures, and one for each setting that was changed to fit."""
        named: list[str] = []
        if not config.data.evaluated:
            named.append("no held-out split: the run is not evaluated. To hold out images: data.dev_share=0.01")
        elif "scores" not in self.evaluate_every:
            named.append(f"train.loss = {config.train.loss} measures nothing on held-out images")
        share = self.global_batch // self.world_size
        if self.micro_batch != min(config.train.micro_batch, share):
            named.append(
                f"train.micro_batch = {config.train.micro_batch} does not divide a rank's {counted(share, 'sample')} "
                f"({self.global_batch} / {counted(self.world_size, 'rank')}): {self.micro_batch} is used"
            )
        return named

    def describe(self) -> str:
        """The plan in one line for the log."""
        if not self.steps:
            return f"no step of training: a head is fitted to {counted(self.num_samples, 'image')} (init.fit_head)"
        every = self.evaluate_every.get("scores")
        evaluation = f"evaluation every {every:,}" if every else "no evaluation"
        return (
            f"{counted(self.steps, 'step')} of {self.global_batch} = {counted(self.world_size, 'rank')} x"
            f" {self.accumulation} x {counted(self.micro_batch, 'sample')} ({self.epochs:.1f} epochs of"
            f" {self.num_samples:,}), warm-up {self.warmup:,}, {evaluation}, checkpoint every"
            f" {counted(self.checkpoint_every, 'step')}"
        )


def make_plan(config: RunConfig, num_samples: int, world_size: int) -> Plan:
    """Returns the plan of a run on `num_samples` training samples and `world_size` ranks.

    Raises UserError with the arithmetic if the batch is not divisible, the run has no step, or warm-up is too long.
    """
    train = config.train
    accumulation, micro_batch = cut_batch(config, world_size)
    steps = train.length.steps(num_samples, train.global_batch)
    if steps < (0 if config.init.fit_head else 1):
        raise UserError(
            f"train.length = {train.length} is {counted(steps, 'step')} of train.global_batch = {train.global_batch} on"
            f" {counted(num_samples, 'sample')}. Train longer, or use a smaller batch."
        )
    warmup = config.schedule.warmup.steps(num_samples, train.global_batch, steps)
    cooldown = config.schedule.cooldown.steps(num_samples, train.global_batch, steps)
    if steps and (warmup >= steps or warmup + cooldown > steps):
        raise UserError(
            f"schedule.warmup = {config.schedule.warmup} ({counted(warmup, 'step')}) and schedule.cooldown ="
            f" {config.schedule.cooldown} ({counted(cooldown, 'step')}) do not fit into train.length = {train.length}"
            f" ({counted(steps, 'step')}). Shorten one, or train longer."
        )
    intervals = {"scores": config.evaluate.every} if config.data.evaluated else {}
    intervals |= {name: section.every for name, section in config.evaluators.items() if section.every.amount}
    keep, by_steps = config.checkpoint.keep_every, train.log_every.unit == "steps"

    def in_steps(every: Length) -> int:
        return max(1, every.steps(num_samples, train.global_batch, steps))

    return Plan(
        steps=steps,
        warmup=warmup,
        evaluate_every={name: in_steps(every) for name, every in intervals.items()},
        checkpoint_every=in_steps(config.checkpoint.every),
        keep_every=in_steps(keep) if keep.amount else 0,
        accumulation=accumulation,
        micro_batch=micro_batch,
        num_samples=num_samples,
        global_batch=train.global_batch,
        world_size=world_size,
        record_every=max(1, round(train.log_every.amount if by_steps else min(steps / 100, _MAX_RECORD_EVERY))),
        log_seconds=0.0 if by_steps else train.log_every.amount,
        cooldown=cooldown,
        heads_first=round(config.share_of_run("train.heads_first", train.heads_first) * steps),
    )


def cut_batch(config: RunConfig, world_size: int) -> tuple[int, int]:
    """Returns (accumulation, samples per micro-batch) on `world_size` ranks. Raises UserError with the arithmetic.

    A micro-batch has the largest size up to train.micro_batch that divides the rank's share, an even one for mixed
    pairs if there is one.
    """
    train, paired = config.train, config.augment.mixes_pairs
    if train.global_batch % world_size:
        raise UserError(
            f"train.global_batch = {train.global_batch} is not divisible by {world_size} ranks: choose another of them."
        )
    share = train.global_batch // world_size
    fitting = [size for size in range(1, min(train.micro_batch, share) + 1) if share % size == 0]
    micro_batch = max([size for size in fitting if size % 2 == 0 or not paired], default=max(fitting))
    count = share // micro_batch
    if count > 1 and OBJECTIVES[train.loss].of_whole_batch:
        raise UserError(
            f"train.loss = {train.loss} compares all samples of a step, which cannot be done in {count} micro-batches:"
            f" train.global_batch = {train.global_batch} on {counted(world_size, 'rank')} is {share} each, and"
            f" train.micro_batch = {train.micro_batch}. Use train.micro_batch={share}, a smaller train.global_batch, or"
            " more ranks."
        )
    if paired and micro_batch % 2:
        raise UserError(
            f"augment.mixup and augment.cutmix mix a micro-batch in pairs, and {micro_batch} = train.global_batch"
            f" {train.global_batch} / ({counted(world_size, 'rank')} x {count}) is odd. Use an even train.micro_batch,"
            " and a train.global_batch that gives each rank an even number of samples."
        )
    return count, micro_batch
