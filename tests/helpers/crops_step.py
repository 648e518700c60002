"""A small DINOv2, LeJEPA and SimCLR, and a step of them on a rank's part of a batch."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from loaded import inputs_of
from torch import Tensor

from pipeline.data.loading.loader import Batch
from pipeline.model import build, configure
from pipeline.objectives.dino import Dino, DinoSettings
from pipeline.objectives.lejepa import Lejepa, LejepaSettings
from pipeline.objectives.objective import Objective
from pipeline.objectives.simclr import Simclr, SimclrSettings

GIVEN = LejepaSettings(local_views=2, local_size=8, hidden=16, width=6, directions=12)
UNREADABLE = (0, 1, 6)  # Two of the first half, one of the second.


def tiny_dinov2() -> Dino:
    """With Sinkhorn-Knopp, iBOT and KoLeo."""
    given = DinoSettings(
        prototypes=12,
        hidden=16,
        bottleneck=8,
        local_views=2,
        local_size=8,
        ibot_weight=1.0,
        ibot_head="separate",
        koleo_weight=0.1,
        centring="sinkhorn",
        teacher_temperature=0.07,
    )
    torch.manual_seed(0)
    objective = Dino(build(configure("ViT-mu/4", 16, num_classes=0)), given, seed=3)
    objective.num_steps = 10
    return in_a_run(objective)


def tiny_lejepa(**settings: Any) -> Lejepa:
    torch.manual_seed(0)
    backbone = build(configure("ViT-mu/4", 16, num_classes=0))
    return in_a_run(Lejepa(backbone, replace(GIVEN, **settings), seed=5))


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
    rank: int, world_size: int, unreadable: tuple[int, ...] = UNREADABLE, fill: int = 0, **settings: Any
) -> dict[str, Any]:
    return step_of(tiny_lejepa(**settings), [(2, 16), (2, 8)], rank, world_size, unreadable, fill)


def step_of_tiny_simclr(
    rank: int, world_size: int, unreadable: tuple[int, ...] = UNREADABLE, fill: int = 0
) -> dict[str, Any]:
    return step_of(tiny_simclr(), [(2, 16)], rank, world_size, unreadable, fill)


def step_of(
    objective: Objective,
    groups: list[tuple[int, int]],
    rank: int,
    world_size: int,
    unreadable: tuple[int, ...] = UNREADABLE,
    fill: int = 0,
) -> dict[str, Any]:
    """Loss, values and gradients of a step on a rank's part of 8 images. groups: how many views, and their side. fill:
    the pixels of unreadable ones.
    """
    draw, rows = np.random.default_rng(0), np.arange(8).reshape(world_size, -1)[rank]
    views = [torch.from_numpy(draw.integers(0, 256, (n, 8, side, side, 3), np.uint8)) for n, side in groups]
    for view in views:
        view[:, list(unreadable)] = fill
    valid = torch.from_numpy(~np.isin(rows, unreadable))
    batch = Batch(tuple(view[:, rows] for view in views), torch.zeros(len(rows), 0), valid, rows, 0 * rows)
    inputs = inputs_of(objective, batch)
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


def tensors_of_dinov2(rank: int, world_size: int) -> dict[str, Tensor]:
    found = step_of(tiny_dinov2(), [(1, 16), (1, 16), (2, 8)], rank, world_size)
    found["objective"].after_step()
    centres = {name: getattr(found["objective"], name) for name in ("centre", "patch_centre")}
    logged = {name: found["values"][name] for name in ("ibot_loss", "koleo_loss")}
    return {"loss": found["loss"], **logged, **centres, **found["gradients"]}


def tensors_of_lejepa(rank: int, world_size: int) -> dict[str, Tensor]:
    found = step_of_tiny_lejepa(rank, world_size)
    return {"loss": found["loss"], "sigreg": found["values"]["sigreg"], **found["gradients"]}


def tensors_of_simclr(rank: int, world_size: int) -> dict[str, Tensor]:
    found = step_of_tiny_simclr(rank, world_size)
    return {"loss": found["loss"], **found["gradients"]}
