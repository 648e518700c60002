"""What a run learns: the interface of an objective.

An objective is one file of this folder, and one line of `OBJECTIVES` in architecture/objectives.py. It says, in this
order: its settings; the module that is trained, which is the backbone (a model of `pipeline.model`: what is exported,
probed and fine-tuned) and what the objective adds to it; what it reads of a batch; the loss; what is measured on
held-out images; what happens around a step; how its parameters are grouped. The training loop, the engine and the
evaluators know no objective by name.

Its small state, such as a running mean, is in persistent float32 buffers (`register_buffer`), which must be the same on
all ranks after each step; they are saved with each checkpoint, as are frozen parameters.

Shapes: B batch, V views of a group, H height, W width.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.architecture.objectives import OBJECTIVES
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.base.metric import Metric
from pipeline.data.loading.loader import Batch, images_to_device, normalise, to_device
from pipeline.data.loading.mix import Mixing, mix_images
from pipeline.data.loading.views import Views
from pipeline.data.mixture.run_data import RunData
from pipeline.model import (
    Config,
    DecoderFacts,
    Model,
    ViTConfig,
    adapted,
    build,
    configure,
    load,
    training_flops_per_image,
)
from pipeline.model.layers import kernel_names
from pipeline.model.weights import ADDITION, first_layer
from pipeline.objectives import on_meta
from pipeline.objectives.parameters.trained import (
    FREEZE_BACKBONE,
    NOTHING,
    add_factors,
    freeze,
    new_factors,
    num_frozen_blocks,
)
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize, Length
from pipeline.settings.run import RunConfig

BACKBONE, TEACHER = "backbone.", "teacher."
# Published weights that an objective learns from. In no checkpoint, because they are in a file of their own
# (`published`).
FROZEN_TEACHER = "frozen_teacher."


# A tensor for each group of views: float32 (V * B, C, H, W), all first views before all second ones.
Images = tuple[Tensor, ...]
# Other tensors of a batch, or what is found of it, by name.
Facts = dict[str, Tensor]
Metrics = dict[str, Metric]


class NoSettings(schema.Settings):
    """The settings of an objective that has none of its own."""


class Inputs(NamedTuple):
    """What an objective reads of a batch, on the device.

    views: a tensor for each group of views, float32 (V * B, C, H, W), all first views before all second ones; the
    trainer casts them to the precision of training. facts: other tensors by name, as they are.
    """

    views: Images
    facts: Facts


class PublishedTeacher(NamedTuple):
    """named: as in the settings. file: where the weights are. extra: what stands beside them, as the names of their
    classes. digest: SHA-256 of their configuration and tensors, whatever the format of the file."""

    named: str
    file: Path
    config: Config
    extra: dict[str, Any]
    digest: str


class Objective(nn.Module):
    """A backbone and what is added to it to train it. A subclass has a `loss`; what it does not define has these
    defaults.
    """

    # What the backbone's output is, which is then scored as by `launch/evaluate.py`: logits of classes, numbers of the
    # data set (`Dataset.targets`), or nothing that is known of an image.
    predicts: ClassVar[Literal["classes", "targets", ""]] = ""
    # Of classes, what makes probabilities of them: "softmax" or "sigmoid".
    loss_kind = ""
    # Whether a run with init.weights continues what such an objective added to them; else only the backbone is loaded.
    continues_additions: ClassVar[bool] = False
    # Whether the backbone reads one view of each image and nothing is added to it: then memory and arithmetic are the
    # model's, from its configuration. Otherwise `loss` is run on the meta device to count them.
    trains_backbone_alone: ClassVar[bool] = False
    # Whether a step depends on `num_steps`, which no other objective may read: then a longer run does not begin as a
    # shorter one, which a study's `cooldown` relies on.
    follows_length: ClassVar[bool] = False

    # ------------------------------------------------------------------ settings, views and module
    # A dataclass of `setting(...)` fields: the section `objective` of a run's settings.
    Settings: ClassVar[type] = NoSettings

    @classmethod
    def settings(cls, config: RunConfig) -> Any:
        """Returns the section `objective` as `Settings`. Raises UserError."""
        return schema.build(cls.Settings, config.objective, f"train.loss = {config.train.loss}", "objective")

    @classmethod
    def lengths_of(cls, config: RunConfig) -> dict[str, Fraction]:
        """Returns train.heads_first and the lengths among its own settings, by dotted name, as shares of the run.
        Raises UserError.
        """
        own = {f"objective.{name}": value for name, value in vars(cls.settings(config)).items()}
        named = {"train.heads_first": config.train.heads_first, **own}.items()
        return {name: config.share_of_run(name, value) for name, value in named if isinstance(value, Length)}

    @classmethod
    def views(cls, config: RunConfig) -> tuple[Views, ...]:
        """The views that it wants of each image, in groups of one size and settings; a batch holds a tensor for each
        group.
        """
        return (Views(1, config.model.image_size, config.augment),)

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise UserError for settings of a run that do not fit this objective."""
        cls.settings(config).check()
        of_labels = {
            "augment.mixup": config.augment.mixup,
            "augment.cutmix": config.augment.cutmix,
            "init.attentive_pool": config.init.attentive_pool,
            "init.fit_head": config.init.fit_head,
        }
        if (given := [name for name, value in of_labels.items() if value]) and not cls.predicts:
            raise UserError(
                f"train.loss = {config.train.loss} predicts no classes: leave out {', '.join(given)}, or use an"
                " objective that does, as softmax."
            )
        if config.train.freeze == FREEZE_BACKBONE and not (cls.predicts or config.train.lora_rank):
            raise UserError(
                f"train.freeze = {FREEZE_BACKBONE} with train.loss = {config.train.loss} trains nothing that is"
                " exported: add train.lora_rank=8, or use train.freeze='all but 2 blocks'."
            )
        cls.lengths_of(config)
        if cls.teacher_momentum is not Objective.teacher_momentum and config.optimizer.ema_decay:
            raise UserError(
                f"train.loss = {config.train.loss} has a teacher, which is the average of all weights: leave out"
                " optimizer.ema_decay."
            )
        if config.model.name:
            cls.check_backbone(config, cls.new_backbone(config, 0))

    @classmethod
    def check_backbone(cls, config: RunConfig, model: Config) -> None:
        """Raise UserError if this backbone cannot be trained with these settings. Called as soon as it is known."""

    @classmethod
    def check_pixels(cls, config: RunConfig, pixels: Pixels) -> None:
        """Raise UserError for settings of a run that do not fit images of these pixels."""
        for group in cls.views(config):
            group.augment.check_views(ImageSize.parse(group.size), pixels)

    @classmethod
    def check_classes(cls, config: RunConfig, num_classes: int, names: Sequence[str]) -> str:
        """Raise UserError for classes of a data set that do not fit this objective; returns a line about those that may
        not, or "".

        names: of the classes, () if they are not known.
        """
        return ""

    @classmethod
    def published(cls, config: RunConfig) -> PublishedTeacher | None:
        """Published weights that it learns from, as `teacher_adaptation` changes them; None for none. Raises UserError.

        They are the submodule `frozen_teacher`, which is in no checkpoint: a run is continued with the same weights
        only.
        """
        return None

    @classmethod
    def teacher_adaptation(cls, config: RunConfig, model: Config) -> dict[str, Any]:
        """How these weights are changed, as arguments of `pipeline.model.load`. model: the backbone's. Raises
        UserError.
        """
        raise NotImplementedError

    @classmethod
    def teacher_config(cls, config: RunConfig, model: Config) -> Config | None:
        """The model of these weights, for the images that it reads; None for none. model: the backbone's."""
        published = cls.published(config)
        if published is None:
            return None
        return adapted(published.config, published.named, **cls.teacher_adaptation(config, model))

    @classmethod
    def read_teacher(cls, config: RunConfig, model: Config) -> Model:
        """The frozen teacher; on the meta device without its weights. model: the backbone's."""
        published, of_teacher = cls.published(config), cls.teacher_config(config, model)
        assert published is not None
        assert of_teacher is not None
        if torch.get_default_device().type == "meta":
            teacher = build(of_teacher)
        else:
            teacher = load(published.file, seed=config.seed, **cls.teacher_adaptation(config, model))
        return teacher.requires_grad_(False).eval()

    @classmethod
    def metrics(cls, config: RunConfig) -> Metrics:
        """What is measured on held-out images, the most telling first; {} for nothing, as where the loss is a property
        of a batch. checkpoint.best may be any that is better higher or lower.
        """
        return {} if OBJECTIVES[config.train.loss].of_whole_batch else {"loss": Metric("loss", "lower")}

    @classmethod
    def values(cls, config: RunConfig) -> Metrics:
        """What `loss` returns to log, by name, exactly."""
        return {}

    @classmethod
    def of_backbone(cls, config: RunConfig, num_classes: int) -> dict[str, Any]:
        """Fields of a new backbone that this objective determines. num_classes: of the data set."""
        return {"num_classes": 0, "representation": False}

    @classmethod
    def new_backbone(cls, config: RunConfig, num_classes: int, pixels: Pixels = RGB8) -> Config:
        """Returns the configuration of a run's new model. Arguments and errors: see `objectives.new_backbone`."""
        assert config.model.name, "config.check refuses a run with neither model.name nor init.weights"
        given = config.model.options | cls.of_backbone(config, num_classes)
        return configure(config.model.name, config.model.image_size, pixels=pixels, **given)

    @classmethod
    def adaptation(cls, config: RunConfig, num_classes: int, pixels: Pixels = RGB8) -> dict[str, Any]:
        """How a run changes the model of init.weights. Arguments: see `objectives.adaptation`."""
        # 0 for an objective that does not predict classes: its own head is not a part of the model.
        predicted = cls.of_backbone(config, num_classes)["num_classes"]
        return {
            "image_size": config.model.image_size,
            "num_classes": predicted if config.init.new_head or not predicted else None,
            "new_head": config.init.new_head and predicted > 0,
            "representation": bool(predicted),
            "mean_pool": config.init.mean_pool,
            "attentive_pool": config.init.attentive_pool,
            "pixels": pixels,
            **config.model.for_weights(),
        }

    @classmethod
    def create(cls, config: RunConfig, backbone: Model) -> "Objective":
        """The objective of a run, with its settings. May run on the meta device, to count parameters and memory."""
        return cls(backbone, cls.settings(config), config.seed)  # type: ignore[call-arg]

    @classmethod
    def of(cls, config: RunConfig, backbone: Model) -> "Objective":
        """`create`, with the parameters frozen that train.freeze and train.heads_first name, and LoRA's factors. Raises
        UserError for what the model does not have.
        """
        cls.check_backbone(config, backbone.config)
        objective, train = cls.create(config, backbone), config.train
        objective.lengths = cls.lengths_of(config)
        objective.new_parts = ("head.", *(["pool."] if config.init.attentive_pool else []))
        if not backbone.config.pixels.is_rgb8:
            objective.new_parts += (first_layer(backbone.state_dict()),)
        freeze(objective.backbone, train.freeze)
        if train.lora_rank:
            objective.lora = new_factors(objective.backbone, train.lora_layers, train.lora_rank, train.lora_alpha)
            add_factors(objective.backbone, objective.lora)
        if objective.teacher is not None:
            objective._teach_trained()
        return objective

    @classmethod
    def training_flops(cls, config: RunConfig, model: Config) -> int:
        """Floating-point operations of training on one image: of all views, what is added and a teacher. model: the
        backbone's.
        """
        model = replace(model, image_size=config.model.image_size)
        if not cls.trains_backbone_alone or config.train.lora_rank:
            return on_meta.training_flops(cls, config, model)
        return training_flops_per_image(model, _trained(config, model))

    def __init__(self, backbone: Model) -> None:
        super().__init__()
        self.backbone = backbone
        # Set by `of`. lengths: what `lengths_of` returns. new_parts: beginnings of names in the backbone.
        self.lora: nn.ModuleDict | None = None
        self.lengths: Mapping[str, Fraction] = {}
        self.new_parts: tuple[str, ...] = ()
        # Set by `add_teacher`.
        self.teacher: nn.ModuleDict | None = None
        # Set by a subclass that learns from published weights (`published`).
        self.frozen_teacher: Model | None = None
        # Steps of the run, set before anything of it is counted or trained; beside `frozen_steps`, read only in a class
        # with `follows_length`.
        self.num_steps = 0

    def add_teacher(self, *names: str) -> None:
        """Add `self.teacher`, an average of submodules of this module: `self.teacher["backbone"]` is that of
        `self.backbone`.

        The last line of a subclass's `__init__`. The teacher gets no gradient; after each step it is refreshed from the
        fp32 average of the trained weights, which a checkpoint holds as "ema", with the momentum that
        `teacher_momentum` gives. Call it under `torch.no_grad`. The average is what is exported and scored.
        """
        self.teacher = nn.ModuleDict({name: copy.deepcopy(getattr(self, name)) for name in names})
        self.teacher.requires_grad_(False)

    def _teach_trained(self) -> None:
        """Give the teacher what is frozen of the backbone, which has no average, and an average of LoRA's factors."""
        assert self.teacher is not None
        backbone = self.teacher["backbone"]
        for name, parameter in self.backbone.named_parameters():
            if not parameter.requires_grad:
                layer, _, own = name.rpartition(".")
                setattr(backbone.get_submodule(layer), own, parameter)
        if self.lora is not None:
            factors = copy.deepcopy(self.lora).requires_grad_(False)
            add_factors(backbone, factors)
            self.teacher["lora"] = factors

    def train(self, mode: bool = True) -> Self:
        """As for any module, but teachers stay in evaluation mode: they have no dropout and no stochastic depth."""
        super().train(mode)
        for teacher in filter(None, (self.teacher, self.frozen_teacher)):
            teacher.eval()
        return self

    def teacher_momentum(self, step: int) -> float:
        """Returns the weight of the old average after step `step` (from 0): mean = momentum * mean + (1 - momentum) *
        weights.
        """
        raise NotImplementedError

    def learn_from(self, data: RunData, head_is_trained: bool) -> str:
        """Called once at each start, before a checkpoint is loaded, with what is trained on; returns a line for the
        log, or "".

        head_is_trained: whether the run begins with a head that predicts already, kept or fitted.
        """
        return ""

    def extra(self) -> dict[str, Any]:
        """Returns what a checkpoint's weights say of what is added to the backbone, plain data."""
        return {}

    def load_additions(self, additions: Mapping[str, Tensor], facts: DecoderFacts) -> str:
        """Copy what init.weights hold beside a backbone, by name; returns a line about it. Only where
        `continues_additions`.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ from a batch to the loss
    def draw(self, batch: Batch, training: bool) -> dict[str, Tensor]:
        """Returns what is drawn at random of each sample, such as masks, in host memory: `inputs` gets it as
        `batch.drawn`.

        Threads of the loader call it while the module trains, so it depends on (seed, epoch, sample) alone. training:
        False for what `measure` reads.
        """
        return {}

    def inputs(self, batch: Batch, device: torch.device, mixing: Mixing | None) -> Inputs:
        """Returns what `loss` and `measure` read. mixing: how images are mixed in pairs, None for not at all.

        By default, of each group of V `views` (V * B, C, H, W), all first views before all second ones, which samples
        are valid, and what was drawn; with `mixing`, the one view mixed, and how much of each is its own
        (`mix_images`).
        """
        groups = [images_to_device(group, device) for group in batch.views]
        views = tuple(self.normalised(group.flatten(0, 1), device) for group in groups)
        facts = {name: to_device(values, device) for name, values in {"valid": batch.valid, **batch.drawn}.items()}
        if mixing is not None:
            (view,) = views
            mixed, facts["own"] = mix_images(view, facts["valid"], mixing)
            views = (mixed,)
        return Inputs(views, facts)

    @property
    def pixels(self) -> Pixels:
        """What the values of the images mean."""
        return self.backbone.config.pixels

    def normalised(self, images: Tensor, device: torch.device) -> Tensor:
        """Images (B, H, W, C) of a batch -> float32 (B, C, H, W) as the backbone reads them, on the device."""
        return normalise(images, device, torch.float32, self.pixels)

    def loss(self, views: Images, facts: Facts) -> tuple[Tensor, Facts]:
        """Returns the scalar loss, the sum over valid samples divided by B, and scalars to log by name.

        Samples that are not valid must contribute nothing, and random numbers must come from (seed, epoch, sample) or
        (seed, step): then a resumed run continues exactly.
        """
        return mean_of_valid(self.losses(views, facts), facts["valid"]), {}

    def measure(self, views: Images, facts: Facts) -> Facts:
        """Returns what is measured of each held-out image, (B,) by name; the scores are the means over readable images.

        Not called where `metrics` is {}, as for a loss that is a property of a batch.
        """
        return {"loss": self.losses(views, facts)}

    def losses(self, views: Images, facts: Facts) -> Tensor:
        """Returns the loss of each image, (B,): all that `loss` and `measure` need by default."""
        raise NotImplementedError(f"{type(self).__name__} needs `losses`, or `loss` and, with metrics, `measure`")

    def forward(
        self,
        views: Images,
        facts: Facts,
        task: Literal["loss", "measure", "backbone"] = "loss",
    ) -> Any:
        """Calls what is named by `task`; "backbone": returns the backbone's output for the first view.

        All go through the one forward of the module, because DeepSpeed gathers the parameters of stage 3 around it.
        """
        if task == "backbone":
            return self.backbone(views[0])
        return self.loss(views, facts) if task == "loss" else self.measure(views, facts)

    # ------------------------------------------------------------------ around a step
    def before_step(self, step: int) -> None:
        """Called before the forward passes of step `step` (from 0); sets what depends on the step alone.

        A resumed run calls it once more for its last step, with the buffers of the checkpoint.
        """

    def after_step(self) -> None:
        """Called on all ranks after a step that was not skipped; updates the small state. Collective."""

    def collapse(self, values: Mapping[str, float]) -> str:
        """Returns what has collapsed and which setting to change, as one sentence, if a log line shows it; else "".

        values: "loss" and what `loss` returned, means over the ranks. It is said when it begins, not at each line.
        """
        return ""

    # ------------------------------------------------------------------ parameters
    def frozen_steps(self) -> dict[str, int]:
        """Returns, by the beginning of a parameter's name, in how many first steps of the run it gets no gradient: by
        default those of `train.heads_first`, for all that is not new.
        """
        if not (steps := round(self.lengths.get("train.heads_first", 0) * self.num_steps)):
            return {}
        names = [name for name, _ in self.backbone.named_parameters() if not name.startswith(self.new_parts)]
        return dict.fromkeys([*(f"{BACKBONE}{name}" for name in names), "lora."], steps)

    def decayed(self) -> set[str]:
        """Names of the parameters with weight decay: the backbone's, and matrices of what is added."""
        trained = dict(trained_parameters(self))
        added = {name for name, p in trained.items() if not name.startswith(BACKBONE) and p.ndim > 1}
        return added | (trained.keys() & {f"{BACKBONE}{name}" for name in kernel_names(self.backbone)})


