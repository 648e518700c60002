"""Learned positions on another patch grid (ViT paper, section 3.2)."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = Literal["zoom", "bicubic"]
Grid = tuple[int, int]


def resample_positions(table: Tensor, grid: Grid, kernel: Kernel = "zoom", old_grid: Grid | None = None) -> Tensor:
    """Resize learned positions to another patch grid (ViT paper, section 3.2).

    table: (1, 1 + h*w, D) or (1, h*w, D), floats; the class token's row, if there, is kept as it is.
    grid: (rows, columns) of the new grid; need not be square.
    kernel: "zoom" is what the official code does (scipy.ndimage.zoom of order 1: bilinear, corners aligned);
        "bicubic" is what timm does at run time (antialiased, corners not aligned).
    old_grid: (rows, columns) of the table; without it the table must be square.
    Returns (1, [1 +] rows*columns, D) of the table's dtype. An unchanged grid gives the table itself.
    Raises ValueError when the table is not of the old grid, or not a square grid and no old grid is given.
    """
    num_rows = table.shape[1]
    if old_grid is None:
        # n and n - 1 are never both squares above 1, so the class token's row cannot be mistaken.
        side = math.isqrt(num_rows)
        old_grid = side, side
    num_class_rows = num_rows - old_grid[0] * old_grid[1]
    if num_class_rows not in (0, 1):
        raise ValueError(
            f"a position table of {num_rows} rows is no {old_grid[0]} x {old_grid[1]} grid, with or without a class "
            f"token. Give old_grid=(rows, columns)."
        )
    if grid == old_grid:
        return table

    class_row, patch_rows = table[:, :num_class_rows], table[:, num_class_rows:]
    image = patch_rows.reshape(1, *old_grid, -1).permute(0, 3, 1, 2)  # (1, D, h, w)
    image = image.to(torch.promote_types(table.dtype, torch.float32))  # bf16 would round the corners' weights
    if kernel == "zoom":
        image = F.interpolate(image, size=grid, mode="bilinear", align_corners=True)
    elif kernel == "bicubic":
        image = F.interpolate(image, size=grid, mode="bicubic", antialias=True)
    else:
        raise ValueError(f'kernel = "{kernel}" is unknown: use "zoom" or "bicubic".')
    return torch.cat([class_row, image.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)
