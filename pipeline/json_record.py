"""Reads JSON that may be damaged, or comes from another program, into typed dataclasses.

All such files (of checkpoints, data sets, Hugging Face models) are read by `read` or `parse`, so that a wrong type is a
one-line error with the file and the field, not a KeyError later. Standard library only, because `pipeline.model` uses it.

    @dataclass(frozen=True)
    class Head:
        classes: list[str]
        bias: float | None = None

    head = json_record.read(Path("head.json"), Head)      # UserError: head.json: classes[2] = 7 must be text.
"""

import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import UserError
from pipeline.words import counted

T = TypeVar("T")

# Most files have some KB; a list of 14 million excluded samples has some hundred MB.
MAX_BYTES = 1 << 30
MAX_QUOTED = 200  # Characters of a value that an error repeats.


def read(path: Path, kind: type[T], max_bytes: int = MAX_BYTES) -> T:
    """Returns the content of a JSON file as `kind`: a dataclass, or any type that `convert` accepts.

    Raises FileNotFoundError if the file is missing, and UserError for a folder, a file above `max_bytes`, invalid JSON, and
    a field that is missing or of the wrong type.
    """
    try:
        if not path.is_file() and path.exists():
            raise UserError(f"{path} is not a regular file.")
        if path.stat().st_size > max_bytes:
            raise UserError(f"{path} has {counted(path.stat().st_size, 'byte')}, above the limit of {max_bytes:,}.")
        content = path.read_bytes()
    except NotADirectoryError:
        raise FileNotFoundError(path) from None
    return parse(content, kind, str(path))


def parse(text: str | bytes, kind: type[T], where: str) -> T:
    """Returns JSON text as `kind`. where: name of the source in errors. Raises UserError."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # Also UnicodeDecodeError and integers of over 4,300 digits.
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise UserError(f"{where} is not valid JSON ({reason[:MAX_QUOTED]}): the file is damaged.") from None
    return convert(value, kind, where)


def convert(value: Any, kind: Any, where: str, name: str = "") -> Any:
    """Check a decoded JSON value against a type, and convert mappings to dataclasses. Returns the value.

    kind: a dataclass (unknown keys are ignored, as other versions may have more), None, bool, int, float (or a whole
        number), str, Any, Literal, X | Y, list[X], dict[str, X], tuple[X, Y] or tuple[X, ...].
    Nothing else is coerced: "3" is not 3, and true is not 1. Raises UserError with `where`, the field and the value.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _record(value, typing.cast(type, kind), where, name)
    if origin in (typing.Union, types.UnionType):
        return _any_of(value, arguments, where, name, kind)
    if origin is typing.Literal and any(value == choice and type(value) is type(choice) for choice in arguments):
        return value
    if origin is list and isinstance(value, list):
        return [convert(item, arguments[0], where, f"{name}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: convert(item, arguments[1], where, _inner(name, key)) for key, item in value.items()}
    if origin is tuple and isinstance(value, list):
        kinds = (arguments[0],) * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            return tuple(convert(item, kinds[i], where, f"{name}[{i}]") for i, item in enumerate(value))
    if kind is float and type(value) in (int, float):
        number = _float(value)
        if number is not None:
            return number
    if kind in (bool, int, str, type(None), dict, list) and type(value) is kind:
        return value
    raise UserError(f"{where}: {name or 'the content'} = {quoted(value)} must be {type_name(kind)}.")


def type_name(kind: Any) -> str:
    """The type as named in errors, such as "a whole number" or "a list of text"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin is list:
        return f"a list of {type_name(arguments[0]).removeprefix('a ')}"
    if origin is tuple:
        return "a list" if arguments[-1] is Ellipsis else f"a list of {len(arguments)}"
    if origin is dict or dataclasses.is_dataclass(kind):
        return "a mapping"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return names.get(kind, {dict: "a mapping", list: "a list"}.get(kind, str(kind)))


def quoted(value: Any) -> str:
    """The repr of a value for an error: at most 200 characters on one line."""
    try:
        text = repr(value)
    except ValueError:  # An integer of over 4,300 digits.
        return "a number of thousands of digits"
    return shortened(text)


def shortened(text: str, limit: int = MAX_QUOTED) -> str:
    """The text, or its first `limit` characters and its length."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def _record(value: dict, kind: type, where: str, name: str) -> Any:
    hints = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        inner = _inner(name, field.name)
        if field.name in value:
            values[field.name] = convert(value[field.name], hints[field.name], where, inner)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}: {inner} is missing.")
    return kind(**values)


def _any_of(value: Any, kinds: tuple, where: str, name: str, kind: Any) -> Any:
    # An error about an item of a mapping or list is more helpful than "must be a mapping or null".
    if value is None and type(None) in kinds:
        return None
    rest = [option for option in kinds if option is not type(None)]
    if len(rest) == 1 and isinstance(value, (dict, list)):
        return convert(value, rest[0], where, name)
    for option in rest:
        try:
            return convert(value, option, where, name)
        except UserError:
            continue
    raise UserError(f"{where}: {name or 'the content'} = {quoted(value)} must be {type_name(kind)}.")


def _inner(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _float(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _refuse_constant(text: str) -> typing.NoReturn:
    raise ValueError(f"{text} is not valid JSON")
