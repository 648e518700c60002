"""Reads JSON that may be damaged, or comes from another program, into typed dataclasses.

All such files (of checkpoints, data sets, Hugging Face models) are read by `read` or `parse`, so that a wrong type is a
one-line error with the file and the field, not a KeyError later. Standard library only, because `pipeline.model` uses it.

    @dataclass(frozen=True)
    class Head:
        classes: list[str]
        bias: float | None = None

    head = json_record.read(Path("head.json"), Head)      # UserError: head.json: classes[2] = 7 must be text.

The range of a number stands in its type: `share: Annotated[float, Between(0, 1)]`; those that many files have are below.
"""

import dataclasses
import functools
import json
import math
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pipeline.base.errors import UserError
from pipeline.base.files import MAX_BYTES, read_bytes

T = TypeVar("T")

MAX_QUOTED = 200  # Characters of a value that an error repeats.
# Files have at most a dozen levels. The limit keeps what walks through a value far from Python's own, of 1,000 calls.
_MAX_DEPTH = 100
# In JSON text: an escape of one half of a surrogate pair, and an exponent of which a number may be infinite.
_SURROGATE, _LARGE = re.compile(r"\\u[dD][89a-fA-F]"), re.compile(r"[eE]\+?[0-9]{3}|[0-9]{300}")


@dataclass(frozen=True)
class Between:
    """The range of a number, both ends included."""

    low: float
    high: float


Share = Annotated[float, Between(0, 1)]
# Steps, images, bytes: larger ones mean a damaged file, and a float could not hold them.
Count = Annotated[int, Between(0, 2**53 - 1)]
# Since 1970, up to the year 9999, which is the last that dates can be made of.
MAX_SECONDS = 253402300799
Time = Annotated[float, Between(0, MAX_SECONDS)]


def read(path: Path, kind: type[T], max_bytes: int = MAX_BYTES) -> T:
    """Returns the content of a JSON file as `kind`: a dataclass, or any type that `convert` accepts.

    Raises FileNotFoundError if the file is missing, and UserError for what is no regular file, a file above `max_bytes`, invalid
    JSON, and a field that is missing, of the wrong type or out of its range.
    """
    try:
        content = read_bytes(path, max_bytes)
    except NotADirectoryError:
        raise FileNotFoundError(path) from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a regular file.") from None
    return parse(content, kind, str(path))


def parse(text: str | bytes, kind: type[T], where: str) -> T:
    """Returns JSON text as `kind`. where: name of the source in errors. Raises UserError."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        is_large = _LARGE.search(text) is not None
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite if is_large else None)
        if text.count("[") + text.count("{") > _MAX_DEPTH and _is_deeper(value, _MAX_DEPTH):
            raise RecursionError
        if _SURROGATE.search(text):
            # Half of a pair is no character. Python uses some of them for bytes of a path that are not UTF-8: see `readable`.
            json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
    except (ValueError, RecursionError) as error:  # Also UnicodeDecodeError and integers of over 4,300 digits.
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise UserError(f"{where} is not valid JSON ({reason[:MAX_QUOTED]}): the file is damaged.") from None
    return convert(value, kind, where)


def convert(value: Any, kind: Any, where: str, name: str = "") -> Any:
    """Check a decoded JSON value against a type, and convert mappings to dataclasses. Returns the value.

    kind: a dataclass (unknown keys are ignored, as other versions may have more), None, bool, int, float (or a whole
        number), str, Any, Literal, X | Y, list[X], dict[str, X], tuple[X, Y] or tuple[X, ...], Annotated[X, Between(...)].
    Nothing else is coerced: "3" is not 3, and true is not 1. Raises UserError with `where`, the field and the value.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _in_range(convert(value, arguments[0], where, name), arguments[1], where, name)
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


def readable(value: Any) -> Any:
    """A decoded JSON value in whose texts all is UTF-8: bytes of paths that are not become replacement characters."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="surrogateescape").decode(errors="replace")
    if isinstance(value, list):
        return [readable(item) for item in value]
    return {readable(key): readable(item) for key, item in value.items()} if isinstance(value, dict) else value


def type_name(kind: Any) -> str:
    """The type as named in errors, such as "a whole number" or "a list of text"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return type_name(arguments[0])
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


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _in_range(number: float, limits: Between, where: str, name: str) -> float:
    if limits.low <= number <= limits.high:
        return number
    raise UserError(
        f"{where}: {name or 'the content'} = {quoted(number)} must be from {limits.low:,} to {limits.high:,}."
    )


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and mappings in a value are nested more than `levels` deep."""
    if not isinstance(value, (list, dict)):
        return False
    inside = value if isinstance(value, list) else value.values()
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inside)


def _record(value: dict, kind: type, where: str, name: str) -> Any:
    hints = _hints(kind)
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
    if len(rest) == 1 and (isinstance(value, (dict, list)) or typing.get_origin(rest[0]) is Annotated):
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


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def _refuse_constant(text: str) -> typing.NoReturn:
    raise ValueError(f"{text} is not valid JSON")
