"""Reads JSON that may be damaged, or comes from another program, into typed dataclasses.

All such files (of checkpoints, data sets, Hugging Face models) are read by `read` or `parse`, so that a wrong type is a
one-line error with the file and the field, not a KeyError later. Standard library only, because `pipeline.model` uses it.
Settings are read by a more lenient `Converter` (settings/schema.py).

    @dataclass(frozen=True)
    class Head:
        classes: list[str]
        bias: float | None = None

    head = json_record.read(Path("head.json"), Head)      # UserError: head.json: classes[2] = 7 must be text.

The range of a number stands in its type: `share: Annotated[float, Limits(0, 1)]`; those that many files have are below.
"""

import contextlib
import dataclasses
import functools
import json
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pipeline.base.errors import UserError
from pipeline.base.words import on_one_line

T = TypeVar("T")

MAX_QUOTED = 200  # Characters of a value that an error repeats.


@functools.cache
def type_hints(cls: Any) -> dict[str, Any]:
    """Types of a class's fields by name. Kept, because Python works them out anew in each call, half of the time of a conversion."""
    return typing.get_type_hints(cls, include_extras=True)


@dataclass(frozen=True)
class Limits:
    """The range of a number: min and max belong to it, above and below do not; None is no limit."""

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    def accepts(self, number: float) -> bool:
        return (
            (self.min is None or number >= self.min)
            and (self.above is None or number > self.above)
            and (self.max is None or number <= self.max)
            and (self.below is None or number < self.below)
        )

    @property
    def range(self) -> str:
        """The range in words, such as "from 1 to 16,384" or "at least 0 and below 1"; empty without limits."""
        if self.min is not None and self.max is not None:
            return f"from {plain(self.min)} to {plain(self.max)}"
        limits = {"at least": self.min, "above": self.above, "at most": self.max, "below": self.below}
        return " and ".join(f"{word} {plain(limit)}" for word, limit in limits.items() if limit is not None)


Share = Annotated[float, Limits(0, 1)]
# Steps, images, bytes: larger ones mean a damaged file, and a float could not hold them.
Count = Annotated[int, Limits(0, 2**53 - 1)]
# Since 1970, up to the year 9999, which is the last that dates can be made of.
MAX_SECONDS = 253402300799
Time = Annotated[float, Limits(0, MAX_SECONDS)]


def read(path: Path, kind: type[T]) -> T:
    """Returns the content of a JSON file as `kind`: a dataclass, or any type that `convert` accepts.

    Raises FileNotFoundError if the file is missing, and UserError for a folder, invalid JSON, and a field that is missing, of the wrong type or out of its range.
    """
    try:
        content = path.read_bytes()
    except NotADirectoryError:
        raise FileNotFoundError(path) from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a file.") from None
    return parse(content, kind, str(path))


