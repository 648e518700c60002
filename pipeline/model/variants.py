"""The sizes of ViT by name, and the frozen description of one model."""

import difflib
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

from pipeline.errors import UserError

Gelu = Literal["tanh", "erf"]
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


@dataclass(frozen=True)
class ViTConfig:
    """What decides the shape and the function of a ViT. Raises UserError for numbers that do not fit together."""

    width: int  # D, of every token
    depth: int  # blocks
    mlp_width: int  # hidden units of the MLP in a block
    num_heads: int
    patch_size: int  # P, in pixels
    image_size: tuple[int, int]  # height, width, in pixels
    num_classes: int  # 0: no head, the model returns its features
    representation: bool = False  # Dense(D) and tanh before the head ("pre_logits"), as in the official I21k weights
    gelu: Gelu = "tanh"  # the official code computes tanh; timm and HF compute erf
    dropout: float = 0.0  # probability to drop; ViT paper, Table 3
    head_bias: float = 0.0  # initial value of the head's bias; -10 is usual with a sigmoid loss over 21k classes

    def __post_init__(self) -> None:
        for name in ("width", "depth", "mlp_width", "num_heads", "patch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"model: {name} = {getattr(self, name)} must be at least 1.")
        if self.num_classes < 0:
            raise UserError(f"model: num_classes = {self.num_classes} is negative; 0 means no head.")
        if self.width % self.num_heads:
            raise UserError(
                f"model: width = {self.width} is not divisible by num_heads = {self.num_heads}. "
                f"Use {_nearest_multiples(self.width, self.num_heads)} wide, or another number of heads."
            )
        for side in self.image_size:
            if side < 1 or side % self.patch_size:
                raise UserError(
                    f"model: image_size = {side} is not divisible by patch_size = {self.patch_size}. "
                    f"Nearest sizes: {_nearest_multiples(side, self.patch_size)}."
                )
        if self.gelu not in ("tanh", "erf"):
            raise UserError(f'model: gelu = "{self.gelu}" is unknown: use "tanh" (official code) or "erf" (timm, HF).')
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"model: dropout = {self.dropout} must be in [0, 1).")

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        return self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size

    @property
    def num_tokens(self) -> int:
        """Patches and the class token."""
        return 1 + self.grid[0] * self.grid[1]

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, YAML and weights files; image_size becomes a list."""
        return {**asdict(self), "image_size": list(self.image_size)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ViTConfig":
        """The inverse of to_dict. Raises UserError for a field that is unknown or missing."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(values.keys() - set(known)):
            raise UserError(f"model: unknown field {unknown[0]!r}{_did_you_mean(unknown[0], known)}")
        try:
            return cls(**{**values, "image_size": as_pair(values["image_size"])})
        except (KeyError, TypeError) as error:
            raise UserError(f"model: the description is not complete: {error}.") from error


def parse_name(name: str) -> tuple[Variant, int]:
    """ "ViT-L/16" -> (sizes of L, patch side 16). Any patch side may be given. Raises UserError for an unknown name."""
    match = re.fullmatch(r"ViT-(\w+)/([1-9]\d*)", name)
    if match is None or match[1] not in VARIANTS:
        patch = re.search(r"(?<=/)\d+$", name)
        known = [f"ViT-{variant}/{patch[0] if patch else 16}" for variant in VARIANTS]
        raise UserError(f'model: "{name}" is no ViT that we know{_did_you_mean(name, known)}')
    return VARIANTS[match[1]], int(match[2])


def configure(
    name: str,
    image_size: ImageSize = 224,
    num_classes: int = 1000,
    *,
    representation: bool = False,
    gelu: Gelu = "tanh",
    dropout: float = 0.0,
    head_bias: float = 0.0,
    width: int | None = None,
    depth: int | None = None,
    mlp_width: int | None = None,
    num_heads: int | None = None,
) -> ViTConfig:
    """The configuration of a named ViT; see `create`, which also builds it."""
    variant, patch_size = parse_name(name)
    return ViTConfig(
        width=variant.width if width is None else width,
        depth=variant.depth if depth is None else depth,
        mlp_width=variant.mlp_width if mlp_width is None else mlp_width,
        num_heads=variant.num_heads if num_heads is None else num_heads,
        patch_size=patch_size,
        image_size=as_pair(image_size),
        num_classes=num_classes,
        representation=representation,
        gelu=gelu,
        dropout=dropout,
        head_bias=head_bias,
    )


def as_pair(size: ImageSize | list[int]) -> tuple[int, int]:
    """A side, or (height, width) -> (height, width)."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _nearest_multiples(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} or {below + step}" if below > 0 else str(step)


def _did_you_mean(word: str, known: list[str]) -> str:
    # Compared in lower case, so that "vit-l/16" finds "ViT-L/16"; the sort is stable, so ties go to the earlier entry.
    def likeness(candidate: str) -> float:
        return difflib.SequenceMatcher(None, word.lower(), candidate.lower()).ratio()

    return f'; did you mean "{max(known, key=likeness)}"? Known: {", ".join(known)}.'
