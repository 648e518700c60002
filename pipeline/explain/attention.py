"""Attention of a ViT: the weights of each layer, attention rollout, and mean attention distance.

The model itself never stores attention weights. Here they are computed from the queries and keys of a forward pass,
through hooks, so that training is not affected. Shape letters: B images, L layers, H heads, N tokens, h x w patches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pipeline.model import VisionTransformer, ViTConfig, rope
from pipeline.model.vit import AttentionPooling, AxialAttention, Block, SelfAttention

POOLING = "pooling"
_MAX_WEIGHTS = 2**26
OnWeights = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Attention:
    """A summary of the attention in B images. All float32, on the CPU.

    maps: (B, L, H, h, w), attention of each head to each patch: the class token's, or, if the head does not read it,
    the mean of
        all patches'. Attention pooling is one layer more.
    layers: L names.
    rollout: (B, h, w), attention rollout (Abnar & Zuidema 2020): (A + I) / 2 of all layers multiplied.
    distances: (B, blocks, H), mean attention distance in pixels.
    """

    maps: Tensor
    layers: list[str]
    rollout: Tensor
    distances: Tensor


def compute_attention(model: VisionTransformer, images: Tensor, batch: int) -> Attention:
    """The attention in images (B, 3, height, width), as the model reads them; with a progress bar.

    batch: number of images at a time; fewer where a layer would have more than _MAX_WEIGHTS attention weights in
    memory.
    """
    batch = max(1, min(batch, _MAX_WEIGHTS // (model.config.num_heads * model.config.num_tokens**2)))
    parts = []
    for part in tqdm(images.split(batch), desc="attention", unit=" batches", disable=None):
        summary = _Summary(model, part)
        forward_with_attention(model, part, summary.add)
        parts.append(summary.result())
    tensors: Any = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in ("maps", "rollout", "distances")
    }
    return replace(parts[0], **tensors)


class _Summary:
    """Reduces the weights of one layer after another to an `Attention`."""

    def __init__(self, model: VisionTransformer, images: Tensor):
        self.config, self.has_token = model.config, model.config.pool in ("token", "both")
        # The patches come last; before them the class token, and registers, which the head does not read.
        self.first_patch = self.config.num_tokens - self.config.num_patches
        self.patch_distances = patch_distances(self.config).to(images.device)
        self.identity = torch.eye(self.config.num_tokens, device=images.device).expand(len(images), -1, -1)
        self.rollout = self.identity
        # (B, N), the share of each token in the input of the head: the class token, the mean of the patches, or half of
        # each.
        self.read_by_head = torch.zeros(len(images), self.config.num_tokens, device=images.device)
        if self.has_token:
            self.read_by_head[:, 0] = 1
        if self.config.pool != "token":
            self.read_by_head[:, self.first_patch :] = 1 / self.config.num_patches
        if self.config.pool == "both":
            self.read_by_head /= 2
        self.maps: list[Tensor] = []
        self.layers: list[str] = []
        self.distances: list[Tensor] = []

    def add(self, name: str, weights: Tensor) -> None:
        """weights: (B, H, N, N), or (B, H, 1, N) of attention pooling."""
        first = self.first_patch
        queries = weights[:, :, 0] if self.has_token else weights[:, :, first:].mean(2)
        if name == POOLING:
            queries = weights[:, :, 0]
            self.read_by_head = queries.mean(1)
        else:
            self.distances.append((weights[:, :, first:, first:] * self.patch_distances).sum(3).mean(2).cpu())
            self.rollout = (weights.mean(1) + self.identity) / 2 @ self.rollout
        self.maps.append(queries[:, :, first:].unflatten(2, self.config.grid).cpu())
        self.layers.append(name)

    def result(self) -> Attention:
        tokens = torch.einsum("bn,bnm->bm", self.read_by_head, self.rollout)
        rollout = tokens[:, self.first_patch :].unflatten(1, self.config.grid).cpu()
        return Attention(torch.stack(self.maps, 1), self.layers, rollout, torch.stack(self.distances, 1))


@torch.no_grad()
def forward_with_attention(model: VisionTransformer, images: Tensor, on_weights: OnWeights) -> Tensor:
    """The model's output for these images. `on_weights` is called for each layer, in order.

    on_weights: (name, weights), float32 (B, H, N queries, N keys), rows that sum to one; attention pooling has one
    query.
    """
    handles = []
    rotation = model.rotation(images.device)
    for number, block in enumerate(cast(list[Block], model.blocks), start=1):
        hook = partial(_block_hook, on_weights, f"block {number}", block.attention, model.config, rotation)
        handles.append(block.attention.qkv.register_forward_hook(hook))
    if model.pool is not None:
        handles.append(model.pool.key_value.register_forward_hook(partial(_pooling_hook, on_weights, model.pool)))
    try:
        return model(images)
    finally:
        for handle in handles:
            handle.remove()


def _block_hook(
    on_weights: OnWeights,
    name: str,
    attention: SelfAttention,
    config: ViTConfig,
    rotation: rope.Rotation | None,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    qkv: Tensor,
) -> None:
    """Forward hook of `SelfAttention.qkv`."""
    q, k, _ = attention.split(qkv, rotation)
    logits = q.float() @ k.float().transpose(2, 3) / math.sqrt(q.shape[3])
    if attention.relative is not None:
        logits = logits + attention.relative(q).float()
    weights = logits.softmax(3)
    if isinstance(attention, AxialAttention):
        weights = _over_all_tokens(weights, config.grid, attention.along_rows)
    on_weights(name, weights)


def _pooling_hook(
    on_weights: OnWeights,
    pool: AttentionPooling,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    key_value: Tensor,
) -> None:
    """Forward hook of `AttentionPooling.key_value`."""
    q = pool.query(pool.probe).view(1, 1, pool.num_heads, -1).transpose(1, 2).float()
    k = key_value.view(*key_value.shape[:2], 2, pool.num_heads, -1)[:, :, 0].transpose(1, 2).float()
    on_weights(POOLING, (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).softmax(3))


def _over_all_tokens(weights: Tensor, grid: tuple[int, int], along_rows: bool) -> Tensor:
    """(B*lines, H, n, n) within each row or column of the grid -> (B, H, N, N), zero between different lines."""
    (h, w), H, n = grid, weights.shape[1], weights.shape[2]
    lines = torch.arange(h if along_rows else w)
    within = weights.view(-1, len(lines), H, n, n).transpose(0, 1)  # (lines, B, H, n, n)
    full = weights.new_zeros(within.shape[1], H, h, w, h, w)
    if along_rows:
        full[:, :, lines, :, lines, :] = within
    else:
        full[:, :, :, lines, :, lines] = within
    return full.flatten(4).flatten(2, 3)


def patch_distances(config: ViTConfig) -> Tensor:
    """(h*w, h*w) float32: distances between the centres of patches, in pixels."""
    rows, columns = (torch.arange(n, dtype=torch.float32) * config.patch_pixels for n in config.grid)
    centres = torch.cartesian_prod(rows, columns)
    return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")
