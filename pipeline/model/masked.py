"""Masked patch prediction (ViT paper, B.1.2): a ViT that predicts the corrupted half of an image's patches.

`pipeline/objectives/masked_patches.py` draws which patches are corrupted, and makes the targets. `load` drops the mask
token and this head: what remains is a plain ViT.
"""

import torch
from torch import Tensor, nn

from pipeline.architecture.config import ViTConfig
from pipeline.model.layers import Dense, initialize_head, take_tokens
from pipeline.model.vit import VisionTransformer


class MaskedViT(VisionTransformer):
    """A ViT with a mask token and a head that reads the tokens of the corrupted patches; both are initialised to
    zero.
    """

    def __init__(self, config: ViTConfig, seed: int = 0):
        super().__init__(config, seed)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.head = Dense(config.width, config.patch_outputs)
        initialize_head(self.head, config.head_bias)

    def forward(  # type: ignore[override]
        self, images: Tensor, sources: Tensor | None = None, corrupted: Tensor | None = None
    ) -> Tensor:
        """Predictions (B, corrupted patches, `patch_outputs`) from images (B, 3, height, width) in [-1, 1].

        Without `sources` and `corrupted`: the features (B, D) of the whole images, which its head does not read.

        sources: int64 (B, patches), the patch whose embedding each patch gets: its own index, another patch's, or the
        number
            of patches for the mask token.
        corrupted: int64 (B, corrupted patches), indices of the patches to predict.
        """
        if sources is None or corrupted is None:
            return self.features(images)
        patches = self.embed(images)
        B, N, _ = patches.shape
        choices = torch.cat([patches, self.mask_token.expand(B, -1, -1)], dim=1)
        tokens = self.encode(take_tokens(choices, sources))
        return self.head(take_tokens(tokens, tokens.shape[1] - N + corrupted))
