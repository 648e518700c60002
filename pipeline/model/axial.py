"""Axial-ViT (ViT paper, D.6): each block becomes two, one that attends along rows and one along columns.

A token reaches all h*w patches in two steps, so attention costs h*w*(h + w) instead of (h*w)^2, plus a second MLP. The paper
does not say how a class token would take part, so the head reads the mean of all tokens. Letters as in vit.py; h x w patches.
"""

from torch import Tensor

from pipeline.architecture.config import ViTConfig
from pipeline.model.vit import SelfAttention, VisionTransformer


class AxialAttention(SelfAttention):
    """Self-attention within each row of the patch grid, or within each column. (B, N, D) -> same."""

    def __init__(self, config: ViTConfig, along_rows: bool):
        rows, columns = config.grid
        super().__init__(config, num_tokens=columns if along_rows else rows)
        self.grid, self.along_rows = config.grid, along_rows

    def forward(self, x: Tensor, rotation: None = None) -> Tensor:  # type: ignore[override]
        B, N, D = x.shape
        grid = x.view(B, *self.grid, D)
        lines = grid if self.along_rows else grid.transpose(1, 2)  # (B, lines, tokens of a line, D)
        attended = super().forward(lines.reshape(-1, lines.shape[2], D)).view(lines.shape)
        return (attended if self.along_rows else attended.transpose(1, 2)).reshape(B, N, D)


class AxialTransformer(VisionTransformer):
    """A ViT of 2 x depth blocks that attend along rows, columns, rows, columns, ..."""

    def new_attention(self, block: int) -> SelfAttention:
        return AxialAttention(self.config, along_rows=block % 2 == 0)
