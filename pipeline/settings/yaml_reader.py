"""Reads YAML text as plain values; every mistake is a one-line error. Knows no settings class.

`read_table` reads the tables of facts that stand beside the modules which explain their fields.
"""

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter

from pipeline.base.errors import UserError, naming
from pipeline.base.json_record import quoted, shortened
from pipeline.base.words import missing, on_one_line
from pipeline.process.installed import shipped

T = TypeVar("T")


class _YamlLoader(yaml.CBaseLoader):
    """Leaves every scalar but null as text, because the setting's type decides: `name: 0123` is not 83 and `1e-3` is a
    number.
    """

    def construct_scalar(self, node: Any) -> Any:
        is_null = not node.style and node.value in ("", "null", "~")  # Not in quotes.
        return None if is_null else super().construct_scalar(node)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            names = [key.value for key, _ in node.value]
            twice = next(name for name in names if names.count(name) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"{twice} is set twice", node.start_mark)
        return found


def parse_yaml(text: str) -> Any:
    """YAML text as plain values. Raises ValueError, in one line, for invalid YAML."""
    try:
        return yaml.load(text, _YamlLoader)
    except yaml.YAMLError as error:
        raise ValueError(shortened(on_one_line(error).replace('in "<unicode string>",', "at"), 400)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError for a missing file, invalid YAML and another content, OSError as the
    system does.

    A relative path `configs/...` that does not exist is the shipped file of that name.
    """
    try:
        with naming(path):
            tree = parse_yaml(shipped(path).read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(missing(path, "config file", "Shipped ones are in configs/.")) from None
    except ValueError as error:  # Also raised for bytes that are not UTF-8.
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold a mapping of settings, not {as_typed(tree)}.")
    return tree


def read_table(module: str, kind: type[T]) -> T:
    """Returns the YAML file beside a module, of the same name, as `kind`. module: `__file__`."""
    path = Path(module).with_suffix(".yaml")
    return TypeAdapter(kind).validate_python(yaml.safe_load(path.read_text("utf-8")))


def as_typed(value: Any) -> str:
    """A value roughly as the user wrote it, at most 200 characters on one line: printable text without quotes."""
    return shortened(value) if isinstance(value, str) and value and value.isprintable() else quoted(value)
