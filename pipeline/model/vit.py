"""The Vision Transformer (Dosovitskiy et al., ICLR 2021, arXiv 2010.11929), all of it.

An image is cut into patches; each patch, flattened and projected, is a word; a class token is put in front of the
sentence; a plain Transformer encoder reads it; what has become of the class token describes the image.

    z_0   = [class; x_1 E; x_2 E; ...] + E_pos          Eq. 1   VisionTransformer.encode
    z'_l  = MSA(LN(z_{l-1})) + z_{l-1}                  Eq. 2   Block
    z_l   = MLP(LN(z'_l)) + z'_l                        Eq. 3   Block
    y     = LN(z_L)[class]                              Eq. 4   VisionTransformer.features

Shape letters
    B  batch       N  tokens: the class token, then the patches, row by row
    D  width       H  heads, each D/H wide
    C  channels    P  patch side, in pixels
    M  MLP width   K  classes

Where the paper is silent we do as its authors' code does (google-research/vision_transformer, vit_jax/models_vit.py).
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.model.variants import ViTConfig

LAYER_NORM_EPS = 1e-6  # flax's default; torch's is 1e-5


class Dense(nn.Linear):
    """A linear layer whose values `VisionTransformer.initialize` sets: nothing is drawn from the global generator."""

    def reset_parameters(self) -> None:
        pass


class PatchEmbedding(nn.Conv2d):
    """A convolution with stride P and kernel P x P: one linear map, with bias, of each flattened patch."""

    def __init__(self, patch_size: int, width: int):
        super().__init__(3, width, kernel_size=patch_size, stride=patch_size)

    def reset_parameters(self) -> None:
        pass

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, N-1, D)"""
        return super().forward(images).flatten(2).transpose(1, 2)


class SelfAttention(nn.Module):
    """Multi-head self-attention (ViT paper, Appendix A): softmax(q k^T / sqrt(D/H)) v, in H heads at once."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = Dense(config.width, 3 * config.width)  # rows: all of q, all of k, all of v
        self.out = Dense(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)  # each (B, H, N, D/H)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(B, N, D)))


class Mlp(nn.Module):
    """Two dense layers with a GELU between, the same for every token: D -> M -> D."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.up = Dense(config.width, config.mlp_width)
        self.down = Dense(config.mlp_width, config.width)
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(F.gelu(self.up(x), approximate=self.approximate))
        return self.dropout(self.down(x))


class Block(nn.Module):
    """One encoder block, pre-norm: each branch reads a normalised copy and adds to the stream. (B, N, D) -> same."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.attention = SelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class VisionTransformer(nn.Module):
    """ViT with a class token and learned 1-D positions.

    Built on the CPU (or on the meta device: shapes only), with initial values that depend on `seed` alone.
    `activation_checkpointing = True` recomputes each block in the backward pass: less memory, a third more work.
    """

    def __init__(self, config: ViTConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False

        self.patch_embedding = PatchEmbedding(config.patch_size, config.width)
        self.class_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.positions = nn.Parameter(torch.empty(1, config.num_tokens, config.width))  # row 0 is the class token's
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.representation = Dense(config.width, config.width) if config.representation else None
        self.head = Dense(config.width, config.num_classes) if config.num_classes else nn.Identity()

        self.initialize(seed)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, height, width) floats in [-1, 1] -> (B, K) logits, or (B, D) features when the model has no head.

        Raises ValueError for images of another shape or of an integer type.
        """
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, height, width) -> (B, D), what the head reads: the class token, after the tanh layer if any."""
        class_token = self.encode(self.embed(images))[:, 0]
        return class_token if self.representation is None else torch.tanh(self.representation(class_token))

    def embed(self, images: Tensor) -> Tensor:
        """(B, 3, height, width) -> (B, N-1, D) patch embeddings, as yet without positions."""
        expected = (3, *self.config.image_size)
        if images.shape[1:] != expected or images.ndim != 4:
            raise ValueError(
                f"images are {tuple(images.shape)}, but this model reads (B, {', '.join(map(str, expected))}). "
                f"Resize the images, or load the weights with image_size=(height, width)."
            )
        if not images.is_floating_point():
            raise ValueError(f"images are {images.dtype}, but this model reads floats in [-1, 1]: x / 127.5 - 1.")
        return self.patch_embedding(images)

    def encode(self, patches: Tensor) -> Tensor:
        """(B, N-1, D) patch embeddings -> (B, N, D) tokens after the last block and its LayerNorm."""
        class_token = self.class_token.expand(len(patches), -1, -1)
        x = self.dropout(torch.cat([class_token, patches], dim=1) + self.positions)
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.norm(x)

    def weight_decay_mask(self) -> set[str]:
        """Names of the parameters that decay: the kernels of dense layers and of the patch embedding.

        Biases, LayerNorms, the class token and the positions do not (big_vision, optax.py: wd_mults = `.*/kernel$`).
        """
        return {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set every parameter as the official code does, from one generator; does nothing on the meta device."""
        if self.positions.is_meta:
            return
        generator = torch.Generator("cpu").manual_seed(seed)

        _lecun_normal(self.patch_embedding.weight, generator)
        nn.init.zeros_(cast(Tensor, self.patch_embedding.bias))
        nn.init.zeros_(self.class_token)
        nn.init.normal_(self.positions, std=0.02, generator=generator)

        for block in cast(list[Block], self.blocks):
            attention, mlp = block.attention, block.mlp
            q, k, v = attention.qkv.weight.chunk(3)  # three (D, D) kernels: the bound of one (3D, D) would be smaller
            for kernel in (q, k, v, attention.out.weight, mlp.up.weight, mlp.down.weight):
                nn.init.xavier_uniform_(kernel, generator=generator)
            for bias in (attention.qkv.bias, attention.out.bias):
                nn.init.zeros_(bias)
            for bias in (mlp.up.bias, mlp.down.bias):
                nn.init.normal_(bias, std=1e-6, generator=generator)

        for norm in self.modules():
            if isinstance(norm, nn.LayerNorm):
                norm.reset_parameters()  # weight 1, bias 0

        if self.representation is not None:
            _lecun_normal(self.representation.weight, generator)
            nn.init.zeros_(self.representation.bias)
        if isinstance(self.head, Dense):
            nn.init.zeros_(self.head.weight)
            nn.init.constant_(self.head.bias, self.config.head_bias)


def _lecun_normal(kernel: Tensor, generator: torch.Generator) -> None:
    """Normal with variance 1/fan_in, cut at two sigma, widened so that the variance holds after the cut (flax's)."""
    fan_in = kernel[0].numel()
    std = fan_in**-0.5 / 0.87962566  # the std of a unit normal cut at +-2
    nn.init.trunc_normal_(kernel, std=std, a=-2 * std, b=2 * std, generator=generator)
