"""DINO (Caron et al., arXiv 2104.14294): small views of an image say what a teacher, their own average, says of large
ones.

Two global views and several local ones are cut from each image. The student sees all of them, the teacher the global
ones. Both end in a softmax over prototypes (`DinoHead`), and the loss is the cross-entropy of each view of
the student to each other view of the teacher. The teacher's outputs are centred or balanced, or all images would soon
have the same. With `ibot_weight` (`BlockMasks`) and `koleo_weight` it is the recipe of DINOv2 (Oquab et al., arXiv
2304.07193).

Shapes: B batch, V views, D width of the backbone, K prototypes, N patches, M masked patches of an image, R rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import cos, log, pi
from typing import Annotated, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Len
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.metric import Metric
from pipeline.base.random_numbers import Purpose
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.views import Views
from pipeline.model import Config, Model, ViTConfig
from pipeline.objectives.objective import (
    Facts,
    Images,
    Metrics,
    embedding_std,
    every_row,
    mean_among_valid,
    mean_of_valid,
    read_backbone,
)
from pipeline.objectives.parts.across_ranks import gathered, largest, own_rows, summed
from pipeline.objectives.parts.crops import GramAnchored, ViewSettings
from pipeline.settings.quantities import Length, Share, ShareBelow1
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import setting

_SINKHORN_STEPS = 3
# What the student's outputs are divided by, the teacher's in the first step, and the weight of the old running mean, as
# in both papers.
_STUDENT_TEMPERATURE, _FIRST_TEMPERATURE, _CENTRE_MOMENTUM = 0.1, 0.04, 0.9
# Share of the run before which nothing is called a collapse: the features of a new network are alike.
_SETTLED = 0.1
# Of the first large view, the second, and the small ones.
_OfViews = Annotated[list[Share], Len(3, 3)]
_TINY, _LOWEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).min


class DinoSettings(ViewSettings):
    prototypes: int = setting(65_536, min=2, max=2**20)
    """Number of outputs K of the head."""
    hidden: int = setting(2048, min=1, max=2**16)
    """Width of the head's two hidden layers."""
    bottleneck: int = setting(256, min=1, max=2**16)
    """Width of what is compared with the prototypes."""
    blur: _OfViews = setting([1.0, 0.1, 0.5])
    """Probability of blur in the first large view, the second, and the small ones."""
    solarise: _OfViews = setting([0.0, 0.2, 0.0])
    """Probability of solarising the first large view, the second, and the small ones."""
    teacher_temperature: PositiveFloat = 0.04
    """What the teacher's outputs are divided by, after a linear change from 0.04 in the first step; to 0.07."""
    temperature_warmup: Length = Length.parse("10%")
    """How long it changes, in the unit of train.length or %."""
    momentum: ShareBelow1 = 0.996
    """Weight of the teacher's old average in the first step, rising along half a cosine to 1; larger for small batches
    (0.9995 at 256).
    """
    frozen: Length = Length.parse("1%")
    """How long the prototypes are frozen, in the unit of train.length or %; 1 epochs in the paper."""
    centring: Literal["mean", "sinkhorn"] = "mean"
    """Against collapse: subtract a running mean of the teacher's outputs (mean), or balance those of each micro-batch
    over all ranks by 3 iterations of Sinkhorn-Knopp (sinkhorn; DINOv2's).
    """
    ibot_weight: NonNegativeFloat = 0.0
    """Weight of the loss of masked patches (iBOT); 1 in DINOv2, 0: off."""
    ibot_head: Literal["shared", "separate"] = setting("shared", needs="ibot_weight")
    """Head of the patches: that of the image (DINOv2), or one of their own (DINOv3)."""
    koleo_weight: NonNegativeFloat = 0.0
    """Weight of KoLeo, which spreads the features of each large view evenly; 0.1 in DINOv2, 0: off."""


