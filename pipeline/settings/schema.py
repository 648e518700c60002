"""Typed trees of settings: dataclasses filled from YAML and from `key=value` overrides, checked before anything runs.

A settings class is a frozen dataclass whose fields are made by `setting(default, "what it means", min=0)`. Every field has
documentation, a type and a range that are checked, and a dotted name by which the command line sets it. A field that is a path
is declared as one (`path=True`, or `output=...`), and `~` at its beginning becomes the home folder here. A class may have a
method `check()` for what depends on several fields. The classes are in `run.py` and the files beside it.
"""

import dataclasses
import difflib
import math
import os
import re
import shlex
import types
import typing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted, shortened
from pipeline.base.words import counted
from pipeline.process.outputs import Holds, Output
from pipeline.settings.yaml_reader import as_typed, parse_yaml, read_yaml

T = TypeVar("T")

REQUIRED = dataclasses.MISSING
# The length of the longest path.
_MAX_TEXT = 4096
# Upper limit of a number whose setting has none: a larger one is a mistake and would overflow somewhere.
_MAX_NUMBER = {int: 1e9, float: 1e30}
# Lower limit of a number other than 0: a smaller one would become 0 somewhere, as a learning rate of 1e-320 does in fp32.
_MIN_NUMBER = 1e-30


class TextForm(NamedTuple):
    """A form that text must have. pattern: regular expression of all of it; name: what an error calls it."""

    pattern: str
    name: str


