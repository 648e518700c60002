"""Models by name, and their configurations: `ViTConfig` and `ResNetConfig`."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.words import counted

Gelu = Literal["tanh", "erf"]
Pool = Literal["token", "gap", "map"]
Positions = Literal["learned", "learned2d", "sincos2d", "relative", "none"]
PositionsAt = Literal["stem", "blocks", "shared"]
# Targets (ViT paper, B.1.2): the mean colour at 3 bits per channel; 16 such colours, of the patch resized to 4 x 4; pixels.
Masked = Literal["mean_color", "small_patch", "pixels"]
ImageSize = int | tuple[int, int]
# How learned positions are resampled to another patch grid (position.py).
Kernel = Literal["zoom", "bicubic", "bicubic_antialias"]


class Variant(NamedTuple):
    width: int
    depth: int
    mlp_width: int
    num_heads: int


# B, L, H: ViT paper, Table 1. Ti, S: google-research/vision_transformer, vit_jax/configs/models.py.
# The others: google-research/big_vision, models/vit.py (mu is its size for tests).
VARIANTS = {
    "mu":     Variant(32, 1, 128, 2),
    "Ti":     Variant(192, 12, 768, 3),
    "S":      Variant(384, 12, 1536, 6),
    "M":      Variant(512, 12, 2048, 8),
    "B":      Variant(768, 12, 3072, 12),
    "L":      Variant(1024, 24, 4096, 16),
    "So400m": Variant(1152, 27, 4304, 16),
    "H":      Variant(1280, 32, 5120, 16),
    "g":      Variant(1408, 40, 6144, 16),
    "G":      Variant(1664, 48, 8192, 16),
    "e":      Variant(1792, 56, 15360, 16),
}  # fmt: skip

# Name -> size of the ViT, units of each stage of the ResNet stem, patch side in cells of the stem's output. The number in a
# name is the side of a token in pixels (ViT paper, section 4.1; vit_jax/configs/models.py). R+Ti/16 is an exception: its root
# downsamples 4 times, not 2 as a comment there says, so the side of its tokens is 32.
HYBRIDS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "R50+ViT-B/16": ("B", (3, 4, 9), 1),
    "R50+ViT-B/32": ("B", (3, 4, 6, 3), 1),
    "R50+ViT-L/16": ("L", (3, 4, 9), 1),
    "R50+ViT-L/32": ("L", (3, 4, 6, 3), 1),
    "R26+S/32": ("S", (2, 2, 2, 2), 1),
    "R+Ti/16": ("Ti", (), 8),
}

# Field -> (smallest, largest) value. Far above every published model: a damaged file must not allocate more than these.
_RANGES = {
    "width": (1, 2**16), "depth": (1, 1024), "mlp_width": (1, 2**18), "num_heads": (1, 2**12), "patch_size": (1, 2**12),
    "num_classes": (0, 2**24), "head_bias": (-1000, 1000), "registers": (0, 256),
}  # fmt: skip
_MAX_SIDE, _MAX_TOKENS, _MAX_STAGES, _MAX_UNITS = 2**16, 2**17, 8, 1024

# Units in each stage of a BiT ResNet (google-research/big_vision, models/bit.py). 26 is the smallest hybrid's, for small studies.
RESNET_UNITS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}


class _Config:
    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, YAML and weights files; tuples become lists."""
        values = asdict(self)  # type: ignore[call-overload]
        # Fields that were added later are omitted at their defaults, so that files without them are the same bytes as before.
        added = {"registers": 0, "kernel": "zoom"}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items() if n not in added or v != added[n]}


