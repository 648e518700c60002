"""A linear layer on the patch tokens of a frozen ViT, and its training, as in DINOv3 (arXiv 2508.10104;
dinov3/eval/segmentation).

Shapes: B images, S their side, C channels, h x w patches, D width, K classes.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeline.evaluate.loaded_model import LoadedModel
from pipeline.evaluate.segmentation.masks import NO_CLASS
from pipeline.model import VisionTransformer, ViTConfig
from pipeline.objectives.parameters.optimizers import learning_rate
from pipeline.settings.commands.segment import SegmentConfig
from pipeline.settings.run import ScheduleConfig

# As in DINOv3: weight decay of AdamW, and share of warm-up steps.
_WEIGHT_DECAY, _WARMUP = 1e-3, 0.0375


@torch.no_grad()
def patch_tokens(loaded: LoadedModel, images: Tensor) -> Tensor:
    """Images (B, S, S, C) of a batch -> float32 (B, D, h, w), the tokens of a ViT's patches after its last block and
    norm.

    A model that normalises the mean of its tokens (pool_norm) has no norm of single tokens: they are as the last block
    leaves them.
    """
    model = loaded.model
    assert isinstance(model, VisionTransformer)
    tokens = model.encode(model.embed(loaded.images(images)))[:, -model.config.num_patches :]
    return tokens.float().transpose(1, 2).unflatten(2, model.config.grid)


class LinearHead(nn.Module):
    """BatchNorm, then a dense layer of each place: (B, D, h, w) -> (B, K, h, w)."""

    def __init__(self, width: int, num_classes: int, seed: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.classify = nn.Conv2d(width, num_classes, 1)
        nn.init.normal_(self.classify.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(cast(Tensor, self.classify.bias))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.norm(tokens))
        return logits


def logits_of(loaded: LoadedModel, head: LinearHead, images: Tensor) -> Tensor:
    """Images (B, S, S, C) of a batch -> (B, K, S, S)."""
    assert isinstance(loaded.model, VisionTransformer)
    return enlarged(head(patch_tokens(loaded, images)), loaded.model.config)


def enlarged(logits: Tensor, config: ViTConfig) -> Tensor:
    """(B, K, h, w) -> (B, K, H, W): linear between the centres of the patches of an image of config.image_size,
    constant outside of them.

    Where patches tile the image this is `interpolate(mode="bilinear", align_corners=False)`; as products of matrices
    its gradient is deterministic on a GPU, too, and it knows of patches that leave pixels unseen.
    """
    step = config.patch_pixels
    rows, columns = (
        between_centres(length, (config.patch_pixels - 1) / 2 + step * torch.arange(number)).to(logits)
        for length, number in zip(config.image_size, config.grid, strict=True)
    )
    return rows @ logits @ columns.T


def between_centres(length: int, centres: Tensor) -> Tensor:
    """Weights of linear interpolation, float32 (length, n): of each pixel 0, 1, ... between the places `centres`, float
    (n,), ascending.
    """
    if len(centres) == 1:
        return torch.ones(length, 1)
    pixels = torch.arange(length, dtype=torch.float64)
    places = centres.double()
    right = torch.searchsorted(places, pixels).clamp(1, len(places) - 1)
    share = ((pixels - places[right - 1]) / (places[right] - places[right - 1])).clamp(0, 1)
    weights = torch.zeros(length, len(places), dtype=torch.float64)
    weights.scatter_(1, right[:, None], share[:, None]).scatter_add_(1, right[:, None] - 1, 1 - share[:, None])
    return weights.float()


def train(
    head: LinearHead, loaded: LoadedModel, crops: Iterator[tuple[Tensor, Tensor]], config: SegmentConfig
) -> Iterator[Tensor]:
    """Train on the crops of all steps. Yields after each the cross-entropy, a mean over the pixels with a class and
    over some 50 steps.
    """
    head.train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=config.lr, weight_decay=_WEIGHT_DECAY)
    schedule, warmup = ScheduleConfig(decay="cosine"), round(_WARMUP * config.steps)
    mean = torch.zeros((), device=loaded.device)
    for step, (images, of_pixels) in enumerate(crops):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, config.lr, step, config.steps, warmup)
        classes = of_pixels.to(loaded.device).long().flatten()
        logits = logits_of(loaded, head, images)
        # As a matrix, because the kernel for images is not deterministic on a GPU.
        total = cross_entropy(logits.movedim(1, -1).flatten(0, 2), classes, ignore_index=NO_CLASS, reduction="sum")
        loss = total / (classes != NO_CLASS).sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() if step == 0 else 0.98 * mean + 0.02 * loss.detach()
        yield mean