FOLDER_NAME = TextForm(r"[^./][^/]*", "a plain folder name")
TRACKING_URI = TextForm(
    r"(?!sqlite(\+\w+)?:/{0,3}(\?.*)?$)(?!sqlite.*(:memory:|mode=memory)).*",
    "a tracking URI that outlives this process, as sqlite:////PATH/mlflow.db or http://HOST:PORT",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What a setting accepts beyond its type. In a list, values are checked one by one.

    min and max belong to the range, above and below do not. is_path: the text is a path, where `~` is the home folder. is_command:
    the text is words as in a shell, with quotes.
    """

    min: float | None = None
    above: float | None = None
    max: float | None = None
    below: float | None = None
    form: TextForm | None = None
    min_items: int = 0
    distinct: bool = False
    choices: tuple[str, ...] = ()
    is_path: bool = False
    is_command: bool = False

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
        if self.choices:
            return "|".join(self.choices)
        if self.min is not None and self.max is not None:
            return f"from {_plain(self.min)} to {_plain(self.max)}"
        limits = {"at least": self.min, "above": self.above, "at most": self.max, "below": self.below}
        return " and ".join(f"{word} {_plain(limit)}" for word, limit in limits.items() if limit is not None)


def setting(
    default: Any,
    doc: str,
    *,
    min: float | None = None,
    above: float | None = None,
    max: float | None = None,
    below: float | None = None,
    form: TextForm | None = None,
    min_items: int = 0,
    distinct: bool = False,
    choices: typing.Iterable[str] = (),
    path: bool = False,
    command: bool = False,
    output: Output | None = None,
    within: str | None = None,
    holds: Holds | None = None,
) -> Any:
    """A documented dataclass field.

    default: a value, REQUIRED, or a settings class (a nested section). min, max, above (exclusive), below (exclusive): range
    of a number or of a length's amount. form, choices: of text, where choices are the keys of a table. min_items, distinct: of a
    list. path: the text is a path, or an address that may be one. command: the text is words, as in a shell. output: it is a path
    that the command writes (`outputs.py`). within: name of the field whose folder contains that path, which then is a plain name.
    holds: what kind of results the output folder is for.
    """
    is_path = path or (output is not None and within is None)
    rule = Rule(
        min=min,
        above=above,
        max=max,
        below=below,
        form=form,
        min_items=min_items,
        distinct=distinct,
        choices=tuple(choices),
        is_path=is_path,
        is_command=command,
    )
    metadata = {"doc": doc, "rule": rule, "output": output, "within": within, "holds": holds}
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, (type, dict, list)):
        factory = default if isinstance(default, type) else lambda: default.copy()
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def load(cls: type[T], path: str | Path | None, overrides: typing.Sequence[str] = ()) -> T:
    """Read a settings tree from a YAML file, then apply `a.b=value` overrides (values are YAML).

    Raises UserError for a missing file, a syntax error, an unknown or missing key, a value of the wrong type or outside its
    range, and whatever the class's own `check()` refuses.
    """
    tree = {} if path is None else read_yaml(_config_file(str(path)))
    for override in overrides:
        _apply(cls, tree, override)
    config = build(cls, tree, "the command line" if path is None else str(path))
    check = getattr(config, "check", None)
    if check is not None:
        check()
    return config


def build(cls: type[T], tree: Any, where: str, prefix: str = "") -> T:
    """Make a `cls` of a plain nested dict. where: source named in errors; prefix: the section ('model.').

    Checks names, types and ranges, not the class's `check()`. Raises UserError.
    """
    if not isinstance(tree, dict):
        raise UserError(
            f"{where}: {prefix.rstrip('.') or 'the file'} must be a mapping of settings, not {as_typed(tree)}."
        )
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in tree:
        if key not in fields:
            raise UserError(f"{where}: unknown setting {prefix}{as_typed(key)}.{_did_you_mean(cls, prefix, str(key))}")
    values = {}
    for name, field in fields.items():
        if name in tree or _is_section(hints[name]):
            values[name] = _convert(hints[name], tree.get(name), f"{prefix}{name}", where, field.metadata["rule"])
        elif field.default is REQUIRED and field.default_factory is REQUIRED:
            raise UserError(f"{where}: {prefix}{name} is not set ({field.metadata['doc']}). Set it: {prefix}{name}=...")
    return cls(**values)


def _convert(kind: Any, value: Any, name: str, where: str, rule: Rule) -> Any:
    """Convert a YAML value to `kind`. Raises UserError with the setting, the value and what it must be."""
    origin = typing.get_origin(kind)
    if _is_section(kind):
        return build(kind, value if value is not None else {}, where, f"{name}.")
    if origin in (typing.Union, types.UnionType):
        inner = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if value is None else _convert(inner[0], value, name, where, rule)
    if origin is list:
        return _convert_list(kind, value, name, where, rule)
    try:
        if hasattr(kind, "parse"):
            parsed = kind.parse(value)
            _check_range(getattr(parsed, "amount", None), rule)
            return parsed
        if origin is typing.Literal:
            return _choice(typing.get_args(kind), value)
        if rule.choices:
            return _choice(rule.choices, value)
        if kind == dict[str, Any] and isinstance(value, dict):
            return {_checked_text(str(key)): item for key, item in value.items()}  # Whoever reads it checks the values.
        if origin is dict and isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
            return {_checked_text(str(key)): _checked_text(text) for key, text in value.items()}
        if kind is bool and isinstance(value, bool):
            return value
        if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            text = _checked_text(str(value), rule.form)
            if rule.is_command:
                _check_quotes(text)
            return _expanded(text) if rule.is_path else text
        if kind in (int, float) and not isinstance(value, bool):
            number = _whole(value) if kind is int else _number(value)
            if number is not None:
                _check_range(number, rule, _MAX_NUMBER[kind])
                return number
    except _RefusedError as error:
        raise UserError(f"{where}: {name} = {as_typed(value)} {error}") from None
    except ValueError as error:  # From `parse`.
        raise UserError(f"{where}: {name} = {as_typed(value)}: {error}") from None
    expected = "mapping of names to text" if origin is dict else type_name(kind)
    raise UserError(f"{where}: {name} = {as_typed(value)} must be a {expected}.")


def _convert_list(kind: Any, value: Any, name: str, where: str, rule: Rule) -> list[Any]:
    """A list of values; a single value is a list of one."""
    (inner,) = typing.get_args(kind)
    values = value if isinstance(value, list) else [value]
    names = [f"{name}[{i}]" if _is_section(inner) else name for i in range(len(values))]
    items = [_convert(inner, item, item_name, where, rule) for item, item_name in zip(values, names, strict=True)]
    if len(items) < rule.min_items:
        count = "one value" if rule.min_items == 1 else f"{counted(rule.min_items, 'value')}"
        raise UserError(f"{where}: {name} = {quoted(value)} must have at least {count}.")
    if rule.distinct and any(item in items[:i] for i, item in enumerate(items)):
        raise UserError(f"{where}: {name} = {quoted(value)} must have different values: one is there twice.")
    return items


class _RefusedError(Exception):
    """What a value must be: the end of an error whose beginning names the setting and the value."""


def _choice(accepted: tuple[Any, ...], value: Any) -> Any:
    choices = {str(choice): choice for choice in accepted}  # Numbers in a file are still text.
    if isinstance(value, bool) or str(value) not in choices:
        raise _RefusedError(f"must be one of {', '.join(choices)}.")
    return choices[str(value)]


def _check_range(number: float | None, rule: Rule, limit: float = math.inf) -> None:
    if number is None:
        return
    if not rule.accepts(number):
        raise _RefusedError(f"must be {rule.range}.")
    if 0 < abs(number) < _MIN_NUMBER:
        or_0 = " or 0" if rule.accepts(0) else ""
        raise _RefusedError(f"is too small to count: it must be at least {_MIN_NUMBER:g}{or_0}.")
    if rule.max is None and abs(number) > limit:
        raise _RefusedError(f"must be at most {_plain(limit)}.")


def _checked_text(text: str, form: TextForm | None = None) -> str:
    """The text, if a file name can contain it (no NUL, no lone surrogate) and it has the form."""
    if len(text) > _MAX_TEXT:
        raise _RefusedError(f"must be at most {_MAX_TEXT:,} characters long.")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise _RefusedError("has a character that no file name can have.")
    if form is not None and not re.fullmatch(form.pattern, text):
        raise _RefusedError(f"must be {form.name}.")
    return text


def _check_quotes(text: str) -> None:
    try:
        shlex.split(text)
    except ValueError:
        raise _RefusedError("has a quote that is not closed, or ends in a backslash.") from None


def _expanded(path: str) -> str:
    """A path with `~` or `~user` at its beginning replaced by that home folder. Raises _RefusedError for an unknown user.

    Every setting that is a path comes through here, so nothing else needs to know of `~`.
    """
    found = os.path.expanduser(path)
    if found.startswith("~"):
        user = found.partition("/")[0]
        raise _RefusedError(f"names the home folder of a user who does not exist here. A folder {user} is ./{user}.")
    return found


def _config_file(path: str) -> Path:
    try:
        return Path(_expanded(path))
    except _RefusedError as error:
        raise UserError(f"--config {as_typed(path)} {error}") from None


def to_dict(config: Any) -> dict[str, Any]:
    """The tree as plain nested dicts, which checkpoints and MLflow keep and `build` reads back."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if hasattr(value, "parse"):
            plain[field.name] = str(value)
        elif dataclasses.is_dataclass(value):
            plain[field.name] = to_dict(value)
        elif isinstance(value, list):
            plain[field.name] = [_item_to_plain(item) for item in value]
        else:
            plain[field.name] = value
    return plain


def _item_to_plain(item: Any) -> Any:
    if hasattr(item, "parse"):
        return str(item)
    return to_dict(item) if dataclasses.is_dataclass(item) else item


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'model': {'name': x}} -> {'model.name': x}"""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def describe(cls: type, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(dotted name, type and range, default, meaning) of every field, in order, as `--help` lists them."""
    hints = typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if _is_section(kind):
            rows += describe(kind, f"{prefix}{field.name}.")
            continue
        if field.default is not REQUIRED:
            default = _as_yaml(field.default)
        else:
            default = "required" if field.default_factory is REQUIRED else str(field.default_factory())
        if typing.get_origin(kind) is list and _is_section(typing.get_args(kind)[0]):
            rows += describe(typing.get_args(kind)[0], f"{prefix}{field.name}[].")
            continue
        rule: Rule = field.metadata["rule"]
        named = type_name(kind).replace("text", "path") if rule.is_path else type_name(kind)
        accepted = f"{named}, {rule.range}" if rule.range else named
        if rule.choices:
            accepted = rule.range
        rows.append((f"{prefix}{field.name}", accepted, default, field.metadata["doc"]))
    return rows


