"""The configurations of the models: `ViTConfig` and `ResNetConfig`, where each field of a model is declared.

    dropout: float = option(0.0, "Dropout after positions ...", min=0, below=1)

is all that `model.dropout` needs to be a setting with help and a range, to be saved with weights and checkpoints, and to be read
as its default from files that were made without it. What uses the field is in `pipeline/model/`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

from pipeline.architecture.option import REQUIRED, Fields, Option, option
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.architecture.resnets import (
    ResNetConfig,
    check_small_stem,
    check_units,
    small_stem_reduction,
    stem_reduction,
)
from pipeline.base.errors import UserError
from pipeline.base.json_record import Limits, type_hints
from pipeline.base.words import counted

Gelu = Literal["tanh", "erf", "quick"]
Pool = Literal["token", "gap", "map", "mean", "both", "attentive"]
# Targets (ViT paper, B.1.2): the mean colour at 3 bits per channel; 16 such colours, of the patch resized to 4 x 4; pixels.
Masked = Literal["mean_color", "small_patch", "pixels"]
# How learned positions are resampled to another patch grid (pipeline/model/position.py).
Kernel = Literal["zoom", "bicubic", "bicubic_antialias"]

# Far above every published model: a damaged file must not allocate more than these.
_MAX_TOKENS = 2**17


@dataclass(frozen=True)
class ViTConfig(Fields):
    """The architecture of a ViT. Raises UserError for values that do not fit together."""

    width: int = option(
        REQUIRED,
        "Overrides the variant's width D; for a ResNet, the channels of its first layer.",
        min=1,
        max=2**16,
        setting=None,
    )
    depth: int = option(REQUIRED, "Overrides the variant's number of blocks.", min=1, max=1024, setting=None)
    mlp_width: int = option(REQUIRED, "Overrides the variant's MLP width.", min=1, max=2**18, setting=None)
    num_heads: int = option(REQUIRED, "Overrides the variant's number of heads.", min=1, max=2**12, setting=None)
    # mypy takes `option` for a default of the fields above.
    patch_size: Annotated[int, Limits(1, 2**12)]  # type: ignore[misc]  # P, in pixels; in a hybrid, in cells of the stem's output
    image_size: tuple[int, int]  # type: ignore[misc]  # height, width, in pixels
    num_classes: Annotated[int, Limits(0, 2**24)]  # type: ignore[misc]  # 0: no head, the model returns its features
    # ViT paper, D.4.
    positions: Literal["learned", "learned2d", "sincos2d", "sincos2d_mae", "relative", "none"] = option(
        "learned",
        "Position embedding: learned 1-D or 2-D, fixed sine-cosine (with MAE's frequencies: sincos2d_mae), relative attention, or none.",
    )
    positions_at: Literal["stem", "blocks", "shared"] = option(
        "stem",
        "Where positions are added: once (stem), before every block with a table for each (blocks), or before every block "
        "with the same table (shared).",
    )
    pool: Pool = option(
        "token",
        "Input of the head: class token; global average pool or attention pool (map) of a model without class token; or, beside a class "
        "token, the mean of the patches (mean), token and mean (both), or an attention pool (attentive). null is token (axial models: gap).",
        setting=None,
    )
    # "pre_logits" of the official weights of ImageNet-21k.
    representation: bool = option(
        False,
        "Add a dense + tanh layer before the head (pre-training only); mae, dino and lejepa train none, whatever is set.",
        setting=True,
    )
    # timm and Hugging Face: erf.
    gelu: Gelu = option(
        "tanh", "GELU: tanh approximation (official code), exact (erf), or x sigmoid(1.702 x) (quick, CLIP)."
    )
    dropout: float = option(
        0.0,
        "Dropout after positions, attention output and MLP layers (0.1 on ImageNet-21k).",
        min=0,
        below=1,
        only_trains=True,
    )
    drop_path: float = option(
        0.0, "Stochastic depth: drop probability of the last block, linear from 0.", min=0, below=1, only_trains=True
    )
    head_bias: float = option(
        0.0, "Initial bias of the head; -10 suits sigmoid loss on 21k classes.", min=-1000, max=1000
    )
    stem: tuple[int, ...] | None = None  # of a hybrid: units of each stage of its ResNet; () is the root alone
    axial: bool = False  # each block attends along rows, then along columns (ViT paper, D.6)
    # Flax's default, and so the official code's; Hugging Face's ViT has 1e-12, torch 1e-5.
    layer_norm_eps: Annotated[float, Limits(above=0, max=1)] = 1e-6
    masked: Masked | None = None  # masked patch prediction (masked.py): what is predicted of a patch
    # Darcet et al., arXiv 2309.16588.
    registers: int = option(
        0, "Extra learned tokens without a position, which the head does not read; 4 in DINOv2.", min=0, max=256
    )
    kernel: Kernel = "zoom"  # resamples the positions to another image size, as the project of the weights does
    # Parts of later ViTs (pipeline/model/parts.py, rope.py).
    layer_scale: float | None = option(
        None,
        "Initial value of LayerScale, learned factors of each residual branch; 1e-5 in DINOv2; null: no factors.",
        min=-1000,
        max=1000,
    )
    swiglu: bool = option(
        False, "Gated MLP: silu(gate) times value, each mlp_width wide (DINOv2's g, DINOv3's H+ and 7B)."
    )
    rope_base: float | None = option(
        None,
        "Base period of rotary positions of queries and keys (RoPE), for any image size; 100 in DINOv3; null: no rotation.",
        above=1,
        max=1e9,
    )
    qkv_bias: Literal["qkv", "qv", "none"] = option(
        "qkv", "Which of queries, keys and values have a bias; qv in DINOv3."
    )
    out_bias: bool = option(True, "Bias of the attention's output layer.")
    mlp_bias: bool = option(True, "Biases of the MLP's layers.")
    embedding_norm: bool = option(False, "LayerNorm of all tokens before the first block, as in CLIP.")
    qk_norm: bool = option(False, "LayerNorm of each head's queries and keys (ViT-22B).")
    pool_norm: bool = option(
        False,
        "The final LayerNorm is of the mean of the patches, not of the tokens (pool=mean or gap), as MAE fine-tunes.",
    )
    class_norm: bool = option(False, "A final LayerNorm of its own for class token and registers, as in DINOv3 7B.")
    small_stem: tuple[int, ...] | None = option(
        None,
        "Hybrid for small images, as [32,64,128]: a 3 x 3 convolution, then a residual unit of two for each number of "
        "channels; where these grow, the map is halved. The patch side of model.name counts its cells (ViT-Ti/1).",
        min=16,
        max=2**12,
    )
    pixels: Pixels = RGB8  # what the values of its images mean; from the data set of its training

    def __post_init__(self) -> None:
        super().__post_init__()
        check_units("stem", self.stem or (), 0)
        if self.small_stem is not None:
            check_small_stem(self.small_stem, self.stem)
        if self.width % self.num_heads:
            below = self.width - self.width % self.num_heads
            nearest = f"{below} or {below + self.num_heads}" if below else f"{self.num_heads}"
            raise UserError(
                f"model: width = {self.width} is not divisible by num_heads = {self.num_heads}. "
                f"Use width {nearest}, or another number of heads."
            )
        self._check_parts()
        if self.masked or self.has_stem or min(self.image_size) < self.patch_size:
            self.check_covered()
        if self.num_tokens > _MAX_TOKENS:
            raise UserError(
                f"model: image_size = {self.image_size[0]} x {self.image_size[1]} in patches of {self.patch_pixels} pixels is "
                f"{counted(self.num_tokens, 'token')}, more than {_MAX_TOKENS:,}. Use larger patches or a smaller image."
            )

    def _check_parts(self) -> None:
        """Raise UserError for parts that do not fit together."""
        has_own_grid = self.axial or self.positions == "relative"
        parts = {"learned2d": 2, "sincos2d": 4, "sincos2d_mae": 4}.get(self.positions, 1)
        wrong = {
            f"positions = {self.positions} adds nothing to the tokens. Leave positions_at at stem": (
                self.positions in ("relative", "none") and self.positions_at != "stem"
            ),
            f"positions = {self.positions} needs a width divisible by {parts}, not {self.width}": self.width % parts,
            "registers have no position, and the head does not read them. Use them with a pool other than map, positions at the stem that "
            "are not relative, and neither axial blocks nor masked patch prediction": (
                self.registers and (has_own_grid or self.positions_at != "stem" or self.pool == "map" or self.masked)
            ),
            "rope_base rotates queries and keys by their place in the grid, which axial attention and relative positions do in their way. "
            "Use it with another model and other positions, such as positions=none": (
                self.rope_base is not None and has_own_grid
            ),
            f"rope_base needs heads whose width is divisible by 4, not {self.width} / {self.num_heads} = {self.head_dim}": (
                self.rope_base is not None and self.head_dim % 4
            ),
            "pool_norm normalises the mean of the patches. Use it with pool=mean or pool=gap, and neither class_norm nor masked patch "
            "prediction": self.pool_norm and (self.pool not in ("mean", "gap") or self.class_norm or self.masked),
            f"class_norm normalises a class token, and pool = {self.pool} has none. Use pool=token, mean, both or attentive": (
                self.class_norm and not self.has_class_token
            ),
            "a class token has no row and no column to attend along. Use pool=gap or pool=map": (
                self.axial and self.has_class_token
            ),
            f"masked = {self.masked} predicts colours of 8-bit RGB, and images have {self.pixels.describe()}. Use masked pixels "
            "(train.loss=masked_pixels)": self.masked not in (None, "pixels") and not self.pixels.is_rgb8,
            "masked patch prediction reads patch tokens, so it has no classes, representation layer, attention pooling or axial blocks. Use "
            "representation=false, and pool=token or pool=gap": (
                self.masked and (self.num_classes or self.representation or self.pools_by_attention or self.axial)
            ),
            f"masked = small_patch resizes each patch to 4 x 4, but its side is {self.patch_pixels} pixels. Use a patch side divisible by "
            "4, or mean_color": self.masked == "small_patch" and self.patch_pixels % 4,
        }
        if found := [message for message, is_wrong in wrong.items() if is_wrong]:
            raise UserError(f"model: {found[0]}.")

    def check_covered(self) -> None:
        """Raise UserError if no patch covers the last rows or columns of pixels, which is a mistake in a new model."""
        for side, unseen in zip(self.image_size, self.unseen, strict=True):
            if unseen:
                patch = self.patch_pixels
                nearest = " or ".join(str(size) for size in (side - unseen, side - unseen + patch) if size)
                why = f" ({self.patch_size} x {self.reduction})" if self.reduction > 1 else ""
                raise UserError(
                    f"model: image_size = {side} is not divisible by patch_size = {patch}{why}. Nearest sizes: {nearest}."
                )

    def check_any_grid(self) -> None:
        """Raise UserError if the model reads images of one size only, because its attention or positions depend on the grid."""
        if self.axial or self.positions == "relative":
            why = "axial attention" if self.axial else "relative positions"
            raise UserError(
                f"model: {why} of a {self.grid[0]} x {self.grid[1]} grid cannot be used with views of another size. Use a model "
                "without it, or views of one size."
            )

    @property
    def reduction(self) -> int:
        """Side of a cell in pixels: 1 without a stem, else the factor by which the stem downsamples."""
        return small_stem_reduction(self.small_stem) if self.small_stem is not None else stem_reduction(self.stem)

    @property
    def has_stem(self) -> bool:
        """Whether it is a hybrid: convolutions before the patch embedding."""
        return self.stem is not None or self.small_stem is not None

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        return self.grid_at(*self.image_size)

    def grid_at(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of patches of an image of this size, in pixels."""
        rows, columns = (side // self.reduction // self.patch_size for side in (height, width))
        return rows, columns

    @property
    def unseen(self) -> tuple[int, int]:
        """(rows, columns) of pixels at the lower and right edge that no patch covers, as in the official code (padding
        "VALID"): 6 of the 384 of ViT-H/14 in the ViT paper's fine-tuning."""
        height, width = self.image_size
        return height % self.patch_pixels, width % self.patch_pixels

    @property
    def unseen_note(self) -> str:
        """A line about pixels that no patch covers; empty if there are none."""
        if not any(self.unseen):
            return ""
        return (
            f"image_size = {self.image_size[0]} x {self.image_size[1]}: patches of {self.patch_pixels} pixels leave the last "
            f"{counted(self.unseen[0], 'row')} and {counted(self.unseen[1], 'column')} unseen"
        )

    @property
    def patch_pixels(self) -> int:
        """Side of a patch in pixels of the image."""
        return self.patch_size * self.reduction

    @property
    def num_corrupted(self) -> int:
        """Number of patches that masked prediction corrupts: half of them (ViT paper, B.1.2)."""
        return (self.num_patches + 1) // 2

    @property
    def patch_outputs(self) -> int:
        """Number of outputs for each corrupted patch."""
        return {
            None: 0,
            "mean_color": 512,
            "small_patch": 16 * 512,
            "pixels": self.pixels.num_channels * self.patch_pixels**2,
        }[self.masked]

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the head for one image: class logits, or predictions of its corrupted patches."""
        return self.num_corrupted * self.patch_outputs if self.masked else self.num_classes

    @property
    def num_tokens(self) -> int:
        """N: patches, the class token if any, and registers."""
        return self.num_positions + self.registers

    @property
    def num_positions(self) -> int:
        """Number of tokens with a position: patches, and the class token if any."""
        return self.has_class_token + self.num_patches

    @property
    def has_class_token(self) -> bool:
        return self.pool not in ("gap", "map")

    @property
    def pools_by_attention(self) -> bool:
        """Whether the head reads an attention pool, which has weights of its own."""
        return self.pool in ("map", "attentive")

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_blocks(self) -> int:
        """Number of blocks that run: `depth`, or twice that in an axial ViT."""
        return self.depth * 2 if self.axial else self.depth

    @property
    def num_features(self) -> int:
        """Width of the features that the head reads."""
        return 2 * self.width if self.pool == "both" and not self.representation else self.width

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


Config = ViTConfig | ResNetConfig


def _options() -> Iterator[tuple[str, Option]]:
    hints = type_hints(ViTConfig)
    for field in fields(ViTConfig):
        if (rule := field.metadata.get("rule")) is not None:
            default = field.default if rule.setting is ... else rule.setting
            # Settings are lists, as YAML and checkpoints have them; a configuration has to be hashable.
            kind = list[int] | None if hints[field.name] == (tuple[int, ...] | None) else hints[field.name]
            yield field.name, replace(rule, setting=default, kind=kind | None if default is None else kind)


# What a run may set of a model, in the order of `--help`; of a ResNet the width and head_bias, which a ViT has too.
OPTIONS = dict(_options())
