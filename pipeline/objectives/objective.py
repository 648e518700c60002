"""What a run learns: the interface of an objective.

An objective is one file of this folder. It says, in this order: the module that is trained, which is the backbone (a model of
`pipeline.model`: what is exported, probed and fine-tuned) and what the objective adds to it; what it reads of a batch; the
loss; what is measured on held-out images. The training loop, the engine and the evaluators know no objective by name.

Shapes: B batch, C channels, H height, W width.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.base.errors import UserError
from pipeline.base.metric import Metric
from pipeline.data.loading.loader import Batch, normalise
from pipeline.data.loading.mix import Mixing
from pipeline.data.loading.views import Views
from pipeline.model import Model
from pipeline.settings.run import RunConfig

BACKBONE = "backbone."
# Before the stored name of a tensor that an objective adds to the backbone.
ADDITION = "objective."


class Inputs(NamedTuple):
    """What an objective reads of a batch, on the device.

    views: float32 (B, 3, H, W) in [-1, 1]; the trainer casts them to the precision of training. facts: other tensors by name, as they are.
    """

    views: tuple[Tensor, ...]
    facts: dict[str, Tensor]


class Objective(nn.Module):
    """A backbone and what is added to it to train it. A subclass has a `loss`; what it does not define has these defaults."""

    # Whether it learns the labels of samples; only then are images mixed in pairs, and a label is needed.
    reads_labels: ClassVar[bool] = False
    # Whether the backbone's output is logits of classes, which are scored as those of `launch/evaluate.py`.
    predicts_classes: ClassVar[bool] = False

    # ------------------------------------------------------------------ settings, views and module
    @classmethod
    def views(cls, config: RunConfig) -> tuple[Views, ...]:
        """The views that it wants of each image, in groups of one size and settings; a batch holds a tensor for each group."""
        return (Views(1, config.model.image_size, config.augment),)

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise UserError for settings of a run that do not fit this objective."""
        if config.augment.mixes_pairs and not cls.reads_labels:
            raise UserError(
                f"train.loss = {config.train.loss} reads no labels: leave out augment.mixup and augment.cutmix."
            )

    @classmethod
    def metrics(cls, config: RunConfig) -> dict[str, Metric]:
        """What is measured on held-out images, the most telling first; {} for nothing. checkpoint.best may be any that is better higher or lower."""
        return {"loss": Metric("loss", "lower")}

    @classmethod
    def values(cls, config: RunConfig) -> dict[str, Metric]:
        """What `loss` returns to log, by name, as "train_alignment"."""
        return {}

    @classmethod
    def of_backbone(cls, config: RunConfig, num_classes: int) -> dict[str, Any]:
        """Fields of a new backbone that this objective determines. num_classes: of the data set."""
        return {"num_classes": 0}

    @classmethod
    def create(cls, config: RunConfig, backbone: Model) -> "Objective":
        """The objective of a run, with its settings."""
        return cls(backbone)

    def __init__(self, backbone: Model) -> None:
        super().__init__()
        self.backbone = backbone

    # ------------------------------------------------------------------ from a batch to the loss
    def inputs(self, batch: Batch, device: torch.device, mixing: Mixing | None) -> Inputs:
        """Returns what `loss` and `measure` read. mixing: how images are mixed in pairs, None for not at all."""
        raise NotImplementedError

    def loss(self, views: tuple[Tensor, ...], facts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the scalar loss, the sum over valid samples divided by B, and scalars to log by name.

        Samples that are not valid must contribute nothing, and random numbers must come from (seed, epoch, sample) or
        (seed, step): then a resumed run continues exactly.
        """
        raise NotImplementedError

    def measure(self, views: tuple[Tensor, ...], facts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns what is measured of each held-out image, (B,) by name; the scores are the means over readable images."""
        raise NotImplementedError

    def forward(
        self,
        views: tuple[Tensor, ...],
        facts: dict[str, Tensor],
        task: Literal["loss", "measure", "backbone"] = "loss",
    ) -> Any:
        """Calls what is named by `task`; "backbone": returns the backbone's output for the first view.

        All go through the one forward of the module, because DeepSpeed gathers the parameters of stage 3 around it.
        """
        if task == "backbone":
            return self.backbone(views[0])
        return self.loss(views, facts) if task == "loss" else self.measure(views, facts)

    # ------------------------------------------------------------------ parameters
    def decayed(self) -> set[str]:
        """Names of the parameters with weight decay: the backbone's, and matrices of what is added."""
        added = {name for name, p in self.named_parameters() if not name.startswith(BACKBONE) and p.ndim > 1}
        return added | {f"{BACKBONE}{name}" for name in self.backbone.weight_decay_mask()}


def stored_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (name in a checkpoint, parameter): the backbone's own name, or objective.NAME for what an objective adds."""
    for name, parameter in module.named_parameters():
        inner = name.removeprefix(BACKBONE)
        yield (inner if inner != name else f"{ADDITION}{name}"), parameter


def normalised(pixels: Tensor, device: torch.device) -> Tensor:
    """uint8 (B, H, W, 3) -> float32 (B, 3, H, W) in [-1, 1] on the device."""
    return normalise(pixels, device, torch.float32)


def mean_of_valid(losses: Tensor, valid: Tensor) -> Tensor:
    """The sum of the losses (B,) of valid samples, divided by B: an unreadable image contributes nothing, and changes no other."""
    return (losses * valid).sum() / valid.shape[0]
