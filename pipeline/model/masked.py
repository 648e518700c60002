"""Masked patch prediction (ViT paper, B.1.2): a ViT that reads an image with half of its patches corrupted.

What stands in a corrupted patch's place, and what is asked of it, is drawn outside (`pipeline/objectives/masked_patches.py`). Weights that are
read from a file leave the mask token and this head out: what stays is a plain ViT.
"""

import torch
from torch import Tensor, nn

from pipeline.model.layers import Dense
from pipeline.model.variants import ViTConfig
from pipeline.model.vit import VisionTransformer


class MaskedViT(VisionTransformer):
    """A ViT with a mask token, and a head that reads the token of each corrupted patch. Both begin as zeros, as the class
    token and the head of the plain one."""

    def __init__(self, config: ViTConfig, seed: int = 0):
        super().__init__(config, seed)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.head = Dense(config.width, config.patch_outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, config.head_bias)

    def forward(self, images: Tensor, sources: Tensor, corrupted: Tensor) -> Tensor:  # type: ignore[override]
        """Predictions (B, corrupted patches, `patch_outputs`) from images (B, 3, height, width) in [-1, 1].

        sources: int64 (B, patches), which patch's embedding each patch gets, its own, another's, or number `patches`: the
            mask token.
        corrupted: int64 (B, corrupted patches), those whose tokens the head reads.
        """
        patches = self.embed(images)
        B, N, D = patches.shape
        choices = torch.cat([patches, self.mask_token.expand(B, -1, -1)], dim=1)
        tokens = self.encode(choices.gather(1, sources[..., None].expand(-1, -1, D)))[:, -N:]
        return self.head(tokens.gather(1, corrupted[..., None].expand(-1, -1, D)))
