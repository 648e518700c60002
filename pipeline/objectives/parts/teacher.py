"""Published weights as a teacher: a frozen part of the module, for distill.py and crops.py.

ZeRO divides it among the ranks at stage 3. No checkpoint holds it: a start reads its file, and a run is continued with
the same weights only.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.architecture.pixels import PerChannel, Pixels
from pipeline.base.errors import UserError
from pipeline.data.loading.loader import Batch, to_device
from pipeline.data.loading.mix import Mixing
from pipeline.model import Model, read_weights
from pipeline.model.files import find_file
from pipeline.objectives.objective import Facts, Images, Inputs, Objective, PublishedTeacher
from pipeline.settings.quantities import PathText
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import Settings, setting


class TeacherSettings(Settings):
    # Whether they are the same is told by their content.
    teacher: PathText = setting("", on_change="comparison")
    """Weights that are distilled: anything that init.weights accepts but an address of MLflow. They stay as they are.
    """


class TaughtObjective(Objective):
    """An objective that learns from the weights of `objective.teacher`."""

    @classmethod
    def check(cls, config: RunConfig) -> None:
        if not cls.settings(config).teacher:
            raise UserError(
                f"train.loss = {config.train.loss} needs objective.teacher: the weights to distill, such as a run"
                " folder, a .safetensors, or a folder of Hugging Face."
            )
        cls.published(config)
        super().check(config)

    @classmethod
    def check_pixels(cls, config: RunConfig, pixels: Pixels) -> None:
        super().check_pixels(config, pixels)
        read = cls.published(config).config.pixels
        if not read.is_rgb8:
            pixels.refuse_others(
                read, f"a model of {config.data.path}", f"objective.teacher = {cls.settings(config).teacher}"
            )

    @classmethod
    def published(cls, config: RunConfig) -> PublishedTeacher:
        """The weights of `objective.teacher`. Raises UserError."""
        return find_published("objective.teacher", cls.settings(config).teacher)

    frozen_teacher: Model

    def inputs(self, batch: Batch, device: torch.device, mixing: Mixing | None) -> Inputs:
        """Adds, if the teacher reads images of another size or other channels: `seen`, float32 (B, C, H, W) as it reads
        them.
        """
        views, facts = super().inputs(batch, device, mixing)
        own, teacher = self.backbone.config, self.frozen_teacher.config
        seen = views[0] if own.pixels == teacher.pixels else converted(views[0], own.pixels, teacher.pixels)
        if views[0].shape[2:] != teacher.image_size:
            resized = F.interpolate(seen, teacher.image_size, mode="bicubic", antialias=True)
            mean, std = _columns(device, teacher.pixels.mean, teacher.pixels.std)
            seen = resized.clamp(min=-mean / std).clamp(max=(1 - mean) / std)
        return Inputs(views, facts if seen is views[0] else facts | {"seen": seen})


def seen_by_teacher(views: Images, facts: Facts) -> Tensor:
    """The view as the teacher reads it, (B, C, H, W) in the precision of the first view."""
    return facts["seen"].to(views[0].dtype) if "seen" in facts else views[0]


def converted(images: Tensor, own: Pixels, teacher: Pixels) -> Tensor:
    """Images (B, C, H, W) as a model of `own` pixels reads them -> as one of `teacher` pixels does.

    A teacher of 8-bit RGB sees `own.shown` by the recorded range.
    """
    mean, std = _columns(images.device, own.mean, own.std)
    share = images * std + mean
    if (own.channels, own.type) != (teacher.channels, teacher.type):
        share = share[:, list(own.shown)]
    elif (own.low, own.high) != (teacher.low, teacher.high):
        low, high, of_low, of_high = _columns(images.device, own.low, own.high, teacher.low, teacher.high)
        share = ((low + share * (high - low) - of_low) / (of_high - of_low)).clamp(0, 1)
    mean, std = _columns(images.device, teacher.mean, teacher.std)
    return (share - mean) / std


def _columns(device: torch.device, *of_channels: PerChannel) -> tuple[Tensor, ...]:
    """float32 (C, 1, 1) of each tuple of numbers, one for each channel."""
    return tuple(to_device(torch.tensor(numbers), device).view(-1, 1, 1) for numbers in of_channels)


@cache
def find_published(setting: str, teacher: str) -> PublishedTeacher:
    """The weights that a setting names, as this process first finds them: a run's newest checkpoint may be another one
    a moment later. Raises UserError.

    They are remembered without their tensors, because a plan asks for them many times.
    """
    try:
        file = find_file(Path(teacher))
        weights = read_weights(file)
    except (OSError, UserError) as error:
        raise UserError(f"{setting} = {error}") from error
    digest = hashlib.sha256(json.dumps(weights.config.to_dict(), sort_keys=True).encode())
    for name, tensor in sorted(weights.state.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().data)
    return PublishedTeacher(teacher, file, weights.config, weights.extra, digest.hexdigest())