@dataclass(frozen=True)
class ViTConfig(_Config):
    """The architecture of a ViT. Raises UserError for values that do not fit together."""

    width: int  # D, of every token
    depth: int  # number of blocks
    mlp_width: int  # hidden units of a block's MLP
    num_heads: int
    patch_size: int  # P, in pixels; in a hybrid, in cells of the stem's output
    image_size: tuple[int, int]  # height, width, in pixels
    num_classes: int  # 0: no head, the model returns its features
    representation: bool = False  # Dense(D) and tanh before the head ("pre_logits"), as in the official I21k weights
    gelu: Gelu = "tanh"  # tanh: the official code; erf: timm and Hugging Face
    dropout: float = 0.0  # dropout rate; ViT paper, Table 3
    head_bias: float = 0.0  # initial bias of the head; -10 is usual with a sigmoid loss over 21k classes
    drop_path: float = 0.0  # stochastic depth: drop rate of the last block; it grows linearly from 0 in the first block
    pool: Pool = "token"  # input of the head: the class token, the mean of the tokens, or attention pooling (MAP)
    positions: Positions = "learned"  # ViT paper, D.4: 1-D, 2-D, fixed sine-cosine, relative, or none
    positions_at: PositionsAt = "stem"  # added once, or before each block: a table for each, or one for all (shared)
    patch_stride: int | None = None  # cells from patch to patch; below patch_size they overlap. None: patch_size
    stem: tuple[int, ...] | None = None  # of a hybrid: units of each stage of its ResNet; () is the root alone
    axial: bool = False  # each block attends along rows, then along columns (ViT paper, D.6)
    layer_norm_eps: float = 1e-6  # Flax's default, and so the official code's; Hugging Face's ViT has 1e-12, torch 1e-5
    masked: Masked | None = None  # masked patch prediction (masked.py): what is predicted of a patch
    registers: int = 0  # extra tokens without a position, not read by the head (arXiv 2309.16588)
    kernel: Kernel = "zoom"  # resamples the positions to another image size, as the project of the weights does

    def __post_init__(self) -> None:
        _check_ranges(self)
        if self.width % self.num_heads:
            raise UserError(
                f"model: width = {self.width} is not divisible by num_heads = {self.num_heads}. "
                f"Use width {_nearest_multiples(self.width, self.num_heads)}, or another number of heads."
            )
        if self.gelu not in ("tanh", "erf"):
            raise UserError(f'model: gelu = "{self.gelu}" is unknown: use "tanh" (official code) or "erf" (timm, HF).')
        for name in ("dropout", "drop_path"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"model: {name} = {getattr(self, name)} must be in [0, 1).")
        if not 0 < self.layer_norm_eps <= 1:
            raise UserError(f"model: layer_norm_eps = {self.layer_norm_eps} must be greater than 0, and at most 1.")
        self._check_positions()
        self._check_registers()
        if self.axial and self.pool == "token":
            raise UserError("model: a class token has no row and no column to attend along. Use pool=gap or pool=map.")
        if not 1 <= self.stride <= self.patch_size:
            raise UserError(
                f"model: patch_stride = {self.stride} must be from 1 to patch_size = {self.patch_size}: a larger one "
                "leaves pixels that no patch covers."
            )
        if self.masked or self.stem is not None or min(self.image_size) < self.patch_size:
            self.check_covered()
        if self.num_tokens > _MAX_TOKENS:
            raise UserError(
                f"model: image_size = {self.image_size[0]} x {self.image_size[1]} in patches of {self.patch_pixels} pixels is "
                f"{counted(self.num_tokens, 'token')}, more than {_MAX_TOKENS:,}. Use larger patches or a smaller image."
            )
        if self.masked:
            self._check_masked()

    def _check_masked(self) -> None:
        if self.num_classes or self.representation or self.pool == "map" or self.axial:
            raise UserError(
                "model: masked patch prediction reads patch tokens, so it has no classes, representation layer, attention "
                "pooling or axial blocks. Use representation=false, and pool=token or pool=gap."
            )
        if self.masked == "small_patch" and self.patch_pixels % 4:
            raise UserError(
                f"model: masked = small_patch resizes each patch to 4 x 4, but its side is {self.patch_pixels} pixels. Use "
                "a patch side divisible by 4, or mean_color."
            )

    def _check_registers(self) -> None:
        needs_positions = self.positions == "relative" or self.positions_at != "stem" or self.axial
        if self.registers and (needs_positions or self.pool == "map" or self.masked):
            raise UserError(
                "model: registers have no position, and the head does not read them. Use them with pool=token or pool=gap, "
                "positions at the stem that are not relative, and neither axial blocks nor masked patch prediction."
            )

    def _check_positions(self) -> None:
        if self.positions in ("relative", "none") and self.positions_at != "stem":
            raise UserError(
                f"model: positions = {self.positions} adds nothing to the tokens. Leave positions_at at stem."
            )
        parts = {"learned2d": 2, "sincos2d": 4}.get(self.positions, 1)
        if self.width % parts:
            raise UserError(
                f"model: positions = {self.positions} needs a width divisible by {parts}, not {self.width}."
            )

    def check_covered(self) -> None:
        """Raise UserError if no patch covers the last rows or columns of pixels, which is a mistake in a new model."""
        patch, step = self.patch_pixels, self.stride * self.reduction  # in pixels
        for side, unseen in zip(self.image_size, self.unseen, strict=True):
            if not unseen:
                continue
            below = patch + max(side - patch, 0) // step * step
            nearest = f"{below} or {below + step}" if side >= patch else f"{patch}"
            if step == patch:
                why = f"is not divisible by patch_size = {patch}"
                why += f" ({self.patch_size} x {self.reduction})" if self.reduction > 1 else ""
            else:
                why = f"is not patch_size = {patch} plus a multiple of the stride {step}"
            raise UserError(f"model: image_size = {side} {why}. Nearest sizes: {nearest}.")

    @property
    def stride(self) -> int:
        """Cells from patch to patch; a cell is a pixel, or in a hybrid one position of the stem's output."""
        return self.patch_size if self.patch_stride is None else self.patch_stride

    @property
    def reduction(self) -> int:
        """Side of a cell in pixels: 1 without a stem, else the factor by which the stem downsamples."""
        return stem_reduction(self.stem)

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        rows, columns = ((side // self.reduction - self.patch_size) // self.stride + 1 for side in self.image_size)
        return rows, columns

    @property
    def unseen(self) -> tuple[int, int]:
        """(rows, columns) of pixels at the lower and right edge that no patch covers, as in the official code (padding
        "VALID"): 6 of the 384 of ViT-H/14 in the ViT paper's fine-tuning."""
        patch, step = self.patch_pixels, self.stride * self.reduction
        height, width = (side if side < patch else (side - patch) % step for side in self.image_size)
        return height, width

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
        rows, columns = self.grid
        return (rows * columns + 1) // 2

    @property
    def patch_outputs(self) -> int:
        """Number of outputs for each corrupted patch."""
        return {None: 0, "mean_color": 512, "small_patch": 16 * 512, "pixels": 3 * self.patch_pixels**2}[self.masked]

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
        return (self.pool == "token") + self.grid[0] * self.grid[1]

    @property
    def num_blocks(self) -> int:
        """Number of blocks that run: `depth`, or twice that in an axial ViT."""
        return self.depth * 2 if self.axial else self.depth

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


@dataclass(frozen=True)
class ResNetConfig(_Config):
    """The architecture of a BiT ResNet (arXiv 1912.11370). Raises UserError for values that do not fit together."""

    units: tuple[int, ...]  # units of each stage; each stage but the first halves height and width
    width: int  # channels after the root; stage i has 4 * 2^i times as many
    image_size: tuple[int, int]  # height, width, in pixels
    num_classes: int  # 0: no head, the model returns its features
    head_bias: float = 0.0  # initial bias of the head

    def __post_init__(self) -> None:
        _check_ranges(self)
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


Config = ViTConfig | ResNetConfig


def config_from_dict(values: dict[str, Any]) -> Config:
    """The inverse of to_dict. Raises UserError for unknown or missing fields and wrong types."""
    cls: type[Config] = ResNetConfig if "units" in values else ViTConfig
    known = [field.name for field in fields(cls)]
    if unknown := sorted(map(str, values.keys() - set(known))):
        raise UserError(f"model: unknown field {unknown[0][:200]!r}{_did_you_mean(unknown[0][:200], known)}")
    if type(side := values.get("image_size")) is int:
        values = {**values, "image_size": [side, side]}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return json_record.convert(plain, cls, "model")


def configure(
    name: str, image_size: ImageSize = 224, num_classes: int = 1000, *, covered: bool = True, **changes: Any
) -> Config:
    """The configuration of a named model.

    name: "ViT-L/16": a size and any patch side in pixels; "Axial-ViT-B/16"; a hybrid, "R50+ViT-B/16"; or a ResNet,
        "BiT-R101x3": layers and width factor.
    image_size: side or (height, width) in pixels.
    covered: refuse an image size with pixels that no patch covers (`ViTConfig.unseen`).
    changes: fields of the configuration by name; None keeps the value that the name implies. A ResNet also accepts fields
        of a ViT, but only with their defaults.
    Raises UserError for an unknown name or field, and for values that do not fit together.
    """
    cls, values = _implied(name)
    own = {field.name for field in fields(cls)}
    neutral = {field.name: field.default for field in fields(ViTConfig)}
    for field, value in changes.items():
        if field in own and value is not None:
            values[field] = value
        elif field not in own and field not in neutral:
            raise UserError(f"model: unknown field {field!r}{_did_you_mean(field, sorted(own))}")
        elif field not in own and value not in (None, neutral[field]):
            default = None if neutral[field] is MISSING else neutral[field]
            raise UserError(f"model: {name} has no {field}. Set model.{field}={_as_yaml(default)}.")
    config = cls(**values, image_size=as_pair(image_size), num_classes=num_classes)
    if covered and isinstance(config, ViTConfig):
        config.check_covered()
    return config


def overridden(name: str, changes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Field -> (the value that the name implies, the value of `changes`), where these differ.

    changes: as of `configure`; None keeps the implied value, and other keys are ignored. Raises UserError for an unknown name.
    """
    cls, values = _implied(name)
    if cls is ViTConfig:
        values = {"pool": "token", "patch_stride": values["patch_size"], **values}
    given = {field: value for field, value in changes.items() if field in values and value is not None}
    return {field: (values[field], value) for field, value in given.items() if value != values[field]}


def parse_name(name: str) -> tuple[Variant, int]:
    """ "ViT-L/16" -> (sizes of L, patch side 16). Any patch side is accepted. Raises UserError for an unknown name."""
    match = re.fullmatch(r"ViT-(\w+)/([1-9]\d{0,4})", name, re.ASCII)
    if match is None or match[1] not in VARIANTS:
        patch = re.search(r"(?<=/)\d{1,5}$", name, re.ASCII)
        known = [f"ViT-{variant}/{patch[0] if patch else 16}" for variant in VARIANTS]
        known += [f"Axial-{plain}" for plain in known if "-B/" in plain] + [*HYBRIDS, *_RESNETS]
        raise UserError(f"model: {_quoted(name)} is an unknown model{_did_you_mean(name, known)}")
    return VARIANTS[match[1]], int(match[2])


def _quoted(name: str) -> str:
    return f'"{name}"' if name.isprintable() and len(name) < 100 else quoted(name)


def as_pair(size: ImageSize | list[int]) -> tuple[int, int]:
    """A side, or (height, width) -> (height, width)."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


# The ResNets of the BiT and ViT papers, for suggestions in errors; any width factor is accepted.
_RESNETS = [f"BiT-R{name}" for name in ("50x1", "50x2", "50x3", "101x1", "101x3", "152x1", "152x2", "152x4", "200x3")]


def _implied(name: str) -> tuple[type[Config], dict[str, Any]]:
    """The class of the configuration, and the fields that the name implies."""
    return _resnet(name) if name.startswith("BiT-") else _vit(name)


def _vit(name: str) -> tuple[type[Config], dict[str, Any]]:
    if name in HYBRIDS:
        letter, stem, patch_size = HYBRIDS[name]
        return ViTConfig, {**VARIANTS[letter]._asdict(), "patch_size": patch_size, "stem": stem}
    axial = name.startswith("Axial-ViT-")
    variant, patch_size = parse_name(name.removeprefix("Axial-") if axial else name)
    kind = {"axial": True, "pool": "gap"} if axial else {}
    return ViTConfig, {**variant._asdict(), "patch_size": patch_size, **kind}


def _resnet(name: str) -> tuple[type[Config], dict[str, Any]]:
    match = re.fullmatch(r"BiT-R(\d{1,5})x([1-9]\d{0,2})", name, re.ASCII)
    if match is None or int(match[1]) not in RESNET_UNITS:
        raise UserError(f"model: {_quoted(name)} is an unknown model{_did_you_mean(name, _RESNETS)}")
    return ResNetConfig, {"units": RESNET_UNITS[int(match[1])], "width": 64 * int(match[2])}


def _check_ranges(config: Config) -> None:
    """Raise UserError for a value that no model has."""
    for name, (smallest, largest) in _RANGES.items():
        if not smallest <= (value := getattr(config, name, smallest)) <= largest:
            hint = "; 0 means no head" if name == "num_classes" else ""
            raise UserError(f"model: {name} = {quoted(value)} must be from {smallest:,} to {largest:,}{hint}.")
    if not all(1 <= side <= _MAX_SIDE for side in config.image_size):
        raise UserError(f"model: image_size = {quoted(config.image_size)} must be from 1 to {_MAX_SIDE:,} pixels.")
    name, units, min_stages = (
        ("units", config.units, 1) if isinstance(config, ResNetConfig) else ("stem", config.stem or (), 0)
    )
    if not min_stages <= len(units) <= _MAX_STAGES or not all(1 <= unit <= _MAX_UNITS for unit in units):
        raise UserError(
            f"model: {name} = {quoted(units)} must have {min_stages} to {_MAX_STAGES} stages, each of 1 to {_MAX_UNITS} units."
        )


def stem_reduction(stem: tuple[int, ...] | None) -> int:
    """The factor by which a hybrid's stem downsamples; 1 without a stem. stem: units of each stage."""
    return 1 if stem is None else 4 * 2 ** max(len(stem) - 1, 0)


def _as_yaml(value: object) -> str:
    return "null" if value is None else str(value).lower()


def _nearest_multiples(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} or {below + step}" if below > 0 else str(step)


def _did_you_mean(word: str, known: list[str]) -> str:
    # In lower case, so that "vit-l/16" finds "ViT-L/16". `max` returns the first of several equal entries.
    def similarity(candidate: str) -> float:
        return difflib.SequenceMatcher(None, word.lower(), candidate.lower()).ratio()

    return f'; did you mean "{max(known, key=similarity)}"? Known: {", ".join(known)}.'
