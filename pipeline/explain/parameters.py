"""What the weights show without an image: similarity of positions, and principal filters."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model import Model, ResNet, VisionTransformer, rope
from pipeline.model.position import per_token

_MOST_FILTERS = 28  # As in Figure 7 of the ViT paper.


def position_similarity(model: VisionTransformer) -> Tensor:
    """Cosine similarity of the position embeddings of each two patches, float32 (T, h, w, h, w).

    T is 1, or the number of blocks if each has a table of its own (ViT paper, Figure 7, centre). With RoPE and without
    a table it is the cosine of the angle between the rotations of the two places, mean over the pairs of numbers: what
    a query has of an equal key.
    """
    h, w = model.config.grid
    if model.positions is not None:
        patches = per_token(model.positions.detach().float().cpu(), model.config)[:, -h * w :]
    else:
        patches = torch.cat(rope.rotation(model.config, (h, w)), dim=1)[None, -h * w :]
    unit = F.normalize(patches, dim=2)
    return (unit @ unit.transpose(1, 2)).unflatten(2, (h, w)).unflatten(1, (h, w))


def principal_filters(model: Model) -> tuple[Tensor, Tensor, int]:
    """Principal components of the patch embedding's filters, or of the root's in a ResNet or hybrid; at most 28 (ViT
    paper, Figure 7, left).

    Returns (components, float32 (n, C, P, P), of length 1, their largest value positive; shares of the variance, (n,);
    the number of filters).
    """
    stem = model if isinstance(model, ResNet) else model.stem
    first = cast(nn.Conv2d, model.patch_embedding if stem is None else stem.root)
    kernel = first.weight.detach().double().cpu()
    if stem is not None:  # ResNets standardise their kernels.
        deviation, mean = torch.std_mean(kernel, dim=(1, 2, 3), keepdim=True, correction=0)
        kernel = (kernel - mean) / deviation
    filters = kernel.flatten(1)
    _, spread, directions = torch.linalg.svd(filters - filters.mean(0), full_matrices=False)
    # Standardised kernels have no component along their mean: only rounding errors would be drawn of it.
    count = min(_MOST_FILTERS, max(1, int((spread > 1e-6 * spread[0]).sum())))
    directions = directions[:count]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    components = (directions * largest.sign()).unflatten(1, kernel.shape[1:])
    return components.float(), (spread**2 / (spread**2).sum())[:count].float(), len(filters)
