"""Rotary position embeddings (RoPE) in two dimensions, as in DINOv3 (transformers, models/dinov3_vit): no table, any
grid.

The centre of a patch has coordinates y and x in [-1, 1], times 2 pi. Each head's queries and keys of D/H numbers are
rotated in pairs, the number i with the number i + D/2H, by the angles

    y / period_0, ..., y / period_last, x / period_0, ..., x / period_last

with D/4H periods from 1 up to (not including) the base. With `rope_side`, as in EVA-02 and timm, y and x are the
numbers of row and column instead. Class token and registers are not rotated. Other letters as in vit.py.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.architecture.config import Size, ViTConfig

Rotation = tuple[Tensor, Tensor]


def rotation(config: ViTConfig, grid: Size, device: torch.device | None = None) -> Rotation:
    """(cos, sin) of the angles, each (N, D/H) float32, with the angle 0 for tokens before the patches.

    grid: (rows, columns) of the patches.
    """
    assert config.rope_base is not None
    f32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    # Cut, because rounding gives a step of 4/196, say, one number too many.
    periods = config.rope_base ** torch.arange(0, 1, 4 / config.head_dim, **f32)[: config.head_dim // 4]
    if config.rope_side is None:
        unit, axes = 2 * math.pi, [2 * torch.arange(0.5, side, **f32) / side - 1 for side in grid]
    else:
        unit, axes = 1, [torch.arange(side, **f32) / side * (config.rope_side or side) for side in grid]
    centres = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, 2)
    angles = (unit * centres[:, :, None] / periods).flatten(1).tile(2)
    angles = F.pad(angles, (0, 0, config.num_tokens - config.num_patches, 0))
    return angles.cos(), angles.sin()


def of_patches(rotation: Rotation, kept: Tensor, first: int) -> Rotation:
    """(cos, sin) of the `first` tokens before the patches and of some of the patches, each (B, 1, first + K, D/H).

    rotation: of all tokens of an image. kept: int64 (B, K), the numbers of these patches in each image.
    """
    places = torch.cat([torch.arange(first, device=kept.device).expand(len(kept), -1), first + kept], dim=1)
    cos, sin = (table[places][:, None] for table in rotation)
    return cos, sin


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Queries or keys (B, H, N, D/H), rotated; computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotation
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
