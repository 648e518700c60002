"""What `config.py` declares the fields of a model with: `option`, and the base of the configurations."""

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

from pipeline.architecture.pixels import Pixels
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.json_record import Limits, quoted

REQUIRED = dataclasses.MISSING
_MAX_SIDE = 2**16  # Far above every published model: a damaged file must not allocate more.
# The fields of the first files, in their order, so that a file has the same bytes as before. Others follow if they are not at
# their defaults.
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


@dataclass(frozen=True)
class Option(Limits):
    """What a run may set of a model, in the section `model` of its settings: see `option`. kind: type of the setting, filled in by config.py."""

    doc: str = ""
    setting: Any = ...
    only_trains: bool = False
    kind: Any = None


def option(default: Any, doc: str, **rule: Any) -> Any:
    """A field that a run may set, in the section `model` of its settings.

    default: of files without the field; REQUIRED is none. doc: its help. rule: the limits of a number (`Limits`), and
    setting: default of the setting; without it, that of the field; None is what the model's name implies.
    only_trains: the field changes neither the weights nor what they compute after training, so a run may set it for weights that exist.
    """
    return dataclasses.field(default=default, metadata={"rule": Option(doc=doc, **rule)})


class Fields:
    """Base of the configurations: checks each field, and turns them into plain data."""

    image_size: tuple[int, int]
    num_classes: int
    pixels: Pixels

    def __post_init__(self) -> None:
        """Raise UserError for a value of another type or out of its range."""
        hints = json_record.type_hints(cast(Any, type(self)))
        for field in dataclasses.fields(cast(Any, self)):
            if not isinstance(value := getattr(self, field.name), tuple | Pixels):
                json_record.Converter("model").convert(value, hints[field.name], field.name, field.metadata.get("rule"))
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