class Dino(GramAnchored):
    """A backbone and a head, a teacher of both, and a centre. With iBOT also a mask token, and a head and a centre for
    patches.
    """

    follows_length = True
    Settings = DinoSettings
    remedy = "lower optimizer.lr, or use objective.centring=sinkhorn"
    temperature: Tensor
    teacher: nn.ModuleDict

    # ------------------------------------------------------------------ settings and views
    @classmethod
    def views(cls, config: RunConfig) -> tuple[Views, ...]:
        given: DinoSettings = cls.settings(config)
        first, second, local = (
            replace(config.augment, blur=blur, solarise=solarise)
            for blur, solarise in zip(given.blur, given.solarise, strict=True)
        )
        size = config.model.image_size
        large = Views(1, size, first), Views(1, size, second)
        return *large, *given.small_views(local), *cls.anchored_views(config, len(large))

    @classmethod
    def check(cls, config: RunConfig) -> None:
        super().check(config)
        for name in ("blur", "solarise"):
            if getattr(config.augment, name):
                raise UserError(
                    f"train.loss = dino has views of its own: set objective.{name} instead of augment.{name}."
                )

    @classmethod
    def check_backbone(cls, config: RunConfig, model: Config) -> None:
        super().check_backbone(config, model)
        if not (weight := cls.settings(config).ibot_weight):
            return
        if not isinstance(model, ViTConfig):
            raise UserError(f"objective.ibot_weight = {weight} masks patches, and a ResNet has none. Use a ViT.")
        if model.pool == "both":
            raise UserError(
                "objective.ibot_weight compares patches by the head of the features, which model.pool = both makes"
                " twice as wide. Use model.pool=token or mean, or objective.ibot_weight=0."
            )

    @classmethod
    def values(cls, config: RunConfig) -> Metrics:
        given: DinoSettings = cls.settings(config)
        found = {"teacher_entropy": Metric(), "teacher_kl": Metric(), "embedding_std": Metric("ratio", "higher")}
        of_terms = {"ibot_loss": given.ibot_weight, "koleo_loss": given.koleo_weight}
        found |= {name: Metric("loss", "lower") for name, weight in of_terms.items() if weight}
        return super().values(config) | found

    # ------------------------------------------------------------------ module
    def __init__(self, backbone: Model, given: DinoSettings, seed: int = 0) -> None:
        super().__init__(backbone)
        self.given, self.progress = given, 0.0
        self.masks = masks = BlockMasks(cast(ViTConfig, backbone.config).grid, seed) if given.ibot_weight else None
        shape = backbone.config.num_features, given.hidden, given.bottleneck, given.prototypes
        self.head = DinoHead(*shape)
        self.patch_head = DinoHead(*shape) if masks and given.ibot_head == "separate" else None
        self.mask_token = nn.Parameter(torch.zeros(1, 1, backbone.config.width)) if masks else None
        self.centres = ("centre", "patch_centre") if masks else ("centre",)
        for name in self.centres:
            self.register_buffer(name, torch.zeros(given.prototypes))
            # Sums of the teacher's outputs in this step; the last element counts them.
            self.register_buffer(f"{name}_sums", torch.zeros(given.prototypes + 1), persistent=False)
        # A tensor, because torch.compile would compile anew for each value of a number.
        self.register_buffer("temperature", torch.full((), given.teacher_temperature), persistent=False)
        self.add_teacher("backbone", "head", *(["patch_head"] if self.patch_head else []))

    def decayed(self) -> set[str]:
        return super().decayed() - {"mask_token"}

    def frozen_steps(self) -> dict[str, int]:
        steps = round(self.lengths.get("objective.frozen", 0) * self.num_steps)
        return super().frozen_steps() | dict.fromkeys(("head.last.", "patch_head.last."), steps)

    # ------------------------------------------------------------------ from a batch to the loss
    def draw(self, batch: Batch, training: bool) -> dict[str, Tensor]:
        return self.masks.draw(batch) if self.masks and training else {}

    def loss(self, views: Images, facts: Facts) -> tuple[Tensor, Facts]:
        given, valid = self.given, facts["valid"]
        whole, both = torch.cat(views[:2]), valid.repeat(2)
        masked = {"masked": (facts["masked"], self.mask_token)} if self.masks else {}
        anchor = self.anchor_patches(views, facts)
        features, patches = read_backbone(self.backbone, whole, bool(self.masks) or anchor is not None, **masked)
        student = self._student(features, views)
        with torch.no_grad():
            teacher_features, teacher_patches = read_backbone(self.teacher["backbone"], whole, bool(self.masks))
            targets = self._targets(self.teacher["head"](teacher_features), both, "centre").view(2, len(valid), -1)
            entropy = torch.special.entr(targets).sum(2).mean(0)
        losses = pair_losses(student, targets)
        total = mean_of_valid(losses, valid)
        values = {
            "teacher_entropy": mean_among_valid(entropy, valid),
            "teacher_kl": mean_among_valid(losses.detach() - entropy, valid),
            "embedding_std": embedding_std(teacher_features, both),
        }
        if self.masks:
            values["ibot_loss"] = self._ibot(patches, teacher_patches, facts)
            total = total + given.ibot_weight * values["ibot_loss"]
        if given.koleo_weight:
            first, second = features.chunk(2)
            values["koleo_loss"] = koleo(first, valid) + koleo(second, valid)
            total = total + given.koleo_weight * values["koleo_loss"]
        return self.with_gram(total, values, patches, anchor, valid)

    def losses(self, views: Images, facts: Facts) -> Tensor:
        whole = torch.cat(views[:2])
        student = self._student(self.backbone(whole), views)
        outputs = self.teacher["head"](self.teacher["backbone"](whole))
        targets = self._targets(outputs, facts["valid"].repeat(2), "centre")
        return pair_losses(student, targets.view(2, -1, targets.shape[1]))

    def _student(self, features: Tensor, views: Images) -> Tensor:
        """float32 (V, B, K): the student's outputs over its temperature. features: of the global views."""
        local = [self.backbone(images, any_size=True) for images in views[2:]]
        outputs = self.head(torch.cat([features, *local])).float() / _STUDENT_TEMPERATURE
        return outputs.view(-1, len(views[0]), outputs.shape[1])

    def _targets(self, outputs: Tensor, counted: Tensor, centre: str) -> Tensor:
        """(R, K) outputs of the teacher -> float32 probabilities; in training, adds to the sums of their centre.

        counted: bool (R,), those that take part in means. centre: the name of its buffer.
        """
        outputs, sums = outputs.float(), getattr(self, f"{centre}_sums")
        if self.training:
            kept = counted.float()
            sums += torch.cat([kept @ outputs, kept.sum()[None]])
            if self.given.centring == "sinkhorn":
                return sinkhorn(outputs, self.temperature, _SINKHORN_STEPS, counted)
        return ((outputs - getattr(self, centre)) / self.temperature).softmax(1)

    def _ibot(self, patches: Tensor, teacher_patches: Tensor, facts: Facts) -> Tensor:
        """The loss of masked patches: the mean over those of an image, then over all global views; those without a mask
        have none.
        """
        weights, name = facts["weights"] * facts["valid"][:, None], "patch_head" if self.patch_head else "head"
        indices = facts["indices"].flatten()
        student = cast(DinoHead, getattr(self, name))(patches.flatten(0, 1).index_select(0, indices)).float()
        with torch.no_grad():
            outputs = self.teacher[name](teacher_patches.flatten(0, 1).index_select(0, indices))
            targets = self._targets(outputs, weights.flatten() > 0, "patch_centre")
        found = _losses(student / _STUDENT_TEMPERATURE, targets)
        return (found * weights.flatten()).sum() / (2 * len(weights))

    # ------------------------------------------------------------------ around a step
    def teacher_momentum(self, step: int) -> float:
        return 1 - (1 - self.given.momentum) * (cos(pi * step / self.num_steps) + 1) / 2

    def before_step(self, step: int) -> None:
        self.progress = step / self.num_steps
        warmup = self.lengths.get("objective.temperature_warmup", 0) * self.num_steps
        rise = self.given.teacher_temperature - _FIRST_TEMPERATURE
        self.temperature.fill_(_FIRST_TEMPERATURE + rise * float(min(1, step / warmup if warmup else 1)))
        for name in self.centres:
            getattr(self, f"{name}_sums").zero_()

    def collapse(self, values: Mapping[str, float]) -> str:
        return super().collapse(values) if self.progress >= _SETTLED else ""

    def after_step(self) -> None:
        for name in self.centres:
            sums, centre = summed(getattr(self, f"{name}_sums")), getattr(self, name)
            mean = torch.where(sums[-1] > 0, sums[:-1] / sums[-1].clamp(min=1), centre)
            centre.lerp_(mean, 1 - _CENTRE_MOMENTUM)


