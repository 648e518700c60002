"""A small SimCLR, and a step of it on a rank's part of a batch."""

from typing import Any

import torch
from lejepa_step import UNREADABLE, in_a_run, step_of
from torch import Tensor

from pipeline.model import build, configure
from pipeline.objectives.simclr import Simclr, SimclrSettings


def step_of_tiny_simclr(
    rank: int, world_size: int, unreadable: tuple[int, ...] = UNREADABLE, fill: int = 0
) -> dict[str, Any]:
    """As `step_of`."""
    torch.manual_seed(0)
    backbone = build(configure("ViT-mu/4", 16, num_classes=0))
    objective = in_a_run(Simclr(backbone, SimclrSettings(hidden=16, width=6, temperature=0.3)))
    return step_of(objective, (16,), rank, world_size, unreadable, fill)


def tensors_of_step(rank: int, world_size: int) -> dict[str, Tensor]:
    found = step_of_tiny_simclr(rank, world_size)
    return {"loss": found["loss"], **found["gradients"]}
