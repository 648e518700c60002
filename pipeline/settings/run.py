"""The settings of a run, whose sections are in run_sections.py and run_execution.py, and the checks that cross several
of them.

`--help` of launch/pretrain.py prints every field; `configs/` holds the shipped files. Checks that need the data set or
the number of ranks are in `pipeline/estimate/plan.py`, those of an objective in its class.
"""

import math
from typing import Any

from pipeline.architecture.config import ONLY_TRAIN
from pipeline.architecture.objectives import OBJECTIVES, Labels
from pipeline.architecture.variants import implied
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.settings.effect import refuse_without_effect
from pipeline.settings.quantities import ImageSize, PathText, Seed
from pipeline.settings.run_execution import (
    CheckpointConfig,
    EngineConfig,
    EvaluateConfig,
    HealthConfig,
    InitConfig,
    LaunchConfig,
    RunProbeConfig,
    TrackConfig,
)
from pipeline.settings.run_sections import (
    AugmentConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunScheduleConfig,
    TrainConfig,
)
from pipeline.settings.schema import Settings, setting
from pipeline.settings.shared import result_name

_FREEZE_ALL_BLOCKS = ("backbone", "encoder")  # values of train.freeze


class RunConfig(Settings):
    """A run: pre-training, or fine-tuning when init.weights is set."""

    # An override may turn off what settings of the file need, and config.yaml keeps both: they are a line of the log
    # and of the plan, not refused.
    notes_without_effect = True

    name: str = result_name("Name of the run; its folder is <out>/<name>", "run", on_change="nothing")
    out: PathText = setting("runs", "Folder that holds all runs.", output="folder", on_change="nothing")
    seed: Seed = setting(0, "Seed of all random numbers.", on_change="run")
    model: ModelConfig = setting(ModelConfig, "", on_change="run")
    data: DataConfig = setting(DataConfig, "")
    augment: AugmentConfig = setting(AugmentConfig, "")
    train: TrainConfig = setting(TrainConfig, "")
    objective: dict[str, Any] = setting(
        dict, "Settings of train.loss, if it has any of its own; --help train.loss=NAME lists them.", on_change="run"
    )
    optimizer: OptimizerConfig = setting(OptimizerConfig, "")
    schedule: RunScheduleConfig = setting(RunScheduleConfig, "")
    engine: EngineConfig = setting(EngineConfig, "", on_change="comparison")
    evaluate: EvaluateConfig = setting(EvaluateConfig, "", on_change="comparison")
    probe: RunProbeConfig = setting(RunProbeConfig, "", on_change="comparison", needs="every")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "", on_change="comparison")
    health: HealthConfig = setting(HealthConfig, "")
    init: InitConfig = setting(InitConfig, "", on_change="run")
    track: TrackConfig = setting(TrackConfig, "", on_change="nothing")
    launch: LaunchConfig = setting(LaunchConfig, "", on_change="nothing")

    @property
    def evaluators(self) -> dict[str, RunProbeConfig]:
        """The section of each evaluator beside "scores", those of the held-out split, by its name in
        train/evaluators.py.

        Each has `every`, its interval, and `measured()`: metrics by their name in metrics.jsonl, the most telling
        first.
        """
        return {"probe": self.probe}

    @property
    def zero_stages(self) -> tuple[int, ...]:
        """The ZeRO stages that fit the precision and the optimizer (`_check_engine`), in order."""
        first = (0, 1, 2) if self.engine.precision == "fp32" else (1, 2)
        return first if self.optimizer.name == "muon" else (*first, 3)

    @property
    def labels(self) -> Labels:
        """What the run does with labels: learn them, learn those that there are, only score classes with them, or
        neither.
        """
        return OBJECTIVES[self.train.loss].labels

    @property
    def needs_labels(self) -> bool:
        """Whether its data set must have labels."""
        return self.labels != "unread"

    def without_effect(self) -> list[str]:
        """A line for each setting that a value of another section takes its effect from; what must be set is named by
        its `needs`.
        """
        decay, freeze = self.optimizer.layer_decay, self.train.freeze
        if decay == 1 or freeze not in _FREEZE_ALL_BLOCKS:
            return []
        return [f"optimizer.layer_decay = {decay:g} has no effect with train.freeze = {freeze}, which trains no block"]

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError with the arithmetic."""
        check_augment(self.augment, "augment.", "model.image_size", self.model.image_size)
        self._check_model_source()
        # For example, LoRA without a rank would train the head alone, and most losses ignore label smoothing.
        refuse_without_effect(self.train, prefix="train.")
        self._check_training()
        self._check_engine()

    def _check_model_source(self) -> None:
        name, weights, freeze, init = self.model.name, self.init.weights, self.train.freeze, self.init
        if (name is None) == (weights is None):
            raise UserError(
                f"model.name = {quoted(name)} and init.weights = {quoted(weights)}: set one of them."
                " model.name=ViT-B/16, say, is a new model; init.weights continues from weights, which determine their"
                " architecture (model.name=null if the file sets it)."
            )
        if self.train.lora_rank and freeze != "backbone":
            raise UserError(
                f"train.lora_rank = {self.train.lora_rank} needs train.freeze=backbone: LoRA is for weights that are"
                " not trained themselves."
            )
        if name is not None:
            implied(name)  # Raises UserError for an unknown one.
            if freeze != "none":
                raise UserError(
                    f"train.freeze = {freeze} needs init.weights: a new model's values are random. Leave it out."
                )
            return
        if init.mean_pool + init.attentive_pool > init.new_head:
            raise UserError(
                "init.mean_pool and init.attentive_pool change what a new head reads: set one of them, with"
                " init.new_head=true."
            )
        if init.attentive_pool and freeze == "backbone":
            raise UserError(
                "train.freeze = backbone would leave the new attention pool of init.attentive_pool at its random"
                " values. Use train.freeze=encoder, which trains the pool and the head."
            )
        usual = ModelConfig().options
        changed = [of for of, value in self.model.options.items() if value != usual[of] and of not in ONLY_TRAIN]
        if changed:
            raise UserError(
                f"init.weights determines the architecture: leave out {', '.join(f'model.{of}' for of in changed)}."
            )

    def _check_training(self) -> None:
        batch, streams = self.train.global_batch, self.data.streams
        if batch % streams:
            raise UserError(
                f"train.global_batch = {batch} is not divisible by data.streams = {streams}. "
                f"Use data.streams={math.gcd(batch, streams)}."
            )
        self.schedule.check_decay("schedule.")
        if self.probe.every.amount:
            self.probe.check_splits("probe.", self.probe.split)
            if not self.probe.probes:
                raise UserError(
                    f"probe.every = {self.probe.every} with probe.shots=0, probe.neighbours=0 and"
                    " probe.rankme_images=0: set one of them."
                )
        if self.health.hang_minutes >= self.engine.timeout_minutes:
            raise UserError(
                f"health.hang_minutes = {self.health.hang_minutes} must be below engine.timeout_minutes = "
                f"{self.engine.timeout_minutes}, after which waiting ranks end without reporting what they wait for."
            )

    def _check_engine(self) -> None:
        engine, freeze = self.engine, self.train.freeze
        if engine.zero_stage not in self.zero_stages:
            raise UserError(
                f"engine.zero_stage = {engine.zero_stage} with engine.precision = {engine.precision} and optimizer.name"
                f" = {self.optimizer.name}: use one of {', '.join(map(str, self.zero_stages))}. Stage 0 in 16 bits"
                " takes a wrong first Adam step in DeepSpeed; Muon multiplies whole matrices, of which stage 3 gives"
                " each rank a part."
            )
        if engine.offload and (engine.zero_stage == 0 or self.optimizer.name == "muon"):
            raise UserError("engine.offload needs engine.zero_stage=1, 2 or 3, and optimizer.name=adam or sgd.")
        if self.optimizer.name == "muon" and freeze in _FREEZE_ALL_BLOCKS:
            raise UserError(
                f"optimizer.name = muon is for the kernels of hidden layers, none of which train.freeze = {freeze}"
                " trains. Use optimizer.name=adam or sgd."
            )


def check_augment(augment: AugmentConfig, prefix: str, size_name: str, image_size: ImageSize | int) -> None:
    """Raise UserError for an empty range, and sizes that do not fit the image's. prefix, size_name: names in the
    message.
    """
    side = min(ImageSize.parse(image_size))
    for smaller, larger in (("area_min", "area_max"), ("aspect_min", "aspect_max")):
        if getattr(augment, smaller) > getattr(augment, larger):
            raise UserError(
                f"{prefix}{smaller} = {getattr(augment, smaller)} must not be above {prefix}{larger} ="
                f" {getattr(augment, larger)}."
            )
    for name in ("resize_to", "eval_resize"):
        if 0 < getattr(augment, name) < side:
            raise UserError(f"{prefix}{name} = {getattr(augment, name)} is smaller than {size_name} = {image_size}.")
    if augment.padding >= (augment.resize_to or side):
        raise UserError(
            f"{prefix}padding = {augment.padding} is a reflection, so it must be below the side of the image."
        )
