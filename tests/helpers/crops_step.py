"""A small LeJEPA and a small SimCLR, and a step of them on a rank's part of a batch."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.data.loading.loader import Batch
from pipeline.model import build, configure
from pipeline.objectives.lejepa import Lejepa, LejepaSettings
from pipeline.objectives.objective import Objective
from pipeline.objectives.simclr import Simclr, SimclrSettings

GIVEN = LejepaSettings(local_views=2, local_size=8, hidden=16, width=6, directions=12)
UNREADABLE = (0, 1, 6)  # Two of the first half, one of the second.


def tiny_lejepa() -> Lejepa:
    torch.manual_seed(0)
    backbone = build(configure("ViT-mu/4", 16, num_classes=0))
    return in_a_run(Lejepa(backbone, GIVEN, seed=5))


def tiny_simclr() -> Simclr:
    torch.manual_seed(0)
    backbone = build(configure("ViT-mu/4", 16, num_classes=0))
    return in_a_run(Simclr(backbone, SimclrSettings(hidden=16, width=6, temperature=0.3)))


def in_a_run(objective: Objective) -> Any:
    """The objective with parameters of no round value, before step 3."""
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    objective.before_step(3)
    return objective.train()


def step_of_tiny_lejepa(
    rank: int, world_size: int, unreadable: tuple[int, ...] = UNREADABLE, fill: int = 0
) -> dict[str, Any]:
    return step_of(tiny_lejepa(), (16, 8), rank, world_size, unreadable, fill)


def step_of_tiny_simclr(
    rank: int, world_size: int, unreadable: tuple[int, ...] = UNREADABLE, fill: int = 0
) -> dict[str, Any]:
    return step_of(tiny_simclr(), (16,), rank, world_size, unreadable, fill)


def step_of(
    objective: Objective,
    sides: tuple[int, ...],
    rank: int,
    world_size: int,
    unreadable: tuple[int, ...] = UNREADABLE,
    fill: int = 0,
) -> dict[str, Any]:
    """Loss, values and gradients of a step on a rank's part of 8 images. sides: of each two views. fill: the pixels of
    unreadable ones.
    """
    draw, rows = np.random.default_rng(0), np.arange(8).reshape(world_size, -1)[rank]
    views = [torch.from_numpy(draw.integers(0, 256, (2, 8, side, side, 3), np.uint8)) for side in sides]
    for view in views:
        view[:, list(unreadable)] = fill
    valid = torch.from_numpy(~np.isin(rows, unreadable))
    batch = Batch(tuple(view[:, rows] for view in views), torch.zeros(len(rows), 0), valid, rows, 0 * rows)
    inputs = objective.inputs(batch, torch.device("cpu"), None)
    loss, values = objective(*inputs)
    loss.backward()
    gradients = {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}
    return {
        "objective": objective,
        "views": inputs.views,
        "facts": inputs.facts,
        "loss": loss.detach(),
        "values": values,
        "gradients": gradients,
    }


def tensors_of_lejepa(rank: int, world_size: int) -> dict[str, Tensor]:
    found = step_of_tiny_lejepa(rank, world_size)
    return {"loss": found["loss"], "sigreg": found["values"]["sigreg"], **found["gradients"]}


def tensors_of_simclr(rank: int, world_size: int) -> dict[str, Tensor]:
    found = step_of_tiny_simclr(rank, world_size)
    return {"loss": found["loss"], **found["gradients"]}
