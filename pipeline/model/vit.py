"""The Vision Transformer (ViT; Dosovitskiy et al., ICLR 2021, arXiv 2010.11929).

An image is cut into patches. Each patch is flattened and projected to a vector, a token. A learned class token is put
in front, position embeddings are added, and a Transformer encoder processes the sequence. The head classifies the image
from the final state of the class token.

    z_0   = [class; x_1 E; x_2 E; ...] + E_pos          Eq. 1   VisionTransformer.encode
    z'_l  = MSA(LN(z_{l-1})) + z_{l-1}                  Eq. 2   Block
    z_l   = MLP(LN(z'_l)) + z'_l                        Eq. 3   Block
    y     = LN(z_L)[class]                              Eq. 4   VisionTransformer.features

Shape letters
    B  batch       N  tokens: the class token, registers if any, then the patches, row by row
    D  width       H  heads, each D/H wide
    C  channels    P  patch side, in pixels
    M  MLP width   K  classes

Where the paper gives no detail, this follows its authors' code (google-research/vision_transformer,
vit_jax/models_vit.py). Of the paper's variants, other position embeddings (`position.py`) and hybrids with
a ResNet in front (`resnet.py`) have files of their own; so have the parts of later ViTs:
LayerScale, layers without biases (`layers.py`), and RoPE (`rope.py`).
"""

from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.architecture.config import Size, ViTConfig
from pipeline.model import position, rope
from pipeline.model.layers import (
    Dense,
    ImageModel,
    attention,
    check_images,
    gelu,
    initialize_head,
    layer_norm,
    lecun_normal,
    new_output,
    new_query_key_value,
    patches_of,
    run_block,
    take_tokens,
)
from pipeline.model.resnet import hybrid_stem, small_stem
from pipeline.model.rope import Rotation


class PatchEmbedding(nn.Conv2d):
    """The linear projection of each patch: on a CPU a convolution with a P x P kernel and stride P, else a product.

    They differ by rounding. A CPU's convolution takes two thirds of the product's time at P = 16; a GPU's reaches a
    fraction of the product's speed.
    """

    convolved_on: tuple[str, ...] = ("cpu",)  # Types of device.

    def __init__(self, channels: int, config: ViTConfig):
        super().__init__(channels, config.width, kernel_size=config.patch_size, stride=config.patch_size)

    def reset_parameters(self) -> None:
        nn.init.zeros_(cast(Tensor, self.bias))

    def forward(self, images: Tensor, kept: Tensor | None = None) -> Tensor:
        """(B, C, height, width) -> (B, rows*columns, D); with `kept`, int64 (B, K), the patches with these numbers
        alone.
        """
        if images.device.type in self.convolved_on:
            embedded = super().forward(images).flatten(2).transpose(1, 2)
            return embedded if kept is None else take_tokens(embedded, kept)
        patches = patches_of(images, self.kernel_size[0])
        if kept is not None:
            patches = take_tokens(patches, kept)
        return F.linear(patches, self.weight.permute(0, 2, 3, 1).flatten(1), self.bias)


