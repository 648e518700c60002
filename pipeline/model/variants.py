"""The models by name, and the frozen description of each: `ViTConfig` or `ResNetConfig`."""

import difflib
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple, NoReturn

from pipeline import json_record
from pipeline.errors import UserError
from pipeline.json_record import quoted

Gelu = Literal["tanh", "erf"]
Pool = Literal["token", "gap", "map"]
Positions = Literal["learned", "learned2d", "sincos2d", "relative", "none"]
PositionsAt = Literal["stem", "blocks", "shared"]
# ViT paper, B.1.2: the mean colour of 3 bits a channel; 16 such colours, of the patch made 4 x 4; the pixels themselves.
Masked = Literal["mean_color", "small_patch", "pixels"]
ImageSize = int | tuple[int, int]


class Variant(NamedTuple):
    width: int
    depth: int
    mlp_width: int
    num_heads: int


# B, L, H: ViT paper, Table 1. Ti, S: google-research/vision_transformer, vit_jax/configs/models.py.
# The rest: google-research/big_vision, models/vit.py (mu is its size for tests).
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

# Name -> size of the ViT, units of the ResNet's stages in front of it, patch side in cells of its output. The number in a
# name is how many pixels a token stands for (ViT paper, section 4.1; vit_jax/configs/models.py), but for R+Ti/16: its
# root alone reduces 4 times, not 2 as a comment there says, so its tokens stand for 32.
HYBRIDS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "R50+ViT-B/16": ("B", (3, 4, 9), 1),
    "R50+ViT-B/32": ("B", (3, 4, 6, 3), 1),
    "R50+ViT-L/16": ("L", (3, 4, 9), 1),
    "R50+ViT-L/32": ("L", (3, 4, 6, 3), 1),
    "R26+S/32": ("S", (2, 2, 2, 2), 1),
    "R+Ti/16": ("Ti", (), 8),
}

# The largest values accepted, far above every published model: a damaged file must not make us build anything larger.
_LARGEST = {
    "width": 2**16, "depth": 1024, "mlp_width": 2**18, "num_heads": 2**12, "patch_size": 2**12, "num_classes": 2**24,
}  # fmt: skip
_LARGEST_SIDE, _MOST_TOKENS, _MOST_STAGES, _MOST_UNITS = 2**16, 2**17, 8, 1024
_LARGEST_EPS, _LARGEST_HEAD_BIAS, _MOST_REGISTERS = 1.0, 1000.0, 256

# Units in each stage of a BiT ResNet (google-research/big_vision, models/bit.py).
RESNET_UNITS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}


