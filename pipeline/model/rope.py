"""Rotary position embeddings (RoPE) in two dimensions, as in DINOv3 (transformers, models/dinov3_vit): no table, any grid.

The centre of a patch has coordinates y and x in [-1, 1]. Each head's queries and keys of D/H numbers are rotated in pairs, the
number i with the number i + D/2H, by the angles

    2 pi y / period_0, ..., 2 pi y / period_last, 2 pi x / period_0, ..., 2 pi x / period_last

with D/4H periods from 1 up to (not including) the base. Class token and registers are not rotated. Other letters as in vit.py.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.architecture.config import ViTConfig

Rotation = tuple[Tensor, Tensor]


def rotation(config: ViTConfig, grid: tuple[int, int], device: torch.device | None = None) -> Rotation | None:
    """(cos, sin) of the angles, each (N, D/H) float32, with the angle 0 for tokens before the patches; None without RoPE.

    grid: (rows, columns) of the patches.
    """
    if config.rope_base is None:
        return None
    f32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    periods = config.rope_base ** torch.arange(0, 1, 4 / config.head_dim, **f32)
    y, x = (2 * torch.arange(0.5, side, **f32) / side - 1 for side in grid)
    centres = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).view(-1, 2)
    angles = (2 * math.pi * centres[:, :, None] / periods).flatten(1).tile(2)
    angles = F.pad(angles, (0, 0, config.num_tokens - config.num_patches, 0))
    return angles.cos(), angles.sin()


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Queries or keys (B, H, N, D/H), rotated; computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotation
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