# ---------------------------------------------------------------------- the formulae, as functions of tensors (public:
# names and arguments stay)
def pair_losses(student: Tensor, targets: Tensor) -> Tensor:
    """The loss of each image, (B,): the mean of the cross-entropy over pairs of a view of the teacher and another of
    the student.

    student: (V, B, K), outputs over the temperature; the first two views are the teacher's. targets: (2, B, K),
    probabilities.
    """
    found = _losses(student[:2], targets.flip(0)).sum(0)
    if len(student) > 2:
        found = found + _losses(student[2:], targets.sum(0), total=2).sum(0)
    return found / (2 * len(student) - 2)


def _losses(logits: Tensor, targets: Tensor, total: int = 1) -> Tensor:
    """(..., K), (..., K) -> (...): cross-entropy of softmax(logits) to targets, whose sum over K is `total`."""
    return total * logits.logsumexp(-1) - (targets * logits).sum(-1)


def sinkhorn(outputs: Tensor, temperature: float | Tensor, iterations: int, counted: Tensor | None = None) -> Tensor:
    """Sinkhorn-Knopp: assigns samples to prototypes so that all prototypes have the same share. Collective.

    exp(outputs / temperature) is scaled in turn to equal sums over samples and over prototypes. outputs: (B, K) of this
    rank; the sums are over all ranks. counted: bool (B,), which samples take part; the others get zeros. Returns
    probabilities, float32 (B, K).
    """
    counted = every_row(outputs) if counted is None else counted
    num_samples, num_prototypes = summed(counted.float().sum()).clamp(min=1), outputs.shape[1]
    # Logarithms of the shares, because a sample with outputs far below another's would have shares of 0, and so no
    # target.
    shares = torch.where(counted[:, None], outputs.float() / temperature, -torch.inf)
    for _ in range(iterations):
        most = largest(shares.amax(0)).clamp(min=_LOWEST)
        of_prototypes = most + summed((shares - most).exp().sum(0)).clamp(min=_TINY).log()
        shares = shares - of_prototypes - log(num_prototypes)
        shares = shares - shares.logsumexp(1, keepdim=True).clamp(min=_LOWEST) - num_samples.log()
    return shares.exp() * num_samples


