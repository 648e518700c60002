"""What `config.py` declares the fields of a model with: the mark `Option`, and the base of the configurations."""

from dataclasses import dataclass
from typing import Any, cast

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.json_record import Limits, quoted

_MAX_SIDE = 2**16  # Far above every published model: a damaged file must not allocate more.
# The fields of the first files, in their order, so that a file has the same bytes as before. Others follow if they are not at
# their defaults.
_FIRST_SAVED = (
    "units", "width", "depth", "mlp_width", "num_heads", "patch_size", "image_size", "num_classes", "representation", "gelu",
    "dropout", "head_bias", "drop_path", "pool", "positions", "positions_at", "patch_stride", "stem", "axial", "layer_norm_eps",
    "masked",
)  # fmt: skip


@dataclass(frozen=True)
class Option(Limits):
    """Marks a field that a run may set, in the section `model` of its settings.

    doc: its help. setting: default of the setting; ... is that of the field, which files without the field have, and None is what
    the model's name implies. only_trains: the field changes neither the weights nor what they compute after training, so a run
    may set it for weights that exist. kind: type of the setting, filled in below.
    """

    doc: str = ""
    setting: Any = ...
    only_trains: bool = False
    kind: Any = None


class Fields:
    """Base of the configurations: checks each field, and turns them into plain data."""

    image_size: tuple[int, int]
    num_classes: int

    def __post_init__(self) -> None:
        """Raise UserError for a value of another type or out of its range."""
        hints = json_record.type_hints(cast(Any, type(self)))
        for name, value in vars(self).items():
            if not isinstance(value, tuple):
                json_record.convert(value, hints[name], "model", name)
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
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
