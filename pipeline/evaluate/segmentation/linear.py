"""A linear layer on the patch tokens of a frozen ViT, and its training, as in DINOv3 (arXiv 2508.10104; dinov3/eval/segmentation).

Shapes: B images, S their side, h x w patches, D width, L layers, K classes.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeline.evaluate.loaded_model import LoadedModel
from pipeline.evaluate.segmentation.crops import Crops
from pipeline.evaluate.segmentation.masks import NO_CLASS
from pipeline.model import VisionTransformer, ViTConfig
from pipeline.objectives.parameters.optimizers import learning_rate
from pipeline.settings.commands.segment import SegmentConfig
from pipeline.settings.run_sections import ScheduleConfig


class PatchTokens:
    """The tokens of the patches after the last blocks of a ViT, side by side, each normalised by the model's last norm.

    A model that normalises the mean of its tokens (pool_norm) has no norm of single tokens: they are as the blocks leave them.
    """

    def __init__(self, loaded: LoadedModel, layers: int) -> None:
        """loaded: of a VisionTransformer. layers: number of blocks, at most the model's."""
        assert isinstance(loaded.model, VisionTransformer)
        self.loaded, self.model, self.layers = loaded, loaded.model, layers

    @property
    def width(self) -> int:
        """D * L"""
        return self.model.config.width * self.layers

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 (B, S, S, 3) -> float32 (B, D * L, h, w)"""
        seen: list[Tensor] = []
        blocks = [
            block.register_forward_hook(lambda *call: seen.append(call[2]))
            for block in self.model.blocks[-self.layers :]
        ]
        try:
            images = self.loaded.images(pixels)
            self.model.encode(self.model.embed(images))
        finally:
            for hook in blocks:
                hook.remove()
        first = -self.model.config.num_patches
        norm = nn.Identity() if self.model.config.pool_norm else self.model.norm
        tokens = torch.cat([norm(x[:, first:]) for x in seen], dim=2).float()
        return tokens.transpose(1, 2).unflatten(2, self.model.config.grid)


class LinearHead(nn.Module):
    """BatchNorm, then a dense layer of each place: (B, D * L, h, w) -> (B, K, h, w)."""

    def __init__(self, width: int, num_classes: int, seed: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.classify = nn.Conv2d(width, num_classes, 1)
        nn.init.normal_(self.classify.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(cast(Tensor, self.classify.bias))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.norm(tokens))
        return logits


def enlarged(logits: Tensor, config: ViTConfig) -> Tensor:
    """(B, K, h, w) -> (B, K, H, W): linear between the centres of the patches of an image of config.image_size, constant outside of them.

    Where patches tile the image this is `interpolate(mode="bilinear", align_corners=False)`; as products of matrices its gradient is deterministic
    on a GPU, too, and it knows of patches that overlap or leave pixels unseen.
    """
    step = config.stride * config.reduction
    rows, columns = (
        between_centres(length, (config.patch_pixels - 1) / 2 + step * torch.arange(number)).to(logits)
        for length, number in zip(config.image_size, config.grid, strict=True)
    )
    return rows @ logits @ columns.T


def between_centres(length: int, centres: Tensor) -> Tensor:
    """Weights of linear interpolation, float32 (length, n): of each pixel 0, 1, ... between the places `centres`, float (n,), ascending."""
    if len(centres) == 1:
        return torch.ones(length, 1)
    pixels = torch.arange(length, dtype=torch.float64)
    places = centres.double()
    right = torch.searchsorted(places, pixels).clamp(1, len(places) - 1)
    share = ((pixels - places[right - 1]) / (places[right] - places[right - 1])).clamp(0, 1)
    weights = torch.zeros(length, len(places), dtype=torch.float64)
    weights.scatter_(1, right[:, None], share[:, None]).scatter_add_(1, right[:, None] - 1, 1 - share[:, None])
    return weights.float()


class HeadTraining:
    """The head while it learns. `state` and `load` continue it exactly: the next step is number `step`."""

    def __init__(self, tokens: PatchTokens, num_classes: int, config: SegmentConfig) -> None:
        self.tokens, self.config = tokens, config
        self.step, self.loss = 0, torch.zeros((), device=tokens.loaded.device)
        self.head = LinearHead(tokens.width, num_classes, config.seed).to(tokens.loaded.device)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=config.lr, weight_decay=config.weight_decay)

    def run(self, crops: Iterator[Crops]) -> Iterator[int]:
        """Train on the crops of the steps from `step` on; yields the number of steps after each.

        `loss`, float32 on the device, is the cross-entropy, a mean over the pixels with a class and over some 50 steps.
        """
        self.head.train()
        config, schedule = self.config, ScheduleConfig(decay="cosine")
        warmup = round(config.warmup * config.steps)
        for batch in crops:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(schedule, config.lr, self.step, config.steps, warmup)
            classes = batch.classes.to(self.tokens.loaded.device).long().flatten()
            logits = enlarged(self.head(self.tokens(batch.pixels)), self.tokens.model.config)
            # Of a matrix, because the kernel for images is not deterministic on a GPU.
            total = cross_entropy(logits.movedim(1, -1).flatten(0, 2), classes, ignore_index=NO_CLASS, reduction="sum")
            loss = total / (classes != NO_CLASS).sum().clamp(min=1)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.loss = loss.detach() if self.step == 0 else 0.98 * self.loss + 0.02 * loss.detach()
            self.step += 1
            yield self.step

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": self.loss,
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.loss = state["step"], state["loss"]
