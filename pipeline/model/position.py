"""Position embeddings: tables that are added to the tokens, relative attention, and resampling to another patch grid.

A table is what the model stores: a parameter, or a constant for sine-cosine positions. T is 1, or the number of blocks
if each block has a table of its own. Other letters as in vit.py; h x w patches.

    learned    (T, N, D)         one vector for each token of the sequence, the class token first
    learned2d  (T, h + w, D/2)   one vector for each row, then one for each column; a patch gets both, concatenated
    sincos2d   (1, N, D)         fixed; zeros for the class token; sincos2d_mae is the same with other frequencies
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.architecture.config import Config, Kernel, Size, ViTConfig
from pipeline.base.errors import UserError
from pipeline.base.words import counted

_KERNELS: dict[str, dict[str, Any]] = {  # arguments of F.interpolate
    "zoom": {"mode": "bilinear", "align_corners": True},
    "bicubic": {"mode": "bicubic"},
    "bicubic_antialias": {"mode": "bicubic", "antialias": True},
}


def new_table(config: ViTConfig) -> nn.Parameter | nn.Buffer | None:
    """What a new model stores: an uninitialised parameter, a fixed table (a buffer, not saved), or None."""
    num_tables = config.num_blocks if config.positions_at == "blocks" else 1
    if config.positions == "learned":
        return nn.Parameter(torch.empty(num_tables, config.num_positions, config.width))
    if config.positions == "learned2d":
        return nn.Parameter(torch.empty(num_tables, sum(config.grid), config.width // 2))
    return nn.Buffer(sincos2d(config), persistent=False) if config.positions in ("sincos2d", "sincos2d_mae") else None


def per_token(table: Tensor, config: ViTConfig, grid: Size | None = None) -> Tensor:
    """The table as (T, N, D), to be added to the tokens (without registers, which have no position).

    grid: (rows, columns) of the patches. On another grid than the configuration's, learned positions are resampled
    bicubically, as DINO does for its small views, and fixed ones are computed.
    """
    if grid is not None and grid != config.grid:
        table = _at_grid(table, config, grid)
    if config.positions != "learned2d":
        return table
    (h, w), num_tables = grid or config.grid, len(table)
    rows = table[:, :h, None].expand(-1, -1, w, -1)
    columns = table[:, None, h:].expand(-1, h, -1, -1)
    patches = torch.cat([columns, rows], dim=-1).reshape(num_tables, h * w, config.width)
    return F.pad(patches, (0, 0, int(config.has_class_token), 0))


def sincos2d(config: ViTConfig, grid: Size | None = None, device: torch.device | None = None) -> Tensor:
    """(1, N, D) float32: sin and cos of x, then of y, at D/4 frequencies from 1 down to 1/10,000; x counts columns, y
    rows.

    As in big_vision (models/vit.py, posemb_sincos_2d). sincos2d_mae: as in MoCo v3 and MAE (util/pos_embed.py), whose
    frequencies end one step before 1/10,000. grid: None is the configuration's.
    """
    h, w = grid or config.grid
    quarter = config.width // 4
    steps = quarter if config.positions == "sincos2d_mae" else max(quarter - 1, 1)
    f64: dict[str, Any] = {"dtype": torch.float64, "device": device}
    frequencies = 10_000.0 ** -(torch.arange(quarter, **f64) / steps)
    y, x = torch.meshgrid(torch.arange(h, **f64), torch.arange(w, **f64), indexing="ij")
    angles_x, angles_y = x.reshape(-1, 1) * frequencies, y.reshape(-1, 1) * frequencies
    patches = torch.cat([angles_x.sin(), angles_x.cos(), angles_y.sin(), angles_y.cos()], dim=1)
    return F.pad(patches, (0, 0, int(config.has_class_token), 0))[None].float()


class RelativePositions(nn.Module):
    """Relative attention in one dimension (ViT paper, D.4): a learned key for each offset between two tokens.

    Queries are multiplied with these keys too, and the logits are added before the softmax. The heads of a block share
    one table (Shaw et al. 2018), which the ViT paper does not specify.
    """

    def __init__(self, num_tokens: int, head_dim: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(2 * num_tokens - 1, head_dim))

    def forward(self, q: Tensor) -> Tensor:
        """(B, H, N, D/H) queries -> (B, H, N, N) logits, scaled by 1 / sqrt(D/H)."""
        indices = torch.arange(q.shape[2], device=q.device)
        keys = self.table[indices[:, None] - indices + q.shape[2] - 1]  # (N, N, D/H)
        return torch.einsum("bhqd,qkd->bhqk", q, keys) / math.sqrt(q.shape[3])


def resample_state(state: Mapping[str, Tensor], old: ViTConfig, new: ViTConfig) -> dict[str, Tensor]:
    """A model's state dict with its positions resampled by `new.kernel` to the patch grid of another image size.

    Raises UserError for relative positions, which cannot be resampled: an offset means another distance on another
    grid.
    """
    state = dict(state)
    if old.grid == new.grid:
        return state
    if old.positions == "relative":
        raise UserError(
            f"model: relative positions of a {old.grid[0]} x {old.grid[1]} grid cannot be used on {new.grid[0]} x "
            f"{new.grid[1]}. Keep image_size = {old.image_size[0]} x {old.image_size[1]}."
        )
    if old.positions == "learned":
        state["positions"] = resample_positions(state["positions"], new.grid, new.kernel, old.grid)
    elif old.positions == "learned2d":
        parts = zip(state["positions"].split(old.grid, dim=1), old.grid, new.grid, strict=True)
        resampled = [resample_positions(part, (size, 1), new.kernel, (old_size, 1)) for part, old_size, size in parts]
        state["positions"] = torch.cat(resampled, dim=1)
    return state


def _at_grid(table: Tensor, config: ViTConfig, grid: Size) -> Tensor:
    """The table of a configuration for another grid, with a gradient: (T, ...) as the model stores it.

    A product with the kernel's weights, because the gradient of F.interpolate is not deterministic on a GPU, and a
    resumed run must be exact.
    """
    if config.positions in ("sincos2d", "sincos2d_mae"):
        return sincos2d(config, grid, table.device).to(table.dtype)
    (old_h, old_w), values = config.grid, table.to(torch.promote_types(table.dtype, torch.float32))
    by_row, by_column = (_weights(config, *sizes, values) for sizes in zip(config.grid, grid, strict=True))
    if config.positions == "learned2d":
        rows, columns = values.split(config.grid, dim=1)
        return torch.cat([by_row @ rows, by_column @ columns], dim=1).to(table.dtype)
    first = values.shape[1] - old_h * old_w  # 1 with a class token
    patches = values[:, first:].unflatten(1, config.grid)  # (T, h, w, D)
    patches = torch.einsum("rh,cw,thwd->trcd", by_row, by_column, patches).flatten(1, 2)
    return torch.cat([values[:, :first], patches], dim=1).to(table.dtype)


def _weights(config: ViTConfig, old: int, new: int, like: Tensor) -> Tensor:
    """(new, old): the weights by which one side of a grid is resampled; each row sums to 1."""
    if like.is_meta:  # where the kernel would be taken apart into hundreds of operators, which takes a plan seconds
        return like.new_empty(new, old)
    unit = torch.eye(old, dtype=like.dtype, device=like.device)[None, None]
    kernel = "bicubic" if config.kernel == "zoom" else config.kernel
    return F.interpolate(unit, size=(new, old), **_KERNELS[kernel])[0, 0]


def resizing_notes(old: Config, new: Config) -> list[str]:
    """Lines about pixels that no patch of the new configuration covers, and about what `resample_state` does."""
    if not isinstance(old, ViTConfig) or not isinstance(new, ViTConfig):
        return []
    notes = []
    if any(new.unseen):
        notes.append(
            f"image_size = {new.image_size[0]} x {new.image_size[1]}: patches of {new.patch_pixels} pixels leave the"
            f" last {counted(new.unseen[0], 'row')} and {counted(new.unseen[1], 'column')} unseen"
        )
    if old.grid != new.grid and old.positions in ("learned", "learned2d"):
        before, after = (f"{rows} x {columns}" for rows, columns in (old.grid, new.grid))
        notes.append(f"positions: {before} resampled to {after} by the kernel {new.kernel}")
    return notes


def resample_positions(table: Tensor, grid: Size, kernel: Kernel, old_grid: Size) -> Tensor:
    """Resize learned positions to another patch grid (ViT paper, section 3.2).

    table: (T, 1 + h*w, D) or (T, h*w, D), floats; the row of the class token, if any, is kept as it is.
    grid: (rows, columns) of the new grid; need not be square.
    kernel: "zoom" is the official code's (scipy.ndimage.zoom of order 1: bilinear, corners aligned); "bicubic" is that
    of
        Hugging Face's ViT and of DINOv2 at run time, "bicubic_antialias" that of timm and of DINOv2 with registers
        (corners not aligned).
    old_grid: (rows, columns) of the table.
    Returns (T, [1 +] rows*columns, D) in the table's dtype; the table itself if the grid does not change.
    """
    num_class_rows = table.shape[1] - old_grid[0] * old_grid[1]
    assert num_class_rows in (0, 1), f"a table of {table.shape[1]} rows is not of a grid {old_grid}"
    if grid == old_grid:
        return table

    class_row, patch_rows = table[:, :num_class_rows], table[:, num_class_rows:]
    image = patch_rows.reshape(len(table), *old_grid, -1).permute(0, 3, 1, 2)  # (T, D, h, w)
    image = image.to(torch.promote_types(table.dtype, torch.float32))  # bf16 would round the interpolation weights
    image = F.interpolate(image, size=grid, **_KERNELS[kernel])
    return torch.cat([class_row, image.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)
