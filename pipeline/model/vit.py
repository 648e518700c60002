"""The Vision Transformer (Dosovitskiy et al., ICLR 2021, arXiv 2010.11929), all of it.

An image is cut into patches; each patch, flattened and projected, is a word; a class token is put in front of the
sentence; a plain Transformer encoder reads it; what has become of the class token describes the image.

    z_0   = [class; x_1 E; x_2 E; ...] + E_pos          Eq. 1   VisionTransformer.encode
    z'_l  = MSA(LN(z_{l-1})) + z_{l-1}                  Eq. 2   Block
    z_l   = MLP(LN(z'_l)) + z'_l                        Eq. 3   Block
    y     = LN(z_L)[class]                              Eq. 4   VisionTransformer.features

Shape letters
    B  batch       N  tokens: the class token, registers if any, then the patches, row by row
    D  width       H  heads, each D/H wide
    C  channels    P  patch side, in pixels
    M  MLP width   K  classes

Where the paper is silent we do as its authors' code does (google-research/vision_transformer, vit_jax/models_vit.py).
What it varies is a line here and has its own file: other positions (`position.py`), a ResNet that is read instead of
pixels (`resnet.py`), attention along rows and columns (`axial.py`).
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.model import position
from pipeline.model.layers import Dense, check_images, lecun_normal
from pipeline.model.resnet import HybridStem
from pipeline.model.variants import ViTConfig


class PatchEmbedding(nn.Conv2d):
    """A convolution with kernel P x P and stride P (less, where patches overlap): one linear map of each patch."""

    def __init__(self, channels: int, config: ViTConfig):
        super().__init__(channels, config.width, kernel_size=config.patch_size, stride=config.stride)

    def reset_parameters(self) -> None:
        pass

    def initialize(self, generator: torch.Generator) -> None:
        lecun_normal(self.weight, generator)
        nn.init.zeros_(cast(Tensor, self.bias))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, rows*columns, D)"""
        return super().forward(images).flatten(2).transpose(1, 2)


class SelfAttention(nn.Module):
    """Multi-head self-attention (ViT paper, Appendix A): softmax(q k^T / sqrt(D/H)) v, in H heads at once."""

    def __init__(self, config: ViTConfig, num_tokens: int):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = Dense(config.width, 3 * config.width)  # rows: all of q, all of k, all of v
        self.out = Dense(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        is_relative = config.positions == "relative"
        self.relative = position.RelativePositions(num_tokens, config.head_dim) if is_relative else None

    def initialize(self, generator: torch.Generator) -> None:
        q, k, v = self.qkv.weight.chunk(3)  # three (D, D) kernels: the bound of one (3D, D) would be smaller
        for kernel in (q, k, v, self.out.weight):
            nn.init.xavier_uniform_(kernel, generator=generator)
        for bias in (self.qkv.bias, self.out.bias):
            nn.init.zeros_(bias)
        if self.relative is not None:
            self.relative.initialize(generator)

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)  # each (B, H, N, D/H)
        logits = None if self.relative is None else self.relative(q)  # added to q k^T / sqrt(D/H)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=logits)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(B, N, D)))