def koleo(features: Tensor, counted: Tensor | None = None) -> Tensor:
    """KoLeo (Sablayrolles et al., arXiv 1806.03198): the mean over B of -log(distance to the nearest other + 1e-8).
    Collective.

    features: (B, D) of this rank, L2-normalised here in float32; the nearest is sought on all ranks. counted: bool
    (B,), which samples take part. Returns a scalar.
    """
    counted = every_row(features) if counted is None else counted
    own = F.normalize(features.float(), dim=1)
    every, of_every = gathered(own), gathered(counted.float()) > 0
    column = torch.arange(len(every), device=own.device)
    with torch.no_grad():
        itself = column == own_rows(own)[:, None]
        closeness, nearest = (own @ every.T).masked_fill(itself | ~of_every, -torch.inf).max(1)
        # A product, because the gradient of indexing adds in any order on a GPU.
        chosen = (nearest[:, None] == column).float()
    distance = torch.linalg.vector_norm(own - chosen @ every, dim=1)
    return mean_of_valid(-(distance + 1e-8).log(), counted & (closeness > -torch.inf))


# ---------------------------------------------------------------------- models
_STD = 0.02  # Initial values: normal, truncated at 2.


class Prototypes(nn.Module):
    """Cosine similarity to K directions: a dense layer without bias whose rows are normalised, and so have the fixed
    gain 1.
    """

    def __init__(self, width: int, prototypes: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, prototypes, bias=False).weight
        _initialise(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, K), in [-1, 1]"""
        directions, units = (F.normalize(vectors.float(), dim=1).to(x.dtype) for vectors in (self.weight, x))
        return F.linear(units, directions)


class DinoHead(nn.Module):
    """Dense, GELU, dense, GELU, dense, then `Prototypes` (DINO, section 3.2): (B, D) -> (B, K)."""

    def __init__(self, inputs: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                _initialise(layer.weight)
                nn.init.zeros_(layer.bias)
        self.last = Prototypes(bottleneck, prototypes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mlp(x))


def _initialise(weight: Tensor) -> None:
    if not weight.is_meta:  # Values are drawn until they are in range, and those of the meta device never are.
        nn.init.trunc_normal_(weight, std=_STD)


_BLOCKS, _REST = Purpose.named("ibot_blocks"), Purpose.named("ibot_rest")
# As in DINOv2: smallest and largest share of a view's patches that are masked, smallest block in patches, smallest and
# largest aspect ratio, tries in a row for a block that adds patches.
_SHARES, _LEAST_BLOCK, _ASPECT, _TRIES = (0.1, 0.5), 4, (0.3, 1 / 0.3), 10


@dataclass(frozen=True)
class BlockMasks:
    """Draws the masks. grid: (rows, columns) of patches."""

    grid: tuple[int, int]
    seed: int

    def draw(self, batch: Batch) -> dict[str, Tensor]:
        """Returns what is masked of a batch. All images have as many indices, so that shapes are fixed.

        masked: bool (2B, N), the patches that the student sees as the mask token, of all first views and then all
        second ones.
        indices: int64 (B, M), the same patches as places in the 2B * N of both views; an image's last ones repeat if it
        has fewer.
        weights: float32 (B, M), of each index in the mean over its image's masked patches; 0 where it repeats.
        """
        B, N, M = len(batch.rows), math.prod(self.grid), self._count(_SHARES[1])
        masked = np.zeros((2 * B, N), np.bool_)
        indices, weights = np.zeros((B, M), np.int64), np.zeros((B, M), np.float32)
        for i, sample in enumerate(zip(batch.epochs.tolist(), batch.rows.tolist(), strict=True)):
            draw = random_numbers.draws(self.seed, _BLOCKS, *sample)
            row = i if draw(0) < 0.5 else B + i
            least, most = _SHARES
            masked[row] = self._mask(*sample, self._count(least + (most - least) * draw(1))).ravel()
            places = np.flatnonzero(masked[row])
            indices[i] = row * N + np.pad(places, (0, M - len(places)), mode="edge")
            weights[i, : len(places)] = 1 / len(places)
        found = {"masked": masked, "indices": indices, "weights": weights}
        return {name: torch.from_numpy(array) for name, array in found.items()}

    def _count(self, share: float) -> int:
        return max(1, int(share * math.prod(self.grid)))

    def _mask(self, epoch: int, sample: int, count: int) -> np.ndarray:
        """bool (rows, columns) with exactly `count` masked patches: blocks, and single patches where no block fits any
        more.
        """
        draw = random_numbers.draws(self.seed, _BLOCKS, epoch, sample)
        (rows, columns), masked = self.grid, np.zeros(self.grid, np.bool_)
        left, tries, number = count, 0, 2
        while left and tries < _TRIES:
            least = min(_LEAST_BLOCK, left)
            area = least + (left - least) * draw(number)
            aspect = _ASPECT[0] * (_ASPECT[1] / _ASPECT[0]) ** draw(number + 1)
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            tries += 1
            if 0 < height < rows and 0 < width < columns:
                top = int((rows - height + 1) * draw(number + 2))
                block = masked[top : top + height, int((columns - width + 1) * draw(number + 3)) :][:, :width]
                added = height * width - int(block.sum())
                if 0 < added <= left:
                    block[:] = True
                    left, tries = left - added, 0
            number += 4
        if left:
            free = np.flatnonzero(~masked)
            order = np.argsort(random_numbers.bits(self.seed, _REST, epoch, sample, free), kind="stable")
            masked.ravel()[free[order[:left]]] = True
        return masked
