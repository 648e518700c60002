"""The base of the models' configurations."""

from typing import Any

from pipeline.architecture.pixels import Pixels
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted

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

    image_size: tuple[int, int]
    num_classes: int
    pixels: Pixels

    def __post_init__(self) -> None:
        """Raise UserError for an impossible image size."""
        if not all(1 <= side <= _MAX_SIDE for side in self.image_size):
            raise UserError(f"model: image_size = {quoted(self.image_size)} must be from 1 to {_MAX_SIDE:,} pixels.")

    def added(self) -> dict[str, Any]:
        """The fields that the first files did not have, where they are not at their defaults."""
        later = vars(self).keys() - set(_FIRST_SAVED)
        return {
            name: value for name, value in vars(self).items() if name in later and value != getattr(type(self), name)
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, YAML and weights files; tuples become lists."""
        values = {name: vars(self)[name] for name in _FIRST_SAVED if name in vars(self)} | self.added()
        if "pixels" in values:
            values["pixels"] = self.pixels.to_dict()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
