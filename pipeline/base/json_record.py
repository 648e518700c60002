"""Reads JSON that may be damaged, or comes from another program, into typed dataclasses.

All such files (of checkpoints, data sets, Hugging Face models) are read by `read` or `parse`, so that a wrong type is a
one-line error with the file and the field, not a KeyError later. Standard library only, because `pipeline.model` uses
it; settings, which have ranges and come from users, are read by pydantic (settings/schema.py).

    @dataclass(frozen=True)
    class Head:
        classes: list[str]
        bias: float | None = None

    head = json_record.read(Path("head.json"), Head)      # UserError: head.json: classes[2] = 7 must be str.
"""

import contextlib
import dataclasses
import functools
import json
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from pipeline.base.errors import UserError
from pipeline.base.words import on_one_line

T = TypeVar("T")

MAX_QUOTED = 200  # Characters of a value that an error repeats.
# Types of a class's fields by name, which Python works out anew in each call, half of the time of a conversion.
type_hints = functools.cache(typing.get_type_hints)


def read(path: Path, kind: type[T]) -> T:
    """Returns the content of a JSON file as `kind`: a dataclass, or any type that `convert` accepts.

    Raises FileNotFoundError if the file is missing, and UserError for a folder, invalid JSON, and a field that is
    missing or of the wrong type.
    """
    try:
        content = path.read_bytes()
    except NotADirectoryError:
        raise FileNotFoundError(path) from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a file.") from None
    return parse(content, kind, str(path))


def read_or_none(path: Path, kind: type[T]) -> T | None:
    """Like `read`, but None for a file that is missing, damaged or unreadable."""
    try:
        return read(path, kind)
    except (OSError, UserError):
        return None


def parse(text: str | bytes, kind: type[T], where: str) -> T:
    """Returns JSON text as `kind`. where: name of the source in errors. Raises UserError."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:  # Also UnicodeDecodeError.
        raise UserError(
            f"{where} is not valid JSON ({on_one_line(error)[:MAX_QUOTED]}): the file is damaged."
        ) from None
    return convert(value, kind, where)


def convert(value: Any, kind: Any, where: str, name: str = "") -> Any:
    """Check a decoded JSON value against a type, and convert mappings to dataclasses. Returns the value.

    kind: a dataclass (unknown keys are ignored, as other versions may have more), None, bool, int, float (or a whole
        number), str, dict, list, Any, Literal, X | Y, list[X], dict[str, X], tuple[X, Y] or tuple[X, ...].
    Nothing else is coerced: "3" is not 3, and true is not 1. Raises UserError with `where`, the field and the value.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        first, *others = [option for option in arguments if option is not type(None) or value is None]
        for option in others:
            with contextlib.suppress(UserError):
                return convert(value, option, where, name)
        return convert(value, first, where, name)  # Also for its error.
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints, inner = type_hints(typing.cast(Any, kind)), f"{name}." if name else ""
        found = {key: convert(value[key], hints[key], where, f"{inner}{key}") for key in hints if key in value}
        for field in dataclasses.fields(kind):
            if field.name not in found and field.default is field.default_factory:  # It has neither.
                raise UserError(f"{where}: {inner}{field.name} is missing.")
        return typing.cast(Any, kind)(**found)
    if origin is dict and isinstance(value, dict):
        return {
            key: convert(item, arguments[1], where, f"{name}.{key}" if name else key) for key, item in value.items()
        }
    if origin in (list, tuple) and isinstance(value, list):
        kinds = arguments if origin is tuple and arguments[-1] is not Ellipsis else (arguments[0],) * len(value)
        if len(kinds) == len(value):
            return origin(
                convert(item, inner, where, f"{name}[{i}]")
                for i, (item, inner) in enumerate(zip(value, kinds, strict=True))
            )
    if kind is float and type(value) in (int, float) and (number := finite(value)) is not None:
        return number
    if kind is Any or type(value) is kind or (origin is typing.Literal and value in arguments):
        return value
    raise UserError(f"{where}: {name or 'the content'} = {quoted(value)} must be {getattr(kind, '__name__', kind)}.")


def readable(value: Any) -> Any:
    """A decoded JSON value in whose texts all is UTF-8: bytes of paths that are not become replacement characters."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="surrogateescape").decode(errors="replace")
    if isinstance(value, list):
        return [readable(item) for item in value]
    return {readable(key): readable(item) for key, item in value.items()} if isinstance(value, dict) else value


def quoted(value: Any) -> str:
    """The repr of a value for an error: at most 200 characters on one line."""
    return shortened(repr(value))


def shortened(text: str, limit: int = MAX_QUOTED) -> str:
    """The text, or its first `limit` characters and its length."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def finite(value: Any) -> float | None:
    """The value of a number, or of a number in a text, as a float; None for infinity, NaN and everything else."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def without_nan(value: Any) -> Any:
    """A value for `json.dumps` in which None replaces each NaN and infinity: JSON has neither, and `read` refuses
    them.
    """
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(part) for part in value]
    return finite(value) if isinstance(value, float) else value


def _refuse_constant(text: str) -> typing.NoReturn:
    raise ValueError(f"{text} is not valid JSON")