def _trained(config: RunConfig, model: Config) -> int | None:
    """Number of blocks that a run trains, None for the whole model."""
    if config.train.freeze == NOTHING:
        return None
    if not isinstance(model, ViTConfig):
        return 0
    frozen = num_frozen_blocks(config.train.freeze, model.num_blocks)
    return 0 if frozen is None else model.num_blocks - frozen


def stored_name(name: str) -> str:
    """The name in a checkpoint of an objective's tensor: the backbone's own, or objective.NAME for what the objective
    adds.
    """
    inner = name.removeprefix(BACKBONE)
    return inner if inner != name else f"{ADDITION}{name}"


def trained_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (name, parameter) of the parameters that an optimizer updates."""
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def constants(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of what a checkpoint holds beside the trained parameters: frozen parameters and persistent
    buffers.

    Without the teacher's, which are in the average, and those of published weights.
    """
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not tensor.requires_grad and not name.startswith((TEACHER, FROZEN_TEACHER)):
            assert tensor.is_floating_point(), f"{name} is {tensor.dtype}; checkpoints hold floating-point tensors"
            yield name, tensor


def mean_of_valid(losses: Tensor, valid: Tensor) -> Tensor:
    """The sum of the losses (B,) of valid samples, divided by B: an unreadable image contributes nothing, and changes
    no other.
    """
    return (losses * valid).sum() / valid.shape[0]


def every_row(of: Tensor) -> Tensor:
    """bool (B,), all True: the samples that take part where none is left out."""
    return torch.ones(len(of), dtype=torch.bool, device=of.device)


def read_backbone(model: nn.Module, images: Tensor, with_patches: bool, **masked: Any) -> Any:
    """(features (B, D), patch tokens (B, N, D)) of a model; without the tokens if they are not needed."""
    return model(images, with_patches=True, **masked) if with_patches else (model(images), None)


def mean_among_valid(values: Tensor, valid: Tensor) -> Tensor:
    """The mean of the values (B,) of valid samples, to log; 0 without any."""
    return (values * valid).sum() / valid.sum().clamp(min=1)


def embedding_std(features: Tensor, counted: Tensor) -> Tensor:
    """Standard deviation over samples of L2-normalised features (B, D), root mean square over D, times the root of D.

    1 if they point in all directions alike, 0 if all are the same. counted: bool (B,), which samples take part. Returns
    a scalar.
    """
    units, kept = F.normalize(features.float(), dim=1), counted.float()
    mean = kept @ units / kept.sum().clamp(min=1)
    return (kept @ (units - mean).square() / kept.sum().clamp(min=1)).sum().sqrt()
