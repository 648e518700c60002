"""The configurations of the models: `ViTConfig` and `ResNetConfig`.

A field is saved with weights and checkpoints, and read as its default from files that were made without it. What a run
may set has the same name in `ModelConfig` (settings/run.py), with its documentation and its range. What uses
the field is in `pipeline/model/`.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from pipeline.architecture.pixels import RGB8, Pixels, as_lists
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.words import counted

# (height, width) of an image in pixels, or (rows, columns) of patches.
Size = tuple[int, int]
_MAX_SIDE = 2**16  # Far above every published model: a damaged file must not allocate more.
# The fields of the first files, in their order, so that a file has the same bytes as before. Others follow if they are
# not at their defaults.
_FIRST_SAVED = (
    "units",
    "width",
    "depth",
    "mlp_width",
    "num_heads",
    "patch_size",
    "image_size",
    "num_classes",
    "representation",
    "gelu",
    "dropout",
    "head_bias",
    "drop_path",
    "pool",
    "positions",
    "positions_at",
    "stem",
    "axial",
    "layer_norm_eps",
    "masked",
)


class Fields:
    """Base of the configurations: checks each field, and turns them into plain data."""

    image_size: Size
    num_classes: int
    pixels: Pixels

    def __post_init__(self) -> None:
        """Raise UserError for an impossible image size."""
        if not all(1 <= side <= _MAX_SIDE for side in self.image_size):
            raise UserError(f"model: image_size = {quoted(self.image_size)} must be from 1 to {_MAX_SIDE:,} pixels.")

    def added(self) -> dict[str, Any]:
        """The fields that the first files did not have, where they are not at their defaults."""
        own = vars(self).items()
        return {name: value for name, value in own if name not in _FIRST_SAVED and value != getattr(type(self), name)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, YAML and weights files; tuples become lists."""
        values = {name: vars(self)[name] for name in _FIRST_SAVED if name in vars(self)} | self.added()
        if "pixels" in values:
            values["pixels"] = self.pixels.to_dict()
        return as_lists(values)


_MAX_STAGES, _MAX_UNITS = 8, 1024


@dataclass(frozen=True)
class ResNetConfig(Fields):
    """The architecture of a BiT ResNet (arXiv 1912.11370). Raises UserError for values that do not fit together."""

    units: tuple[int, ...]  # units of each stage; each stage but the first halves height and width
    width: int  # channels after the root; stage i has 4 * 2^i times as many
    image_size: Size  # height, width, in pixels
    num_classes: int  # 0: no head, the model returns its features
    head_bias: float = 0.0  # initial bias of the head
    pixels: Pixels = RGB8  # what the values of its images mean; from the data set of its training

    def __post_init__(self) -> None:
        super().__post_init__()
        check_units("units", self.units, 1)
        if self.width % 32:
            raise UserError(f"model: width = {self.width} must be a multiple of 32, the groups of GroupNorm.")

    @property
    def num_features(self) -> int:
        """Channels of the features that the head reads."""
        return 4 * self.width * 2 ** (len(self.units) - 1)

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the head for one image: class logits."""
        return self.num_classes


def stem_reduction(stem: tuple[int, ...] | None) -> int:
    """The factor by which a hybrid's stem downsamples; 1 without a stem. stem: units of each stage."""
    return 1 if stem is None else 4 * 2 ** max(len(stem) - 1, 0)


def check_units(name: str, units: tuple[int, ...], min_stages: int) -> None:
    """Raise UserError for wrong units of the stages of a ResNet."""
    if not min_stages <= len(units) <= _MAX_STAGES or not all(1 <= unit <= _MAX_UNITS for unit in units):
        raise UserError(
            f"model: {name} = {quoted(units)} must have {min_stages} to {_MAX_STAGES} stages, each of 1 to {_MAX_UNITS}"
            " units."
        )


Gelu = Literal["tanh", "erf", "quick"]
Pool = Literal["token", "gap", "map", "mean", "both", "attentive"]
Positions = Literal["learned", "learned2d", "sincos2d", "sincos2d_mae", "relative", "none"]
QkvBias = Literal["qkv", "qv", "none"]
# Targets (ViT paper, B.1.2): the mean colour at 3 bits per channel; 16 such colours, of the patch resized to 4 x 4;
# pixels.
Masked = Literal["mean_color", "small_patch", "pixels"]
# How learned positions are resampled to another patch grid (pipeline/model/position.py).
Kernel = Literal["zoom", "bicubic", "bicubic_antialias"]