def read_or_none(path: Path, kind: type[T]) -> T | None:
    """As `read`, but None for a file that is missing, damaged or not to be read."""
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
        number), str, Any, Literal, X | Y, list[X], dict[str, X], tuple[X, Y] or tuple[X, ...], Annotated[X, Limits(...)].
    Nothing else is coerced: "3" is not 3, and true is not 1. Raises UserError with `where`, the field and the value.
    """
    return Converter(where).convert(value, kind, name)


class RefusedError(Exception):
    """What a value must be: the end of an error whose beginning names the field and the value."""


class Converter:
    """Converts plain values to types, as `convert` above describes; a subclass may accept other scalars.

    where: name of the source in errors. A field's metadata may hold a "rule" for its value or its items: `Limits`.
    """

    shown = staticmethod(lambda value: quoted(value))  # A value in an error.

    def __init__(self, where: str) -> None:
        self.where = where

    def convert(self, value: Any, kind: Any, name: str, rule: Any = None) -> Any:
        """Returns the value as `kind`. name: of the field, with dots, in errors. Raises UserError."""
        if type(kind) is type:  # Most are: what follows takes several times as long.
            is_mapping = isinstance(value, dict) and is_record(kind)
            return self.record(value, kind, name) if is_mapping else self.single(value, kind, name, rule)
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is Annotated:
            limits = next((mark for mark in arguments[1:] if isinstance(mark, Limits)), None)
            return self.convert(value, arguments[0], name, limits)
        if origin in (typing.Union, types.UnionType):
            return self._union(value, kind, name, rule)
        if origin is list and isinstance(value, list):
            return [self.convert(item, arguments[0], f"{name}[{i}]", rule) for i, item in enumerate(value)]
        if origin is dict and isinstance(value, dict):
            return {key: self.convert(item, arguments[1], _inner(name, key), rule) for key, item in value.items()}
        if origin is tuple and isinstance(value, list):
            kinds = (arguments[0],) * len(value) if arguments[-1] is Ellipsis else arguments
            if len(kinds) == len(value):
                return tuple(self.convert(item, kinds[i], f"{name}[{i}]", rule) for i, item in enumerate(value))
        return self.single(value, kind, name, rule)

    def record(self, tree: dict, kind: Any, name: str) -> Any:
        """Returns the mapping as a dataclass; keys that it does not have are ignored."""
        hints = type_hints(kind)
        values = {}
        for field in dataclasses.fields(kind):
            inner, rule = _inner(name, field.name), field.metadata.get("rule")
            if field.name in tree:
                values[field.name] = self.convert(tree[field.name], hints[field.name], inner, rule)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise UserError(f"{self.where}: {inner} {self.missing(inner, field)}")
        return kind(**values)

    def missing(self, name: str, field: dataclasses.Field[Any]) -> str:
        """What an error says about a field without a value. name: with dots."""
        return "is missing."

    def single(self, value: Any, kind: Any, name: str, rule: Any) -> Any:
        """Returns a value that is neither converted by its items nor by its fields. Raises UserError."""
        try:
            return self.scalar(value, kind, rule)
        except (RefusedError, ValueError) as error:
            between = " " if isinstance(error, RefusedError) else ": "
            raise UserError(f"{self.where}: {name or 'the content'} = {self.shown(value)}{between}{error}") from None

    def scalar(self, value: Any, kind: Any, rule: Any) -> Any:
        """Returns the value as `kind`. Raises RefusedError."""
        is_literal = type(kind) is not type and typing.get_origin(kind) is typing.Literal
        choices = typing.get_args(kind) if is_literal else ()
        if kind is Any or any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        if kind is float and type(value) in (int, float):
            value = finite(value)
        if kind in (bool, int, float, str, type(None), dict, list) and type(value) is kind:
            if rule is not None and not rule.accepts(value):
                raise RefusedError(f"must be {rule.range}.")
            return value
        raise RefusedError(f"must be {type_name(kind)}.")

    def _union(self, value: Any, kind: Any, name: str, rule: Any) -> Any:
        kinds = typing.get_args(kind)
        if value is None and type(None) in kinds:
            return None
        first, *more = (option for option in kinds if option is not type(None))
        # An error about an item or the range is more helpful than "must be a mapping or null".
        if not more and (rule or typing.get_origin(first) is Annotated or isinstance(value, (dict, list))):
            return self.convert(value, first, name, rule)
        for option in (first, *more):
            with contextlib.suppress(UserError):
                return self.convert(value, option, name, rule)
        return self.single(value, kind, name, rule)


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
    if dict in (origin, kind) or dataclasses.is_dataclass(kind):
        return "a mapping"
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        type(None): "null",
        list: "a list",
    }
    return names.get(kind, str(kind))


def quoted(value: Any) -> str:
    """The repr of a value for an error: at most 200 characters on one line."""
    return shortened(repr(value))


def shortened(text: str, limit: int = MAX_QUOTED) -> str:
    """The text, or its first `limit` characters and its length."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def plain(number: float) -> str:
    """A limit as in errors and `--help`: 16,384, 0.5."""
    return f"{int(number):,}" if number == int(number) and abs(number) < 1e20 else f"{number:g}"


def is_record(kind: Any) -> bool:
    """Whether a type is a dataclass with fields of its own, and not a value with a text form (`parse`)."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and not hasattr(kind, "parse")


def _inner(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def finite(value: Any) -> float | None:
    """The number, or the number in a text, as a float; None for infinity, NaN and what is no number."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def without_nan(value: Any) -> Any:
    """A value for `json.dumps` in which None replaces each NaN and infinity: JSON has neither, and `read` refuses them."""
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(part) for part in value]
    return finite(value) if isinstance(value, float) else value


def _refuse_constant(text: str) -> typing.NoReturn:
    raise ValueError(f"{text} is not valid JSON")
