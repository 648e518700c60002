"""Models by name, and configurations from names, changes and saved files."""

import difflib
import re
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from pipeline.architecture.config import Config, ResNetConfig, Size, ViTConfig
from pipeline.architecture.pixels import as_lists
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted

ImageSize = int | Size


class Variant(NamedTuple):
    width: int
    depth: int
    mlp_width: int
    num_heads: int


# B, L, H: ViT paper, Table 1. Ti, S: google-research/vision_transformer, vit_jax/configs/models.py.
# The others: google-research/big_vision, models/vit.py (mu is its size for tests).
VARIANTS = {
    "mu": Variant(32, 1, 128, 2),
    "Ti": Variant(192, 12, 768, 3),
    "S": Variant(384, 12, 1536, 6),
    "M": Variant(512, 12, 2048, 8),
    "B": Variant(768, 12, 3072, 12),
    "L": Variant(1024, 24, 4096, 16),
    "So400m": Variant(1152, 27, 4304, 16),
    "H": Variant(1280, 32, 5120, 16),
    "g": Variant(1408, 40, 6144, 16),
    "G": Variant(1664, 48, 8192, 16),
    "e": Variant(1792, 56, 15360, 16),
}

# Name -> size of the ViT, units of each stage of the ResNet stem, patch side in cells of the stem's output. The number
# in a name is the side of a token in pixels (ViT paper, section 4.1; vit_jax/configs/models.py). R+Ti/16 is an
# exception: its root downsamples 4 times, not 2 as a comment there says, so the side of its tokens is 32.
HYBRIDS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "R50+ViT-B/16": ("B", (3, 4, 9), 1),
    "R50+ViT-B/32": ("B", (3, 4, 6, 3), 1),
    "R50+ViT-L/16": ("L", (3, 4, 9), 1),
    "R50+ViT-L/32": ("L", (3, 4, 6, 3), 1),
    "R26+S/32": ("S", (2, 2, 2, 2), 1),
    "R+Ti/16": ("Ti", (), 8),
    "R8+Ti/8": ("Ti", (1, 1), 1),  # ours, for images of 32 px
}

# Units in each stage of a BiT ResNet (google-research/big_vision, models/bit.py). 26 is the smallest hybrid's, for
# small studies.
RESNET_UNITS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}


def config_from_dict(values: dict[str, Any]) -> Config:
    """The inverse of to_dict. A field that did not exist when the file was made has its default.

    Raises UserError for unknown fields, missing ones without a default, and wrong types.
    """
    cls: type[Config] = ResNetConfig if "units" in values else ViTConfig
    known = [field.name for field in fields(cls)]
    if unknown := sorted(map(str, values.keys() - set(known))):
        raise UserError(f"model: unknown field {unknown[0][:200]!r}{_did_you_mean(unknown[0][:200], known)}")
    return json_record.convert(as_lists(values), cls, "model")


def configure(
    name: str, image_size: ImageSize = 224, num_classes: int = 1000, *, covered: bool = True, **changes: Any
) -> Config:
    """The configuration of a named model.

    name: "ViT-L/16": a size and any patch side in pixels; "Axial-ViT-B/16"; a hybrid, "R50+ViT-B/16"; or a ResNet,
        "BiT-R101x3": layers and width factor.
    image_size: side or (height, width) in pixels.
    covered: refuse an image size with pixels that no patch covers (`ViTConfig.unseen`).
    changes: fields of the configuration by name; None keeps the value that the name implies. Fields of the other kind
    of
        model are accepted with their defaults.
    Raises UserError for an unknown name or field, and for values that do not fit together.
    """
    cls, values = implied(name)
    own = {field.name for field in fields(cls)}
    neutral = {field.name: field.default for kind in (ResNetConfig, ViTConfig) for field in fields(kind)}
    for field, value in changes.items():
        if field not in neutral:
            raise UserError(f"model: unknown field {field!r}{_did_you_mean(field, sorted(own))}")
        if field in own and value is not None:
            values[field] = tuple(value) if isinstance(value, list) else value
        elif field not in own and value not in (None, neutral[field]):
            default = None if neutral[field] is MISSING else neutral[field]
            raise UserError(f"model: {name} has no {field}. Set model.{field}={as_yaml(default)}.")
    config = cls(**values, image_size=as_pair(image_size), num_classes=num_classes)
    if covered and isinstance(config, ViTConfig):
        config.check_covered()
    return config


def as_pair(size: ImageSize | list[int]) -> Size:
    """A side, or (height, width) -> (height, width)."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def implied(name: str) -> tuple[type[Config], dict[str, Any]]:
    """The class of the configuration, and the fields that the name implies. Raises UserError for an unknown name."""
    if name in HYBRIDS:
        letter, stem, patch_size = HYBRIDS[name]
        return ViTConfig, {**VARIANTS[letter]._asdict(), "patch_size": patch_size, "stem": stem}
    bit = re.fullmatch(r"BiT-R(\d{1,5})x([1-9]\d{0,2})", name, re.ASCII)
    if bit and int(bit[1]) in RESNET_UNITS:
        return ResNetConfig, {"units": RESNET_UNITS[int(bit[1])], "width": 64 * int(bit[2])}
    vit = re.fullmatch(r"(Axial-)?ViT-(\w+)/([1-9]\d{0,4})", name, re.ASCII)
    if vit and vit[2] in VARIANTS:
        kind = {"axial": True, "pool": "gap"} if vit[1] else {}
        return ViTConfig, {**VARIANTS[vit[2]]._asdict(), "patch_size": int(vit[3]), **kind}
    known = [*(f"ViT-{variant}/16" for variant in VARIANTS), "Axial-ViT-B/16", *HYBRIDS, "BiT-R50x1"]
    raise UserError(f"model: {quoted(name)} is an unknown model{_did_you_mean(name, known)}")


def as_yaml(value: object) -> str:
    """A value as a settings file has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _did_you_mean(word: str, known: list[str]) -> str:
    lower = {candidate.lower(): candidate for candidate in known}  # so that "vit-l/16" finds "ViT-L/16"
    (nearest,) = difflib.get_close_matches(word.lower(), lower, 1, 0)
    return f'; did you mean "{lower[nearest]}"? Known: {", ".join(known)}.'