# Fields that change neither the weights nor what they compute after training, so a run may set them for weights that
# exist.
ONLY_TRAIN = ("dropout", "drop_path")
# Far above every published model: a damaged file must not allocate more than these.
_MAX_TOKENS = 2**17


@dataclass(frozen=True)
class ViTConfig(Fields):
    """The architecture of a ViT. Raises UserError for values that do not fit together."""

    width: int  # D
    depth: int
    mlp_width: int
    num_heads: int
    patch_size: int  # P, in pixels; in a hybrid, in cells of the stem's output
    image_size: Size  # height, width, in pixels
    num_classes: int  # 0: no head, the model returns its features
    positions: Positions = "learned"  # ViT paper, D.4
    positions_at: Literal["stem", "blocks", "shared"] = "stem"
    pool: Pool = "token"
    representation: bool = False  # "pre_logits" of the official weights of ImageNet-21k
    gelu: Gelu = "tanh"  # timm and Hugging Face: erf
    dropout: float = 0.0
    drop_path: float = 0.0
    head_bias: float = 0.0
    stem: tuple[int, ...] | None = None  # of a hybrid: units of each stage of its ResNet; () is the root alone
    axial: bool = False  # each block attends along rows, then along columns (ViT paper, D.6)
    layer_norm_eps: float = 1e-6  # Flax's default, and so the official code's; Hugging Face's ViT has 1e-12, torch 1e-5
    masked: Masked | None = None  # masked patch prediction (MaskedViT): what is predicted of a patch
    registers: int = 0  # Darcet et al., arXiv 2309.16588
    kernel: Kernel = "zoom"  # resamples the positions to another image size, as the project of the weights does
    # Parts of later ViTs (pipeline/model/layers.py, rope.py).
    layer_scale: float | None = None
    swiglu: bool = False
    rope_base: float | None = None
    rope_side: int | None = None  # timm's axial RoPE, of EVA-02 and of naver-ai/rope-vit
    qkv_bias: QkvBias = "qkv"
    out_bias: bool = True
    mlp_bias: bool = True
    embedding_norm: bool = False
    qk_norm: bool = False
    pool_norm: bool = False
    small_stem: tuple[int, ...] | None = None
    pixels: Pixels = RGB8  # what the values of its images mean; from the data set of its training

    def __post_init__(self) -> None:
        super().__post_init__()
        check_units("stem", self.stem or (), 0)
        if self.small_stem is not None:
            if self.stem is not None:
                raise UserError(
                    "model: small_stem and the ResNet of the model's name are two stems. Use a name such as ViT-Ti/1."
                )
            channels = self.small_stem
            is_odd = any(c % 16 or not 16 <= c <= 2**12 for c in channels) or list(channels) != sorted(channels)
            if is_odd or not 1 <= len(channels) <= _MAX_UNITS:
                raise UserError(
                    f"model: small_stem = {quoted(list(channels))} must be 1 to {_MAX_UNITS} multiples of 16 up to "
                    "4,096, none below the one before, such as [32,64,128]."
                )
        if not self.num_heads or self.width % self.num_heads:
            raise UserError(f"model: width = {self.width} is not divisible by num_heads = {self.num_heads}.")
        parts = {"learned2d": 2, "sincos2d": 4, "sincos2d_mae": 4}.get(self.positions, 1)
        if self.width % parts:
            raise UserError(
                f"model: positions = {self.positions} needs a width divisible by {parts}, not {self.width}."
            )
        if self.registers and (self.needs_grid or self.positions_at != "stem" or self.pool == "map" or self.masked):
            raise UserError(
                "model: registers have no position, and the head does not read them. Use them with a pool other than"
                " map, positions at the stem that are not relative, and neither axial blocks nor masked patch"
                " prediction."
            )
        if self.rope_base is not None and self.needs_grid:
            raise UserError(
                "model: rope_base rotates queries and keys by their place in the grid, which axial attention and"
                " relative positions do in their way. Use it with another model and other positions, such as"
                " positions=none."
            )
        if self.rope_base is not None and self.head_dim % 4:
            raise UserError(
                f"model: rope_base needs heads whose width is divisible by 4, not {self.width} / {self.num_heads} ="
                f" {self.head_dim}."
            )
        if self.pool_norm and (self.pool not in ("mean", "gap") or self.masked):
            raise UserError(
                "model: pool_norm normalises the mean of the patches. Use it with pool=mean or pool=gap, and without"
                " masked patch prediction."
            )
        if self.axial and self.has_class_token:
            raise UserError("model: a class token has no row and no column to attend along. Use pool=gap or pool=map.")
        if self.masked or self.has_stem or min(self.image_size) < self.patch_size:
            self.check_covered()
        if self.num_tokens > _MAX_TOKENS:
            raise UserError(
                f"model: image_size = {self.image_size[0]} x {self.image_size[1]} in patches of {self.patch_pixels}"
                f" pixels is {counted(self.num_tokens, 'token')}, more than {_MAX_TOKENS:,}. Use larger patches or a"
                " smaller image."
            )
        if self.masked not in (None, "pixels") and not self.pixels.is_rgb8:
            raise UserError(
                f"model: masked = {self.masked} predicts colours of 8-bit RGB, and images have"
                f" {self.pixels.describe()}. Use masked pixels (train.loss=masked_pixels)."
            )
        if self.masked and (self.num_classes or self.representation or self.pools_by_attention or self.axial):
            raise UserError(
                "model: masked patch prediction reads patch tokens, so it has no classes, representation layer,"
                " attention pooling or axial blocks. Use representation=false, and pool=token or pool=gap."
            )
        if self.masked == "small_patch" and self.patch_pixels % 4:
            raise UserError(
                f"model: masked = small_patch resizes each patch to 4 x 4, but its side is {self.patch_pixels} pixels."
                " Use a patch side divisible by 4, or mean_color."
            )

    def check_covered(self) -> None:
        """Raise UserError if no patch covers the last rows or columns of pixels, which is a mistake in a new model."""
        for side, unseen in zip(self.image_size, self.unseen, strict=True):
            if unseen:
                patch = self.patch_pixels
                nearest = " or ".join(str(size) for size in (side - unseen, side - unseen + patch) if size)
                raise UserError(
                    f"model: image_size = {side} is not divisible by patches of {patch} pixels. Nearest sizes:"
                    f" {nearest}."
                )

    def check_any_grid(self) -> None:
        """Raise UserError if the model reads images of one size only, because its attention or positions depend on the
        grid.
        """
        if self.needs_grid:
            why = "axial attention" if self.axial else "relative positions"
            raise UserError(
                f"model: {why} of a {self.grid[0]} x {self.grid[1]} grid cannot be used with views of another size. Use"
                " a model without it, or views of one size."
            )

    @property
    def needs_grid(self) -> bool:
        """Whether its attention depends on the grid of the patches."""
        return self.axial or self.positions == "relative"

    @property
    def reduction(self) -> int:
        """Side of a cell in pixels: 1 without a stem, else the factor by which the stem downsamples: one for small
        images by 2 for each unit that has more channels than the one before.
        """
        return stem_reduction(self.stem) * 2 ** sum(before < after for before, after in pairwise(self.small_stem or ()))

    @property
    def has_stem(self) -> bool:
        """Whether it is a hybrid: convolutions before the patch embedding."""
        return self.stem is not None or self.small_stem is not None

    @property
    def grid(self) -> Size:
        """(rows, columns) of patches."""
        return self.grid_at(*self.image_size)

    def grid_at(self, height: int, width: int) -> Size:
        """(rows, columns) of patches of an image of this size, in pixels."""
        rows, columns = (side // self.reduction // self.patch_size for side in (height, width))
        return rows, columns

    @property
    def unseen(self) -> Size:
        """(rows, columns) of pixels at the lower and right edge that no patch covers, as in the official code (padding
        "VALID"): 6 of the 384 of ViT-H/14 in the ViT paper's fine-tuning."""
        height, width = self.image_size
        return height % self.patch_pixels, width % self.patch_pixels

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
