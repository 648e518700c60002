"""Attention of a ViT: the weights of each layer, attention rollout, and mean attention distance.

The model itself never stores attention weights. Here they are computed from the queries and keys of a forward pass,
through hooks, so that training is not affected. Shape letters: B images, L layers, H heads, N tokens, h x w patches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from pipeline.model import VisionTransformer, ViTConfig, rope
from pipeline.model.vit import AttentionPooling, AxialAttention, Block, SelfAttention
from pipeline.process.waits import worked

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
    batches = images.split(batch)
    parts = zip(*(_summarise(model, part) for part in worked(batches, "attention", len(batches), "batch")), strict=True)
    maps, rollout, distances = (torch.cat(tensors) for tensors in parts)
    layers = [f"block {number + 1}" for number in range(len(model.blocks))] + [POOLING] * (model.pool is not None)
    return Attention(maps, layers, rollout, distances)


def _summarise(model: VisionTransformer, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(maps, rollout, distances) of `Attention`, of whose layers one after another is in memory."""
    config, has_token = model.config, model.config.pool in ("token", "both")
    # The patches come last; before them the class token, and registers, which the head does not read.
    first = config.num_tokens - config.num_patches
    apart = patch_distances(config).to(images.device)
    identity = torch.eye(config.num_tokens, device=images.device).expand(len(images), -1, -1)
    # (B, N), the share of each token in the input of the head: the class token, the mean of the patches, or half of
    # each.
    read_by_head = torch.zeros(len(images), config.num_tokens, device=images.device)
    if config.pool != "token":
        read_by_head[:, first:] = 1 / config.num_patches
    if has_token:
        read_by_head[:, 0] = 1
    if config.pool == "both":
        read_by_head /= 2
    rollout = identity
    maps: list[Tensor] = []
    distances: list[Tensor] = []

    def add(name: str, weights: Tensor) -> None:
        """weights: (B, H, N, N), or (B, H, 1, N) of attention pooling."""
        nonlocal read_by_head, rollout
        queries = weights[:, :, 0] if has_token or name == POOLING else weights[:, :, first:].mean(2)
        if name == POOLING:
            read_by_head = queries.mean(1)
        else:
            distances.append((weights[:, :, first:, first:] * apart).sum(3).mean(2).cpu())
            rollout = (weights.mean(1) + identity) / 2 @ rollout
        maps.append(queries[:, :, first:].unflatten(2, config.grid).cpu())

    forward_with_attention(model, images, add)
    tokens = torch.einsum("bn,bnm->bm", read_by_head, rollout)
    of_patches = tokens[:, first:].unflatten(1, config.grid).cpu()
    return torch.stack(maps, 1), of_patches, torch.stack(distances, 1)


@torch.no_grad()
def forward_with_attention(model: VisionTransformer, images: Tensor, on_weights: OnWeights) -> Tensor:
    """The model's output for these images. `on_weights` is called for each layer, in order.

    on_weights: (name, weights), float32 (B, H, N queries, N keys), rows that sum to one; attention pooling has one
    query.
    """
    handles = []

    def watch(module: nn.Module, name: str, weights_of: Callable[[Tensor], Tensor]) -> None:
        hook = module.register_forward_hook(lambda _, inputs, output: on_weights(name, weights_of(output)))
        handles.append(hook)

    rotation = model.rotation(images.device)
    for number, block in enumerate(cast(list[Block], model.blocks), start=1):
        weights_of = partial(_block_weights, block.attention, model.config, rotation)
        watch(block.attention.qkv, f"block {number}", weights_of)
    if model.pool is not None:
        watch(model.pool.key_value, POOLING, partial(_pooling_weights, model.pool))
    try:
        return model(images)
    finally:
        for handle in handles:
            handle.remove()


def _block_weights(attention: SelfAttention, config: ViTConfig, rotation: rope.Rotation | None, qkv: Tensor) -> Tensor:
    """qkv: output of `SelfAttention.qkv`."""
    q, k, _ = attention.split(qkv, rotation)
    logits = q.float() @ k.float().transpose(2, 3) / math.sqrt(q.shape[3])
    if attention.relative is not None:
        logits = logits + attention.relative(q).float()
    weights = logits.softmax(3)
    if isinstance(attention, AxialAttention):
        return _over_all_tokens(weights, config.grid, attention.along_rows)
    return weights


def _pooling_weights(pool: AttentionPooling, key_value: Tensor) -> Tensor:
    """key_value: output of `AttentionPooling.key_value`."""
    q = pool.query(pool.probe).view(1, 1, pool.num_heads, -1).transpose(1, 2).float()
    k = key_value.view(*key_value.shape[:2], 2, pool.num_heads, -1)[:, :, 0].transpose(1, 2).float()
    return (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).softmax(3)


def _over_all_tokens(weights: Tensor, grid: tuple[int, int], along_rows: bool) -> Tensor:
    """(B*lines, H, n, n) within each row or column of the grid -> (B, H, N, N), zero between different lines."""
    num_lines = grid[0] if along_rows else grid[1]
    same = torch.eye(num_lines, device=weights.device)
    places = "bHliLj" if along_rows else "bHiljL"
    full = torch.einsum(f"blHij,lL->{places}", weights.unflatten(0, (-1, num_lines)), same)
    return full.flatten(4).flatten(2, 3)


def patch_distances(config: ViTConfig) -> Tensor:
    """(h*w, h*w) float32: distances between the centres of patches, in pixels."""
    rows, columns = (torch.arange(n, dtype=torch.float32) * config.patch_pixels for n in config.grid)
    centres = torch.cartesian_prod(rows, columns)
    return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")
