"""What a run will do, worked out before it starts: batch arithmetic and lengths in steps."""

from dataclasses import dataclass

from pipeline.config import ModelConfig, RunConfig
from pipeline.errors import UserError
from pipeline.memory import rank_memory
from pipeline.model import ViTConfig, configure


@dataclass(frozen=True)
class Plan:
    """All lengths in optimizer steps."""

    steps: int
    warmup: int
    eval_every: int
    checkpoint_every: int
    accumulation: int
    micro_batch: int
    num_samples: int
    global_batch: int
    world_size: int

    @property
    def epochs(self) -> float:
        return self.steps * self.global_batch / self.num_samples

    def describe(self) -> str:
        """One line for a person."""
        return (
            f"{self.steps:,} steps of {self.global_batch} = {self.world_size} ranks x {self.accumulation} x "
            f"{self.micro_batch} samples ({self.epochs:.1f} epochs of {self.num_samples:,}), warm-up {self.warmup:,}, "
            f"evaluation every {self.eval_every:,}, checkpoint every {self.checkpoint_every:,} steps"
        )


def make_plan(config: RunConfig, num_samples: int, world_size: int) -> Plan:
    """The plan of a run on `num_samples` training samples and `world_size` ranks.

    Raises UserError, with the arithmetic, when the batch does not divide or a length comes to no step.
    """
    train = config.train
    accumulation = _accumulation(train.global_batch, train.micro_batch, world_size)
    micro_batch = train.global_batch // (world_size * accumulation)
    if (config.augment.mixup or config.augment.cutmix) and micro_batch % 2:
        raise UserError(
            f"augment.mixup and augment.cutmix mix a micro-batch in pairs, and {micro_batch} = train.global_batch "
            f"{train.global_batch} / ({world_size} ranks x {accumulation}) is odd. Use an even train.micro_batch, and a "
            "train.global_batch that gives each rank an even number of samples."
        )
    steps = train.length.steps(num_samples, train.global_batch)
    if steps < 1:
        raise UserError(
            f"train.length = {train.length} is {steps} steps of train.global_batch = {train.global_batch} on "
            f"{num_samples:,} samples. Train longer, or use a smaller batch."
        )
    warmup = config.schedule.warmup.steps(num_samples, train.global_batch, steps)
    if warmup >= steps:
        raise UserError(
            f"schedule.warmup = {config.schedule.warmup} is {warmup:,} steps, but the whole run has {steps:,} "
            f"(train.length = {train.length}). Use schedule.warmup=5% or train longer."
        )
    return Plan(
        steps=steps,
        warmup=warmup,
        eval_every=max(1, config.evaluate.every.steps(num_samples, train.global_batch, steps)),
        checkpoint_every=max(1, config.checkpoint.every.steps(num_samples, train.global_batch, steps)),
        accumulation=accumulation,
        micro_batch=micro_batch,
        num_samples=num_samples,
        global_batch=train.global_batch,
        world_size=world_size,
    )


def model_config(settings: ModelConfig, num_classes: int) -> ViTConfig:
    """The new model that these settings describe. Raises UserError for numbers that do not fit together."""
    assert settings.name, "config.check refuses a run with neither model.name nor init.weights"
    return configure(
        settings.name,
        settings.image_size,
        num_classes,
        representation=settings.representation,
        gelu=settings.gelu,
        dropout=settings.dropout,
        head_bias=settings.head_bias,
        width=settings.width,
        depth=settings.depth,
        mlp_width=settings.mlp_width,
        num_heads=settings.num_heads,
    )


def refuse_too_large(config: RunConfig, plan: Plan, model: ViTConfig, gpu_memory: int) -> None:
    """Raise UserError when a rank needs more than `gpu_memory` bytes at its fullest moment, with the way out."""
    peak = rank_memory(model, config, plan.micro_batch, plan.accumulation, plan.world_size)
    if peak.total <= gpu_memory:
        return
    share = plan.global_batch // plan.world_size
    micro_batch = largest_micro_batch(config, model, share, plan.world_size, gpu_memory)
    way_out = (
        f"Use train.micro_batch={micro_batch}" if micro_batch else "No train.micro_batch is small enough here: use"
    )
    others = [] if config.engine.activation_checkpointing else ["engine.activation_checkpointing=true"]
    others += [f"engine.zero_stage={config.engine.zero_stage + 1}"] if 0 < config.engine.zero_stage < 3 else []
    others.append("more or larger GPUs")
    raise UserError(
        f"a rank needs {peak.total / 2**30:.1f} GiB ({peak.when}: {peak.activations / 2**30:.1f} of it activations of "
        f"train.micro_batch {plan.micro_batch}), and its GPU has {gpu_memory / 2**30:.1f}. {way_out}"
        f"{', or ' if micro_batch else ' '}{', or '.join(others)}. launch/plan.py --cluster chooses."
    )


def largest_micro_batch(config: RunConfig, model: ViTConfig, share: int, world_size: int, limit: float) -> int:
    """The largest part of a rank's `share` of the batch that divides it and fits `limit` bytes; 0 when none does."""
    pairs = 2 if config.augment.mixup or config.augment.cutmix else 1
    for accumulation in range(1, share + 1):
        micro_batch, rest = divmod(share, accumulation)
        if rest or micro_batch % pairs:
            continue
        if rank_memory(model, config, micro_batch, accumulation, world_size).total <= limit:
            return micro_batch
    return 0


def _accumulation(global_batch: int, micro_batch: int, world_size: int) -> int:
    """Micro-batches a rank accumulates. A rank's share smaller than micro_batch is one micro-batch."""
    if global_batch % world_size:
        lower = global_batch // world_size * world_size
        near = f"{lower} and {lower + world_size}" if lower else str(world_size)
        raise UserError(
            f"train.global_batch = {global_batch} is not divisible by {world_size} ranks. "
            f"Nearest batches are {near}; or use another number of ranks."
        )
    share = global_batch // world_size
    if share <= micro_batch:
        return 1
    if share % micro_batch:
        fitting = max(m for m in range(1, micro_batch + 1) if share % m == 0)
        raise UserError(
            f"train.global_batch = {global_batch} is not divisible by {world_size} ranks x train.micro_batch "
            f"{micro_batch} = {world_size * micro_batch}: a rank's {share} samples make {share / micro_batch:.2f} "
            f"micro-batches. Use train.micro_batch={fitting}."
        )
    return share // micro_batch