@dataclass(frozen=True)
class ViTConfig:
    """What decides the shape and the function of a ViT. Raises UserError for numbers that do not fit together."""

    width: int  # D, of every token
    depth: int  # blocks
    mlp_width: int  # hidden units of the MLP in a block
    num_heads: int
    patch_size: int  # P, in pixels; of a hybrid, in cells of the ResNet's output
    image_size: tuple[int, int]  # height, width, in pixels
    num_classes: int  # 0: no head, the model returns its features
    representation: bool = False  # Dense(D) and tanh before the head ("pre_logits"), as in the official I21k weights
    gelu: Gelu = "tanh"  # the official code computes tanh; timm and HF compute erf
    dropout: float = 0.0  # probability to drop; ViT paper, Table 3
    head_bias: float = 0.0  # initial value of the head's bias; -10 is usual with a sigmoid loss over 21k classes
    drop_path: float = 0.0  # probability that the last block's branches are left out; the first block's is 0
    pool: Pool = "token"  # the head reads a class token, the tokens' mean, or an attention-weighted mean (MAP)
    positions: Positions = "learned"  # ViT paper, D.4: 1-D, 2-D, fixed sine-cosine, relative, or none
    positions_at: PositionsAt = "stem"  # added once; or before every block: a table for each, or the same one (shared)
    patch_stride: int | None = None  # cells from patch to patch; below patch_size they overlap. None: patch_size
    stem: tuple[int, ...] | None = None  # a hybrid: units of each stage of the ResNet in front; () is its root alone
    axial: bool = False  # each block attends along rows, then along columns (ViT paper, D.6)
    layer_norm_eps: float = 1e-6  # flax's default, and so the official code's; Hugging Face's ViT has 1e-12, torch 1e-5
    masked: Masked | None = None  # pre-training by masked patch prediction (masked.py): what is predicted of a patch
    registers: int = 0  # tokens after the class token without a position, read by no head (arXiv 2309.16588)

    def __post_init__(self) -> None:
        _check_ranges(self)
        for name in ("width", "depth", "mlp_width", "num_heads", "patch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"model: {name} = {getattr(self, name)} must be at least 1.")
        if self.width % self.num_heads:
            raise UserError(
                f"model: width = {self.width} is not divisible by num_heads = {self.num_heads}. "
                f"Use {_nearest_multiples(self.width, self.num_heads)} wide, or another number of heads."
            )
        if self.gelu not in ("tanh", "erf"):
            raise UserError(f'model: gelu = "{self.gelu}" is unknown: use "tanh" (official code) or "erf" (timm, HF).')
        for name in ("dropout", "drop_path"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"model: {name} = {getattr(self, name)} must be in [0, 1).")
        if not 0 < self.layer_norm_eps <= _LARGEST_EPS:
            raise UserError(
                f"model: layer_norm_eps = {self.layer_norm_eps} must be greater than 0, and at most {_LARGEST_EPS:g}."
            )
        self._check_positions()
        self._check_registers()
        if self.axial and self.pool == "token":
            raise UserError("model: a class token has no row and no column to attend along. Use pool=gap or pool=map.")
        if not 1 <= self.stride <= self.patch_size:
            raise UserError(
                f"model: patch_stride = {self.stride} must be from 1 to patch_size = {self.patch_size}: a longer one "
                "leaves pixels that no patch sees."
            )
        if self.masked or self.stem is not None or min(self.image_size) < self.patch_size:
            self.check_covered()
        if self.num_tokens > _MOST_TOKENS:
            raise UserError(
                f"model: image_size = {self.image_size[0]} x {self.image_size[1]} in patches of {self.patch_pixels} pixels is "
                f"{self.num_tokens:,} tokens, more than {_MOST_TOKENS:,}. Use larger patches or a smaller image."
            )
        if self.masked:
            self._check_masked()

    def _check_masked(self) -> None:
        if self.num_classes or self.representation or self.pool == "map" or self.axial:
            raise UserError(
                "model: masked patch prediction reads the tokens of patches, and has neither classes nor a representation "
                "layer, attention pooling or axial blocks. Use representation=false, and pool=token or pool=gap."
            )
        if self.masked == "small_patch" and self.patch_pixels % 4:
            raise UserError(
                f"model: masked = small_patch makes 4 x 4 of each patch, whose side is {self.patch_pixels} pixels. Use a "
                "patch side divisible by 4, or mean_color."
            )

    def _check_registers(self) -> None:
        if not 0 <= self.registers <= _MOST_REGISTERS:
            raise UserError(f"model: registers = {self.registers} must be from 0 to {_MOST_REGISTERS}.")
        odd = self.positions == "relative" or self.positions_at != "stem" or self.axial or self.pool == "map"
        if self.registers and (odd or self.masked):
            raise UserError(
                "model: registers have no position, and are read by no head. Use them with pool=token or pool=gap, positions "
                "at the stem that are not relative, and neither axial blocks nor masked patch prediction."
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
        """Raise UserError if there are pixels that no patch sees: for a new model that is a mistake."""
        for side, unseen in zip(self.image_size, self.unseen, strict=True):
            if unseen:
                self._refuse_side(side)

    def _refuse_side(self, side: int) -> NoReturn:
        patch, step = self.patch_size * self.reduction, self.stride * self.reduction  # in pixels
        below = patch + max(side - patch, 0) // step * step
        nearest = f"{below} or {below + step}" if side >= patch else f"{patch}"
        if step == patch:
            why = f"is not divisible by patch_size = {patch}"
            why += f" ({self.patch_size} x {self.reduction})" if self.reduction > 1 else ""
        else:
            why = f"is not patch_size = {patch} and whole strides of {step}"
        raise UserError(f"model: image_size = {side} {why}. Nearest sizes: {nearest}.")

    @property
    def stride(self) -> int:
        """Cells from patch to patch."""
        return self.patch_size if self.patch_stride is None else self.patch_stride

    @property
    def reduction(self) -> int:
        """Pixels to a side of one cell of what is cut into patches: 1 when that is the image itself."""
        return 1 if self.stem is None else 4 * 2 ** max(len(self.stem) - 1, 0)

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        rows, columns = ((side // self.reduction - self.patch_size) // self.stride + 1 for side in self.image_size)
        return rows, columns

    @property
    def unseen(self) -> tuple[int, int]:
        """(rows, columns) of pixels at the lower and right edge that no patch sees, as in the official code (padding
        "VALID"): 6 of ViT-H/14's 384 in the ViT paper's fine-tuning."""
        patch, step = self.patch_size * self.reduction, self.stride * self.reduction
        height, width = (side if side < patch else (side - patch) % step for side in self.image_size)
        return height, width

    @property
    def unseen_note(self) -> str:
        """A line on what no patch sees; empty where they see all."""
        if not any(self.unseen):
            return ""
        return (
            f"image_size = {self.image_size[0]} x {self.image_size[1]}: patches of {self.patch_pixels} pixels leave the last "
            f"{self.unseen[0]} rows and {self.unseen[1]} columns unseen"
        )

    @property
    def patch_pixels(self) -> int:
        """Side of a patch in pixels of the image."""
        return self.patch_size * self.reduction

    @property
    def num_corrupted(self) -> int:
        """Patches of an image that masked prediction is asked of: half of them (ViT paper, B.1.2)."""
        rows, columns = self.grid
        return (rows * columns + 1) // 2

    @property
    def patch_outputs(self) -> int:
        """Numbers that are predicted of a corrupted patch."""
        return {None: 0, "mean_color": 512, "small_patch": 16 * 512, "pixels": 3 * self.patch_pixels**2}[self.masked]

    @property
    def num_outputs(self) -> int:
        """Numbers that the head makes of an image: logits of classes, or predictions of its corrupted patches."""
        return self.num_corrupted * self.patch_outputs if self.masked else self.num_classes

    @property
    def num_tokens(self) -> int:
        """What the blocks read: patches, the class token if there is one, and registers."""
        return self.num_positions + self.registers

    @property
    def num_positions(self) -> int:
        """Tokens that may have a position: patches, and the class token if there is one."""
        return (self.pool == "token") + self.grid[0] * self.grid[1]

    @property
    def num_blocks(self) -> int:
        """Blocks as the model runs them: `depth`, and twice that of an axial ViT, by rows and by columns."""
        return self.depth * 2 if self.axial else self.depth

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, YAML and weights files; pairs become lists."""
        return _plain(self)


@dataclass(frozen=True)
class ResNetConfig:
    """What decides the shape of a BiT ResNet (arXiv 1912.11370). Raises UserError for numbers that do not fit."""

    units: tuple[int, ...]  # bottleneck units in each stage; each stage but the first halves height and width
    width: int  # channels after the root; stage i is 4 * 2^i times as wide
    image_size: tuple[int, int]  # height, width, in pixels; any
    num_classes: int  # 0: no head, the model returns its features
    head_bias: float = 0.0  # initial value of the head's bias

    def __post_init__(self) -> None:
        _check_ranges(self)
        if self.width < 1 or self.width % 32:
            raise UserError(f"model: width = {self.width} must be a multiple of 32, the groups of GroupNorm.")
        if min(self.image_size) < 1 or min(self.units, default=0) < 1:
            raise UserError(f"model: image_size = {self.image_size} and units = {self.units} must be at least 1.")

    @property
    def num_features(self) -> int:
        """Channels of what the head reads."""
        return 4 * self.width * 2 ** (len(self.units) - 1)

    @property
    def num_outputs(self) -> int:
        """Numbers that the head makes of an image: logits of classes."""
        return self.num_classes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, YAML and weights files; tuples become lists."""
        return _plain(self)


Config = ViTConfig | ResNetConfig


def config_from_dict(values: dict[str, Any]) -> Config:
    """The inverse of to_dict: a ResNet's has `units`. Raises UserError for a field that is unknown or missing."""
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

    name: "ViT-L/16": a size and a patch side in pixels, any; "Axial-ViT-B/16"; a hybrid, "R50+ViT-B/16"; or a ResNet,
        "BiT-R101x3": layers and width factor.
    image_size: side or (height, width) in pixels.
    covered: refuse an image size of which the patches do not see all pixels (`ViTConfig.unseen`).
    changes: fields of the configuration by name; None leaves what the name says. A field that the model does not have
        may be given with the value that means nothing.
    Raises UserError for an unknown name or field, and for numbers that do not fit together.
    """
    cls, values = _resnet(name) if name.startswith("BiT-") else _vit(name)
    own = {field.name for field in fields(cls)}
    neutral = {field.name: field.default for field in fields(ViTConfig)}
    for field, value in changes.items():
        if field in own and value is not None:
            values[field] = value
        elif field not in own and field not in neutral:
            raise UserError(f"model: unknown field {field!r}{_did_you_mean(field, sorted(own))}")
        elif field not in own and value not in (None, neutral[field]):
            raise UserError(f"model: {name} has no {field}. Set model.{field}={_as_yaml(neutral[field])}.")
    config = cls(**values, image_size=as_pair(image_size), num_classes=num_classes)
    if covered and isinstance(config, ViTConfig):
        config.check_covered()
    return config


def parse_name(name: str) -> tuple[Variant, int]:
    """ "ViT-L/16" -> (sizes of L, patch side 16). Any patch side may be given. Raises UserError for an unknown name."""
    match = re.fullmatch(r"ViT-(\w+)/([1-9]\d{0,4})", name, re.ASCII)
    if match is None or match[1] not in VARIANTS:
        patch = re.search(r"(?<=/)\d{1,5}$", name, re.ASCII)
        known = [f"ViT-{variant}/{patch[0] if patch else 16}" for variant in VARIANTS]
        known += [f"Axial-{plain}" for plain in known if "-B/" in plain] + [*HYBRIDS, *_RESNETS]
        raise UserError(f"model: {_quoted(name)} is no model that we know{_did_you_mean(name, known)}")
    return VARIANTS[match[1]], int(match[2])


def _quoted(name: str) -> str:
    return f'"{name}"' if name.isprintable() and len(name) < 100 else quoted(name)


def as_pair(size: ImageSize | list[int]) -> tuple[int, int]:
    """A side, or (height, width) -> (height, width)."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


# Of the BiT paper and the ViT paper, for advice; any width factor may be given.
_RESNETS = [f"BiT-R{name}" for name in ("50x1", "50x2", "50x3", "101x1", "101x3", "152x1", "152x2", "152x4", "200x3")]


def _vit(name: str) -> tuple[type[Config], dict[str, Any]]:
    """The class and the fields that a name stands for."""
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
        raise UserError(f"model: {_quoted(name)} is no model that we know{_did_you_mean(name, _RESNETS)}")
    return ResNetConfig, {"units": RESNET_UNITS[int(match[1])], "width": 64 * int(match[2])}


def _check_ranges(config: Config) -> None:
    """Raise UserError for a number that no model has."""
    if config.num_classes < 0:
        raise UserError(f"model: num_classes = {json_record.quoted(config.num_classes)} is negative; 0 means no head.")
    for name, largest in _LARGEST.items():
        if (value := getattr(config, name, 1)) > largest:
            raise UserError(f"model: {name} = {json_record.quoted(value)} is more than {largest:,}, the most accepted.")
    if not all(1 <= side <= _LARGEST_SIDE for side in config.image_size):
        sides = json_record.quoted(config.image_size)
        raise UserError(f"model: image_size = {sides} must be from 1 to {_LARGEST_SIDE:,} pixels.")
    units = (config.units if isinstance(config, ResNetConfig) else config.stem) or ()
    if len(units) > _MOST_STAGES or not all(1 <= unit <= _MOST_UNITS for unit in units):
        name = "units" if isinstance(config, ResNetConfig) else "stem"
        raise UserError(
            f"model: {name} = {json_record.quoted(units)} must have at most {_MOST_STAGES} stages, each of 1 to "
            f"{_MOST_UNITS} units."
        )
    if not abs(config.head_bias) <= _LARGEST_HEAD_BIAS:
        raise UserError(
            f"model: head_bias = {config.head_bias} must be from {-_LARGEST_HEAD_BIAS:g} to {_LARGEST_HEAD_BIAS:g}."
        )


def _plain(config: Config) -> dict[str, Any]:
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}
    # Left out where there are none: files of models without registers stay, byte for byte, what they were.
    return {name: value for name, value in values.items() if name != "registers" or value}


def _as_yaml(value: object) -> str:
    return "null" if value is None else str(value).lower()


def _nearest_multiples(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} or {below + step}" if below > 0 else str(step)


def _did_you_mean(word: str, known: list[str]) -> str:
    # Compared in lower case, so that "vit-l/16" finds "ViT-L/16"; the sort is stable, so ties go to the earlier entry.
    def likeness(candidate: str) -> float:
        return difflib.SequenceMatcher(None, word.lower(), candidate.lower()).ratio()

    return f'; did you mean "{max(known, key=likeness)}"? Known: {", ".join(known)}.'