class SelfAttention(nn.Module):
    """Multi-head self-attention (ViT paper, Appendix A): softmax(q k^T / sqrt(D/H)) v in each head. (B, N, D) ->
    same.
    """

    def __init__(self, config: ViTConfig, num_tokens: int):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = new_query_key_value(config)  # a dense layer; rows: all of q, all of k, all of v
        self.out = new_output(config, config.width, config.out_bias)  # a dense layer
        self.dropout = nn.Dropout(config.dropout)
        norms = (nn.LayerNorm(config.head_dim, config.layer_norm_eps) if config.qk_norm else None for _ in range(2))
        self.query_norm, self.key_norm = norms
        is_relative = config.positions == "relative"
        self.relative = position.RelativePositions(num_tokens, config.head_dim) if is_relative else None

    def initialize(self, generator: torch.Generator) -> None:
        q, k, v = self.qkv.weight.chunk(3)  # three (D, D) kernels: Xavier's bound for one (3D, D) kernel is smaller
        for kernel in (q, k, v, self.out.weight):
            nn.init.xavier_uniform_(kernel, generator=generator)
        if self.relative is not None:
            nn.init.normal_(self.relative.table, std=0.02, generator=generator)

    def split(self, qkv: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, 3D) -> queries, keys and values of each head, (B, H, N, D/H). rotation: that of RoPE."""
        B, N, _ = qkv.shape
        # unbind before transposing: the gradients of q, k and v are stacked where the dense layer needs them, without a
        # copy.
        q, k, v = qkv.view(B, N, 3, self.num_heads, -1).unbind(2)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if rotation is not None:
            q, k = rope.rotated(q, rotation), rope.rotated(k, rotation)
        return q, k, v

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        B, N, D = x.shape
        q, k, v = self.split(self.qkv(x), rotation)
        logits = None if self.relative is None else self.relative(q)  # added to q k^T / sqrt(D/H)
        mixed = attention(q, k, v, logits)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(B, N, D)))


class AxialAttention(SelfAttention):
    """Self-attention within each row of the patch grid, or within each column. (B, N, D) -> same.

    An Axial-ViT (ViT paper, D.6) has a block along rows and one along columns for each block of a ViT, so that a token
    reaches all h*w patches in two steps: attention costs h*w*(h + w) instead of (h*w)^2, plus a second MLP. The paper
    does not say how a class token would take part, so the head reads the mean of all tokens.
    """

    def __init__(self, config: ViTConfig, along_rows: bool):
        rows, columns = config.grid
        super().__init__(config, num_tokens=columns if along_rows else rows)
        self.grid, self.along_rows = config.grid, along_rows

    def forward(self, x: Tensor, rotation: None = None) -> Tensor:  # type: ignore[override]
        B, N, D = x.shape
        grid = x.view(B, *self.grid, D)
        lines = grid if self.along_rows else grid.transpose(1, 2)  # (B, lines, tokens of a line, D)
        attended = super().forward(lines.reshape(-1, lines.shape[2], D)).view(lines.shape)
        return (attended if self.along_rows else attended.transpose(1, 2)).reshape(B, N, D)


class Mlp(nn.Module):
    """Two dense layers with a GELU between them, applied to each token: D -> M -> D. num_kernels: of the first one."""

    def __init__(self, config: ViTConfig, num_kernels: int = 1):
        super().__init__()
        self.up = Dense(config.width, num_kernels * config.mlp_width, config.mlp_bias)
        self.up.num_kernels = num_kernels
        self.down = new_output(config, config.mlp_width, config.mlp_bias)  # a dense layer
        self.gelu = config.gelu
        self.dropout = nn.Dropout(config.dropout)

    def initialize(self, generator: torch.Generator) -> None:
        for kernel in (self.up.weight, self.down.weight):
            nn.init.xavier_uniform_(kernel, generator=generator)
        for bias in (self.up.bias, self.down.bias):
            if bias is not None:
                nn.init.normal_(bias, std=1e-6, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(gelu(self.up(x), self.gelu))
        return self.dropout(self.down(x))


class SwiGlu(Mlp):
    """A gated MLP (Shazeer, arXiv 2002.05202), applied to each token: (silu(x W_gate) * x W_value) W_down. D -> M -> D.

    M is the width of the product. Two thirds of an MLP's width give as many parameters as that MLP has. DINOv2's g,
    DINOv3's H+ and 7B have it.
    """

    def __init__(self, config: ViTConfig):
        super().__init__(config, num_kernels=2)  # rows of `up`: all of the gate, all of the value

    def initialize(self, generator: torch.Generator) -> None:
        for kernel in (*self.up.weight.chunk(2), self.down.weight):
            nn.init.xavier_uniform_(kernel, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.dropout(self.down(self.dropout(F.silu(gate) * value)))


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, drops a sample's residual branch with probability `rate`.

    The branches that are kept are scaled by 1 / (1 - rate), which preserves the mean. Like dropout, it draws from
    torch's global generator, which the training engine seeds at each step.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        # A tensor, because a number would be a constant of the compiled code: each block would be compiled by itself.
        self.share_kept = torch.tensor(1 - rate, device="cpu") if rate else None

    def forward(self, branch: Tensor) -> Tensor:
        """(B, N, D) -> same"""
        if not self.training or self.share_kept is None:
            return branch
        if torch.compiler.is_compiling():
            kept = torch.rand_like(branch[:, :1, :1], dtype=torch.float32) < self.share_kept
            return branch * (kept / self.share_kept).to(branch.dtype)
        kept = branch.new_empty(len(branch), 1, 1).bernoulli_(1 - self.rate)
        return branch * (kept / (1 - self.rate))


class Block(nn.Module):
    """One pre-norm encoder block: attention, then MLP, each on a normalised input and with a residual. (B, N, D) ->
    same.
    """

    def __init__(self, config: ViTConfig, attention: SelfAttention, drop_path: float):
        super().__init__()
        self.attention_norm = layer_norm(config)
        self.attention = attention
        self.mlp_norm = layer_norm(config)
        self.mlp = SwiGlu(config) if config.swiglu else Mlp(config)
        self.drop_path = DropPath(drop_path)

    def initialize(self, generator: torch.Generator) -> None:
        self.attention.initialize(generator)
        self.mlp.initialize(generator)

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        x = x + self.drop_path(self.attention(self.attention_norm(x), rotation))
        return x + self.drop_path(self.mlp(self.mlp_norm(x)))


class AttentionPooling(nn.Module):
    """Pooling by attention (big_vision, models/vit.py, MAPHead): one learned query attends to all tokens, then an
    MLP.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.probe = nn.Parameter(torch.empty(1, 1, config.width))
        self.query = Dense(config.width, config.width)
        self.key_value = Dense(config.width, 2 * config.width)  # rows: all of k, all of v
        self.out = Dense(config.width, config.width)
        self.mlp_norm = layer_norm(config)
        self.mlp = Mlp(replace(config, layer_scale=None, mlp_bias=True))

    def initialize(self, generator: torch.Generator) -> None:
        for kernel in (self.probe[0], self.query.weight, *self.key_value.weight.chunk(2), self.out.weight):
            nn.init.xavier_uniform_(kernel, generator=generator)
        self.mlp.initialize(generator)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, D)"""
        B, N, D = x.shape
        q = self.query(self.probe).view(1, 1, self.num_heads, -1).transpose(1, 2).expand(B, -1, -1, -1)
        k, v = (part.transpose(1, 2) for part in self.key_value(x).view(B, N, 2, self.num_heads, -1).unbind(2))
        pooled = self.out(attention(q, k, v).reshape(B, D))
        return pooled + self.mlp(self.mlp_norm(pooled))


class VisionTransformer(ImageModel):
    """ViT; by default with a class token and learned 1-D position embeddings, as in the paper.

    Built on the CPU, or on the meta device for shapes alone; the initial values depend on `seed` only.
    `activation_checkpointing = True` recomputes each block in the backward pass: less memory, a third more computation.
    """

    config: ViTConfig

    def __init__(self, config: ViTConfig, seed: int = 0):
        super().__init__(config)
        inputs = config.pixels.num_channels
        self.stem = None if config.stem is None else hybrid_stem(config.stem, inputs)
        if config.small_stem is not None:
            self.stem = small_stem(config.small_stem, inputs)
        self.patch_embedding = PatchEmbedding(inputs if self.stem is None else self.stem.num_channels, config)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width)) if config.has_class_token else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, config.width)) if config.registers else None
        self.positions = position.new_table(config)  # a parameter if learned, a buffer if fixed, or None
        self.dropout = nn.Dropout(config.dropout)
        self.embedding_norm = layer_norm(config) if config.embedding_norm else None
        self.blocks = nn.ModuleList()
        for i in range(config.num_blocks):  # of an axial ViT along rows, columns, rows, columns, ...
            layer = AxialAttention(config, i % 2 == 0) if config.axial else SelfAttention(config, config.num_tokens)
            self.blocks.append(Block(config, layer, config.drop_path * i / max(config.num_blocks - 1, 1)))
        self.norm = layer_norm(config)
        self.pool = AttentionPooling(config) if config.pools_by_attention else None
        pooled = replace(config, representation=False).num_features
        self.representation = Dense(pooled, config.width) if config.representation else None
        self.head = Dense(config.num_features, config.num_classes) if config.num_classes else nn.Identity()

        self.initialize(seed)

    def forward(
        self,
        images: Tensor,
        *,
        any_size: bool = False,
        masked: tuple[Tensor, Tensor] | None = None,
        with_patches: bool = False,
    ) -> Any:
        """(B, C, height, width) floats in [-1, 1] -> (B, K) logits, or (B, D) features if the model has no head.

        The keywords are for objectives:
        any_size: also read images of another size than `config.image_size`, as small views are: positions are resampled
        in each
            call. UserError for a model whose positions cannot be.
        masked: bool (B, rows*columns) and a mask token (1, 1, D), which replaces the embeddings of these patches.
        with_patches: return (logits or features, patch tokens (B, rows*columns, D) after the final LayerNorm).
        Raises ValueError for images of another shape or of an integer type.
        """
        patches = self.embed(images, any_size=any_size)
        if masked is not None:
            patches = torch.where(masked[0][..., None], masked[1].to(patches.dtype), patches)
        tokens = self.encode(patches, self.grid_of(images))
        output = self.head(self.pooled(tokens))
        return (output, tokens[:, -patches.shape[1] :]) if with_patches else output

    def features(self, images: Tensor, *, any_size: bool = False) -> Tensor:
        """(B, C, height, width) -> (B, D), the input of the head.

        It is the class token, the mean of the patch tokens (pool "gap" or "mean"), class token and mean (pool "both":
        2D wide), or the attention pooling of all tokens ("map" or "attentive"), followed by the representation layer
        and its tanh, if there is one.
        """
        return self.pooled(self.encode(self.embed(images, any_size=any_size), self.grid_of(images)))

    def patch_features(self, images: Tensor, *, any_size: bool = False) -> Tensor:
        """(B, C, height, width) -> (B, rows, columns, D), the patch tokens after the final LayerNorm.

        A model that normalises the mean of its tokens (pool_norm) has no norm of single tokens: they are as the last
        block leaves them. any_size: as of `forward`.
        """
        patches, grid = self.embed(images, any_size=any_size), self.grid_of(images)
        return self.encode(patches, grid)[:, -patches.shape[1] :].unflatten(1, grid)

    def pooled(self, tokens: Tensor) -> Tensor:
        """(B, N, D) tokens that `encode` returned -> (B, D), the input of the head."""
        if self.pool is not None:
            pooled = self.pool(tokens)
        elif self.config.pool == "token":
            pooled = tokens[:, 0]
        else:
            pooled = tokens[:, self.config.num_tokens - self.config.num_patches :].mean(1)
            if self.config.pool == "both":
                pooled = torch.cat([tokens[:, 0], pooled], dim=1)
        if self.config.pool_norm:
            pooled = self.norm(pooled)
        return pooled if self.representation is None else torch.tanh(self.representation(pooled))

    def embed(self, images: Tensor, *, any_size: bool = False, kept: Tensor | None = None) -> Tensor:
        """(B, C, height, width) -> (B, rows*columns, D) patch embeddings, without positions.

        kept: int64 (B, K), the numbers of some patches in each image: these alone, (B, K, D).
        """
        check_images(images, self.config.pixels.num_channels, None if any_size else self.config.image_size)
        return self.patch_embedding(images if self.stem is None else self.stem(images), kept)

    def grid_of(self, images: Tensor) -> Size:
        """(rows, columns) of the patches of images (B, C, height, width)."""
        return self.config.grid_at(*images.shape[-2:])

    def encode(self, patches: Tensor, grid: Size | None = None, kept: Tensor | None = None) -> Tensor:
        """(B, rows*columns, D) patch embeddings -> (B, N, D) tokens after the last block and the final LayerNorm.

        grid: (rows, columns) of the patches; None is that of `config.image_size`.
        kept: as of `embed`: `patches` are these alone, (B, K, D), and get the positions of their places. For models
        that `check_encodes_kept` of objectives/mae.py accepts.
        """
        x = patches
        first = 0 if self.class_token is None else 1
        # x.shape[0], because torch.export would turn len(x) into a constant.
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.add_positions(x, block=0, grid=grid, kept=kept)
        if self.registers is not None:  # Darcet et al., arXiv 2309.16588
            x = torch.cat([x[:, :first], self.registers.expand(x.shape[0], -1, -1), x[:, first:]], dim=1)
        rotation = self.rotation(x.device, grid)
        if kept is not None and rotation is not None:
            rotation = rope.of_patches(rotation, kept, x.shape[1] - kept.shape[1])
        x = self.dropout(x)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for i, block in enumerate(self.blocks):
            if i > 0:
                x = self.add_positions(x, block=i, grid=grid)
            x = run_block(block, x, self.activation_checkpointing, rotation)
        return x if self.config.pool_norm else self.norm(x)

    def rotation(self, device: torch.device, grid: Size | None = None) -> Rotation | None:
        """RoPE's rotation of all tokens of an image; None without RoPE."""
        if self.config.rope_base is None:
            return None
        return rope.rotation(self.config, grid or self.config.grid, device)

    def add_positions(self, x: Tensor, block: int, grid: Size | None = None, kept: Tensor | None = None) -> Tensor:
        """Adds the position embeddings that belong before this block; by default only before the first. x -> same
        shape.

        grid: (rows, columns) of the patches; None is that of `config.image_size`. kept: as of `encode`.
        """
        if grid not in (None, self.config.grid):
            self.config.check_any_grid()
        if self.positions is None or (block > 0 and self.config.positions_at == "stem"):
            return x
        tables = position.per_token(self.positions, self.config, grid)  # one, or one for each block
        # DeepSpeed leaves buffers, such as fixed positions, in float32.
        table = tables[block % len(tables)].to(x.dtype)
        if kept is not None:
            first = x.shape[1] - kept.shape[1]  # 1 with a class token, whose position is number 0, else 0
            table = take_tokens(table.expand(len(x), -1, -1), F.pad(first + kept, (first, 0)))
        return x + table

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Initialise as the official code does, with one generator. Not set here: zero biases and class token,
        LayerNorms.

        No-op on the meta device.
        """
        if self.patch_embedding.weight.is_meta:
            return
        generator = torch.Generator("cpu").manual_seed(seed)

        lecun_normal(self.patch_embedding.weight, generator)
        if self.registers is not None:
            nn.init.normal_(self.registers, std=1e-6, generator=generator)  # as in DINOv2
        if isinstance(self.positions, nn.Parameter):
            nn.init.normal_(self.positions, std=0.02, generator=generator)
        for part in filter(None, (*self.blocks, self.pool, self.stem)):
            part.initialize(generator)
        if self.representation is not None:
            lecun_normal(self.representation.weight, generator)
        initialize_head(self.head, self.config.head_bias)


class MaskedViT(VisionTransformer):
    """Masked patch prediction (ViT paper, B.1.2): a ViT that predicts the corrupted half of an image's patches.

    It has a mask token and a head that reads the tokens of the corrupted patches; both are initialised to zero.
    `pipeline/objectives/masked_patches.py` draws which patches are corrupted, and makes the targets. `load` drops the
    mask token and this head: what remains is a plain ViT.
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