class Mlp(nn.Module):
    """Two dense layers with a GELU between, the same for every token: D -> M -> D."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.up = Dense(config.width, config.mlp_width)
        self.down = Dense(config.mlp_width, config.width)
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.dropout = nn.Dropout(config.dropout)

    def initialize(self, generator: torch.Generator) -> None:
        for kernel in (self.up.weight, self.down.weight):
            nn.init.xavier_uniform_(kernel, generator=generator)
        for bias in (self.up.bias, self.down.bias):
            nn.init.normal_(bias, std=1e-6, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(F.gelu(self.up(x), approximate=self.approximate))
        return self.dropout(self.down(x))


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training a sample skips the branch, with probability `rate`.

    The samples that take it are scaled by 1 / (1 - rate), so that the mean stays. Drawn, like dropout, from torch's
    generator, which the engine seeds for each step.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """(B, N, D) -> same"""
        if not self.training or self.rate == 0:
            return branch
        taken = branch.new_empty(len(branch), 1, 1).bernoulli_(1 - self.rate)
        return branch * (taken / (1 - self.rate))


class Block(nn.Module):
    """One encoder block, pre-norm: each branch reads a normalised copy and adds to the stream. (B, N, D) -> same."""

    def __init__(self, config: ViTConfig, attention: SelfAttention, drop_path: float):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.mlp = Mlp(config)
        self.drop_path = DropPath(drop_path)

    def initialize(self, generator: torch.Generator) -> None:
        self.attention.initialize(generator)
        self.mlp.initialize(generator)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attention(self.attention_norm(x)))
        return x + self.drop_path(self.mlp(self.mlp_norm(x)))


class AttentionPooling(nn.Module):
    """A head's reading of all tokens (big_vision, models/vit.py, MAPHead): one learned query attends to them; an MLP."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.probe = nn.Parameter(torch.empty(1, 1, config.width))
        self.query = Dense(config.width, config.width)
        self.key_value = Dense(config.width, 2 * config.width)  # rows: all of k, all of v
        self.out = Dense(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.mlp = Mlp(config)

    def initialize(self, generator: torch.Generator) -> None:
        for kernel in (self.probe[0], self.query.weight, *self.key_value.weight.chunk(2), self.out.weight):
            nn.init.xavier_uniform_(kernel, generator=generator)
        for bias in (self.query.bias, self.key_value.bias, self.out.bias):
            nn.init.zeros_(bias)
        self.mlp.initialize(generator)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, D)"""
        B, N, D = x.shape
        q = self.query(self.probe).view(1, 1, self.num_heads, -1).transpose(1, 2).expand(B, -1, -1, -1)
        k, v = self.key_value(x).view(B, N, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        read = self.out(F.scaled_dot_product_attention(q, k, v).reshape(B, D))
        return read + self.mlp(self.mlp_norm(read))


class VisionTransformer(nn.Module):
    """ViT. By default with a class token, and learned 1-D positions that are added once.

    Built on the CPU (or on the meta device: shapes only), with initial values that depend on `seed` alone.
    `activation_checkpointing = True` recomputes each block in the backward pass: less memory, a third more work.
    """

    def __init__(self, config: ViTConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False

        self.stem = None if config.stem is None else HybridStem(config.stem)
        self.patch_embedding = PatchEmbedding(3 if self.stem is None else self.stem.num_channels, config)
        has_token = config.pool == "token"
        self.class_token = nn.Parameter(torch.empty(1, 1, config.width)) if has_token else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, config.width)) if config.registers else None
        self.positions = position.new_table(config)  # a parameter; fixed positions are a buffer
        self.dropout = nn.Dropout(config.dropout)
        rates = [config.drop_path * i / max(config.num_blocks - 1, 1) for i in range(config.num_blocks)]
        self.blocks = nn.ModuleList(Block(config, self.new_attention(i), rate) for i, rate in enumerate(rates))
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.pool = AttentionPooling(config) if config.pool == "map" else None
        self.representation = Dense(config.width, config.width) if config.representation else None
        self.head = Dense(config.width, config.num_classes) if config.num_classes else nn.Identity()

        self.initialize(seed)

    def new_attention(self, block: int) -> SelfAttention:
        """Of block number `block`: all tokens attend to all."""
        return SelfAttention(self.config, self.config.num_tokens)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, height, width) floats in [-1, 1] -> (B, K) logits, or (B, D) features when the model has no head.

        Raises ValueError for images of another shape or of an integer type.
        """
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, height, width) -> (B, D), what the head reads: the class token, after the tanh layer if any.

        Without a class token: the mean of the patches' tokens ("gap"), or what attention pooling makes of them ("map").
        """
        tokens = self.encode(self.embed(images))
        if self.pool is not None:
            pooled = self.pool(tokens)
        else:
            pooled = tokens[:, self.config.registers :].mean(1) if self.class_token is None else tokens[:, 0]
        return pooled if self.representation is None else torch.tanh(self.representation(pooled))

    def embed(self, images: Tensor) -> Tensor:
        """(B, 3, height, width) -> (B, rows*columns, D) patch embeddings, as yet without positions."""
        check_images(images, self.config.image_size)
        return self.patch_embedding(images if self.stem is None else self.stem(images))

    def encode(self, patches: Tensor) -> Tensor:
        """(B, rows*columns, D) patch embeddings -> (B, N, D) tokens after the last block and its LayerNorm."""
        x = self.dropout(self.add_registers(self.add_positions(self.add_class_token(patches), block=0)))
        for i, block in enumerate(self.blocks):
            if i > 0:
                x = self.add_positions(x, block=i)
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.norm(x)

    def add_class_token(self, patches: Tensor) -> Tensor:
        """(B, rows*columns, D) -> the class token in front, where the model has one."""
        if self.class_token is None:
            return patches
        # Not len(patches), which torch.export would take as a constant.
        return torch.cat([self.class_token.expand(patches.shape[0], -1, -1), patches], dim=1)

    def add_registers(self, x: Tensor) -> Tensor:
        """-> (B, N, D): the registers after the class token, where the model has them (Darcet et al., arXiv 2309.16588)."""
        if self.registers is None:
            return x
        after = 0 if self.class_token is None else 1
        return torch.cat([x[:, :after], self.registers.expand(x.shape[0], -1, -1), x[:, after:]], dim=1)

    def add_positions(self, x: Tensor, block: int) -> Tensor:
        """(B, N, D) -> same, with the positions that belong before this block: by default once, before the first."""
        if self.positions is None or (block > 0 and self.config.positions_at == "stem"):
            return x
        tables = position.per_token(self.positions, self.config)  # one, or one for each block
        return x + tables[block % len(tables)]

    def weight_decay_mask(self) -> set[str]:
        """Names of the parameters that decay: the kernels of dense layers and of convolutions.

        Biases, norms, the class token and the positions do not (big_vision, optax.py: wd_mults = `.*/kernel$`).
        """
        return {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set every parameter as the official code does, from one generator; does nothing on the meta device."""
        if self.patch_embedding.weight.is_meta:
            return
        generator = torch.Generator("cpu").manual_seed(seed)

        self.patch_embedding.initialize(generator)
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)
        if self.registers is not None:
            nn.init.normal_(self.registers, std=1e-6, generator=generator)  # as DINOv2 does
        if isinstance(self.positions, nn.Parameter):
            nn.init.normal_(self.positions, std=0.02, generator=generator)
        for block in cast(list[Block], self.blocks):
            block.initialize(generator)
        for norm in self.modules():
            if isinstance(norm, nn.LayerNorm):
                norm.reset_parameters()  # weight 1, bias 0
        if self.pool is not None:
            self.pool.initialize(generator)
        if self.stem is not None:
            self.stem.initialize(generator)

        if self.representation is not None:
            lecun_normal(self.representation.weight, generator)
            nn.init.zeros_(self.representation.bias)
        if isinstance(self.head, Dense):
            nn.init.zeros_(self.head.weight)
            nn.init.constant_(self.head.bias, self.config.head_bias)