def type_name(kind: Any) -> str:
    """The type in words, such as "whole number" or "list of numbers"."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if origin in (typing.Union, types.UnionType):
        return f"{type_name(typing.get_args(kind)[0])} or null"
    if origin is dict:
        return "mapping"
    if origin is list:
        inner = type_name(typing.get_args(kind)[0])
        return f"list of {inner}{'s' if inner.endswith(('number', 'length')) else ''}"
    names = {bool: "true|false", str: "text", int: "whole number", float: "number"}
    return names.get(kind, getattr(kind, "__name__", str(kind)).lower())


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and not hasattr(kind, "parse")


def _apply(cls: type, tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise UserError(
            f"{shortened(repr(override))} is no override: write setting=value, for example train.global_batch=512."
        )
    parts = name.split(".")
    for depth, part in enumerate(parts):
        prefix = "".join(f"{section}." for section in parts[:depth])
        kind = typing.get_type_hints(cls).get(part)
        if kind is None:
            raise UserError(f"the command line: unknown setting {as_typed(name)}.{_did_you_mean(cls, prefix, part)}")
        rest = parts[depth + 1 :]
        if not rest:
            value = _override_value(kind, text)
            (rule,) = (field.metadata["rule"] for field in dataclasses.fields(cls) if field.name == part)
            _convert(kind, value, name, "the command line", rule)  # So that errors do not blame the file.
            tree[part] = value
            return
        is_mapping = typing.get_origin(kind) is dict
        if not is_mapping and not _is_section(kind):
            raise UserError(f"the command line: {prefix}{part} is a single value, so there is no {as_typed(name)}.")
        if not isinstance(tree.get(part), dict):
            if tree.get(part) is not None:
                raise UserError(f"{prefix}{part} is {as_typed(tree[part])} in the file, so {name} cannot be set in it.")
            tree[part] = {}
        tree = tree[part]
        if is_mapping:
            tree[".".join(rest)] = text if typing.get_args(kind)[1] is str else _override_value(Any, text)
            return
        cls = typing.cast(type, kind)


def _override_value(kind: Any, text: str) -> Any:
    try:
        value = parse_yaml(text) if text else ""
    except ValueError:
        return text
    # A text setting takes the text as typed: name=true is the name "true".
    wants_text = kind is str or kind == str | None
    return text if wants_text and value is not None and not isinstance(value, str) else value


def _did_you_mean(cls: type, prefix: str, key: str) -> str:
    known = [f.name for f in dataclasses.fields(cls)]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f" Did you mean {prefix}{near[0]}?" if near else f" Known here: {', '.join(known)}."


def _plain(number: float) -> str:
    return f"{int(number):,}" if number == int(number) and abs(number) < 1e20 else f"{number:g}"


def _as_yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _whole(value: Any) -> int | None:
    text = str(value)
    if re.fullmatch(r"[-+]?[0-9]+", text):
        # A float has 53 bits, and a seed may have more. int() raises for thousands of digits; 21 exceed every limit.
        digits = text.lstrip("+-").lstrip("0")
        return int(digits[:21] or "0") * (-1 if text.startswith("-") else 1)
    number = _number(value)
    return int(number) if number is not None and number.is_integer() else None


def _number(value: Any) -> float | None:
    # PyYAML reads 1e-3 (no dot) as text, and people write it often. Infinity and NaN are refused.
    try:
        number = float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and math.isfinite(number) else None
