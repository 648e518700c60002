"""What a ViT attends to: each layer's weights, their way through all layers, and how far they reach.

The model computes attention without ever holding its weights; here they are computed again from the queries and keys of
a forward pass, so training is not touched. Shape letters: B images, L layers, H heads, N tokens, h x w patches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from pipeline.model import VisionTransformer, ViTConfig
from pipeline.model.axial import AxialAttention
from pipeline.model.vit import AttentionPooling, Block, SelfAttention

# Weights of one layer that are held at a time, in numbers.
_MOST_NUMBERS = 2**26
POOLING = "pooling"


@dataclass(frozen=True)
class Attention:
    """What the attention of B images comes to. All float32, on the CPU.

    maps: (B, L, H, h, w), of each head, how much it looks at each patch: the class token's weights, or, without a class
        token, the mean of all tokens'. With attention pooling its weights are one layer more.
    layers: L names.
    rollout: (B, h, w), attention rollout (Abnar & Zuidema 2020): through all layers, with residual connections as half
        an identity; product: the same without identity, as the text of the ViT paper (D.8) has it.
    distances: (B, blocks, H), mean attention distance in pixels.
    """

    maps: Tensor
    layers: list[str]
    rollout: Tensor
    product: Tensor
    distances: Tensor


def look(model: VisionTransformer, images: Tensor) -> Attention:
    """images: (B, 3, height, width), as the model reads them; taken in parts that fit into memory."""
    at_once = max(1, _MOST_NUMBERS // (model.config.num_heads * model.config.num_tokens**2))
    return join([_look(model, part) for part in images.split(at_once)])


def join(parts: Sequence[Attention]) -> Attention:
    """That of all their images."""
    return Attention(
        torch.cat([part.maps for part in parts]),
        parts[0].layers,
        torch.cat([part.rollout for part in parts]),
        torch.cat([part.product for part in parts]),
        torch.cat([part.distances for part in parts]),
    )


def _look(model: VisionTransformer, images: Tensor) -> Attention:
    config = model.config
    patches = config.num_tokens - config.grid[0] * config.grid[1]  # the first of them
    between = distances(config).to(images.device)
    maps, layers, reaches = [], [], []
    identity = torch.eye(config.num_tokens, device=images.device).expand(len(images), -1, -1)
    rolled, multiplied = identity, identity
    pooling = None

    def see(name: str, weights: Tensor) -> None:
        nonlocal rolled, multiplied, pooling
        # (B, H, N). Without a class token registers come first, and are read by no head.
        seen = weights[:, :, 0] if model.class_token is not None else weights[:, :, patches:].mean(2)
        maps.append(seen[:, :, patches:].unflatten(2, config.grid).cpu())
        layers.append(name)
        if name == POOLING:
            pooling = weights[:, :, 0].mean(1)
            return
        reaches.append((weights[:, :, patches:, patches:] * between).sum(3).mean(2).cpu())
        mean = weights.mean(1)
        rolled = (mean + identity) / 2 @ rolled
        multiplied = mean @ multiplied

    watch(model, images, see)
    read = _read_by_head(model, len(images)).to(images.device) if pooling is None else pooling
    through = [torch.einsum("bn,bnm->bm", read, all_layers) for all_layers in (rolled, multiplied)]
    rollout, product = (row[:, patches:].unflatten(1, config.grid).cpu() for row in through)
    return Attention(torch.stack(maps, 1), layers, rollout, product, torch.stack(reaches, 1))


def _read_by_head(model: VisionTransformer, num_images: int) -> Tensor:
    """(B, N), how much of each token the head reads: the class token, or all of them alike."""
    num_tokens = model.config.num_tokens
    if model.class_token is None:
        registers = model.config.registers  # first, and read by no head
        read = torch.full((num_images, num_tokens), 1 / (num_tokens - registers))
        read[:, :registers] = 0
        return read
    return nn.functional.one_hot(torch.zeros(num_images, dtype=torch.int64), num_tokens).float()


@torch.no_grad()
def watch(model: VisionTransformer, images: Tensor, see: Callable[[str, Tensor], None]) -> Tensor:
    """The model's output for these images; `see` is shown each layer's attention weights on the way.

    see: (name, weights), float32 (B, H, N queries, N keys), rows summing to one; of attention pooling, one query.
    """
    handles = []
    for number, block in enumerate(cast(list[Block], model.blocks), start=1):
        show = partial(_show_block, see, f"block {number}", block.attention, model.config)
        handles.append(block.attention.qkv.register_forward_hook(show))
    if model.pool is not None:
        handles.append(model.pool.key_value.register_forward_hook(partial(_show_pooling, see, model.pool)))
    try:
        return model(images)
    finally:
        for handle in handles:
            handle.remove()


def _show_block(
    see: Callable[[str, Tensor], None], name: str, attention: SelfAttention, config: ViTConfig,
    module: nn.Module, inputs: tuple[Tensor, ...], qkv: Tensor,
) -> None:  # fmt: skip
    """A hook on `SelfAttention.qkv`, whose output holds what weights are made of."""
    q, k, _ = qkv.view(*qkv.shape[:2], 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    logits = q.float() @ k.float().transpose(2, 3) / math.sqrt(q.shape[3])
    if attention.relative is not None:
        logits = logits + attention.relative(q).float()
    weights = logits.softmax(3)
    see(
        name,
        _of_all_tokens(weights, config.grid, attention.along_rows)
        if isinstance(attention, AxialAttention)
        else weights,
    )


def _show_pooling(
    see: Callable[[str, Tensor], None], pool: AttentionPooling,
    module: nn.Module, inputs: tuple[Tensor, ...], key_value: Tensor,
) -> None:  # fmt: skip
    """A hook on `AttentionPooling.key_value`."""
    q = pool.query(pool.probe).view(1, 1, pool.num_heads, -1).transpose(1, 2).float()
    k = key_value.view(*key_value.shape[:2], 2, pool.num_heads, -1)[:, :, 0].transpose(1, 2).float()
    see(POOLING, (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).softmax(3))


def _of_all_tokens(weights: Tensor, grid: tuple[int, int], along_rows: bool) -> Tensor:
    """(B*lines, H, n, n) within each row or column of the grid -> (B, H, N, N), zero between different ones."""
    (h, w), H, n = grid, weights.shape[1], weights.shape[2]
    lines = torch.arange(h if along_rows else w)
    own = weights.view(-1, len(lines), H, n, n).transpose(0, 1)  # (lines, B, H, n, n)
    whole = weights.new_zeros(own.shape[1], H, h, w, h, w)
    if along_rows:
        whole[:, :, lines, :, lines, :] = own
    else:
        whole[:, :, :, lines, :, lines] = own
    return whole.flatten(4).flatten(2, 3)


def distances(config: ViTConfig) -> Tensor:
    """(h*w, h*w) float32: between the centres of two patches, in pixels."""
    rows, columns = (torch.arange(n, dtype=torch.float32) * config.stride * config.reduction for n in config.grid)
    centres = torch.cartesian_prod(rows, columns)
    return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")
