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

from pipeline.architecture.variants import as_yaml
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.json_record import Converter, Limits, RefusedError, finite, is_record, plain, quoted, shortened
from pipeline.base.words import counted
from pipeline.process.outputs import Holds, Output
from pipeline.settings.effect import refuse_without_effect
from pipeline.settings.yaml_reader import as_typed, parse_yaml, read_yaml

T = TypeVar("T")
# What another value of a setting means for what was made with it, from least to most (`changes.py`).
OnChange = typing.Literal["nothing", "comparison", "result", "run"]

REQUIRED = dataclasses.MISSING
# Upper limit of a number whose setting has none: a larger one is a mistake and would overflow somewhere.
_MAX_NUMBER = {int: 1e9, float: 1e30}


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
class Rule(Limits):
    """What a setting accepts beyond its type: limits of a number or of a length's amount; in a list, values are checked one by one.

    form, choices: of text, where choices may be a table. min_items (of a required list 1), max_items (0 is any number), distinct: of a list. is_path: the text is a path, where `~` is
    the home folder. command: the text is words as in a shell, with quotes.
    needs: settings of the same class, or of the section that has the rule, or else of one that contains it, without one of which it has no
    effect (effect.py): names with | between, each set to anything but 0, empty, null and false, or `name=value,value`, where of a list one is enough and none is all.
    ignores_section: it has an effect without what its section needs.
    """

    form: TextForm | None = None
    min_items: int = 0
    max_items: int = 0
    distinct: bool = False
    choices: typing.Collection[str] = ()
    is_path: bool = False
    command: bool = False
    on_change: OnChange | None = None
    needs: str = ""
    ignores_section: bool = False

    @property
    def range(self) -> str:
        return "|".join(self.choices) or super().range


def setting(
    default: Any,
    doc: str,
    *,
    path: bool = False,
    output: Output | None = None,
    within: str | None = None,
    holds: Holds | None = None,
    **rule: Any,
) -> Any:
    """A documented dataclass field.

    default: a value, REQUIRED, or a settings class (a nested section). path: the text is a path, or an address that may be one.
    output: it is a path that the command writes (`outputs.py`). within: name of the field whose folder contains that path, which
    then is a plain name. holds: what kind of results the output folder is for. rule: fields of `Rule`, such as min and max. on_change
    says what another value means for what was made with it; a section's is that of its fields which give none, and without any it
    is "result".
    """
    if default is REQUIRED:
        rule.setdefault("min_items", 1)
    accepted = Rule(is_path=path or (output is not None and within is None), **rule)
    metadata = {"doc": doc, "rule": accepted, "output": output, "within": within, "holds": holds}
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, (type, dict, list)):
        factory = default if isinstance(default, type) else lambda: default.copy()
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def load(cls: type[T], path: str | Path | None, overrides: typing.Sequence[str] = ()) -> T:
    """Read a settings tree from a YAML file, then apply `a.b=value` overrides (values are YAML).

    Raises UserError for a missing file, a syntax error, an unknown or missing key, a value of the wrong type or outside its
    range, and whatever the class's own `check()` refuses; and for one without effect, unless the class `notes_without_effect`.
    """
    try:
        tree = {} if path is None else read_yaml(Path(_expanded(str(path))))
    except RefusedError as error:
        raise UserError(f"--config {as_typed(str(path))} {error}") from None
    for override in overrides:
        _apply(cls, tree, override)
    config = build(cls, tree, "the command line" if path is None else str(path))
    check = getattr(config, "check", None)
    if check is not None:
        check()
    if not getattr(cls, "notes_without_effect", False):
        refuse_without_effect(config)
    return config


def build(cls: type[T], tree: Any, where: str, section: str = "") -> T:
    """Make a `cls` of a plain nested dict. where: source named in errors. section: the settings' own, "" for all of a command's.

    Checks names, types and ranges, not the class's `check()`. Raises UserError.
    """
    return _SettingsConverter(where).convert(tree, cls, section)


class _SettingsConverter(Converter):
    """Converts YAML values to settings; some text is a number to the user (1e-3), and a single value is a list of one."""

    shown = staticmethod(as_typed)

    def convert(self, value: Any, kind: Any, name: str, rule: Any = None) -> Any:
        if type(kind) is type:  # Most are: what follows takes several times as long.
            if is_record(kind):
                return self.record({} if value is None and name else value, kind, name)
            return self.single(value, kind, name, rule)
        origin = typing.get_origin(kind)
        if value == "" and kind == str | None:
            return None  # No name or path is empty: `init.weights=` takes away the file's.
        if origin is list:
            (inner,) = typing.get_args(kind)
            values = value if isinstance(value, list) else [value]
            index = "[{}]" if is_record(inner) else ""
            items = [self.convert(item, inner, name + index.format(i), rule) for i, item in enumerate(values)]
            if len(items) < rule.min_items:
                count = "one value" if rule.min_items == 1 else f"{counted(rule.min_items, 'value')}"
                raise UserError(f"{self.where}: {name} = {quoted(value)} must have at least {count}.")
            if 0 < rule.max_items < len(items):
                raise UserError(f"{self.where}: {name} has {counted(len(items), 'value')}: {rule.max_items} at most.")
            if rule.distinct and any(item in items[:i] for i, item in enumerate(items)):
                raise UserError(
                    f"{self.where}: {name} = {quoted(value)} must have different values: one is there twice."
                )
            return items
        return self.single(value, kind, name, rule) if origin is dict else super().convert(value, kind, name, rule)

    def record(self, tree: Any, kind: Any, name: str) -> Any:
        hints = json_record.type_hints(kind)
        if not isinstance(tree, dict):
            some = [*hints][:3]
            hint = f" Set one of them: {', '.join(f'{name}.{key}=...' for key in some)}" if name else ""
            if "[" in name:  # No override names one entry of a list.
                hint = f" Write {name.partition('[')[0]}=[{{{', '.join(f'{key}: ...' for key in some)}}}]"
            asked = f"{name or 'the file'} must be a mapping of settings"
            raise UserError(f"{self.where}: {asked}, not {as_typed(tree)}.{hint}")
        prefix = f"{name}." if name else ""
        for key in tree:
            if key not in hints:
                guess = _did_you_mean(kind, prefix, str(key))
                raise UserError(f"{self.where}: unknown setting {prefix}{as_typed(key)}.{guess}")
        # `out=$OUT` with a variable that is not set is no choice of the current folder.
        fields = dataclasses.fields(kind)
        required = {field.name for field in fields if field.default is field.default_factory is REQUIRED}
        tree = {key: value for key, value in tree.items() if value != "" or key not in required}
        sections = [name for name, hint in hints.items() if is_record(hint)]
        return super().record({**dict.fromkeys(sections), **tree}, kind, name)

    def missing(self, name: str, field: dataclasses.Field[Any]) -> str:
        # No override names a field of an entry of a list.
        way_out = f"Write it into that entry: {{{field.name}: ...}}" if "[" in name else f"Set it: {name}=..."
        return f"is not set ({field.metadata['doc']}). {way_out}"

    def scalar(self, value: Any, kind: Any, rule: Any) -> Any:
        origin = typing.get_origin(kind)
        if hasattr(kind, "parse"):
            parsed = kind.parse(value)
            _check_range(getattr(parsed, "amount", None), rule)
            return parsed
        if origin is typing.Literal or rule.choices:
            return _choice(rule.choices or typing.get_args(kind), value)
        if kind == dict[str, Any] and isinstance(value, dict):
            return {str(key): item for key, item in value.items()}  # Whoever reads it checks the values.
        if origin is dict and isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
            return {str(key): text for key, text in value.items()}
        if kind is bool and isinstance(value, bool):
            return value
        if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            text = str(value)
            if rule.form is not None and not re.fullmatch(rule.form.pattern, text):
                raise RefusedError(f"must be {rule.form.name}.")
            if rule.command:
                try:
                    shlex.split(text)
                except ValueError:
                    raise RefusedError("has a quote that is not closed, or ends in a backslash.") from None
            return _expanded(text) if rule.is_path else text
        if kind in (int, float) and not isinstance(value, bool):
            # PyYAML reads 1e-3 (no dot) as text, and people write it often.
            number = _whole(value) if kind is int else finite(value)
            if number is not None:
                _check_range(number, rule, _MAX_NUMBER[kind])
                return number
        is_text = kind == dict[str, str]
        raise RefusedError(f"must be {'a mapping of names to text' if is_text else json_record.type_name(kind)}.")


def _choice(accepted: typing.Iterable[Any], value: Any) -> Any:
    choices = {str(choice): choice for choice in accepted}  # Numbers in a file are still text.
    if isinstance(value, bool) or str(value) not in choices:
        raise RefusedError(f"must be one of {', '.join(choices)}.")
    return choices[str(value)]


def _check_range(number: float | None, rule: Rule, limit: float = math.inf) -> None:
    if number is None:
        return
    if not rule.accepts(number):
        raise RefusedError(f"must be {rule.range}.")
    if rule.max is None and abs(number) > limit:
        raise RefusedError(f"must be at most {plain(limit)}.")


def _expanded(path: str) -> str:
    """A path with `~` or `~user` at its beginning replaced by that home folder. Raises RefusedError for an unknown user.

    Every setting that is a path comes through here, so nothing else needs to know of `~`.
    """
    found = os.path.expanduser(path)
    if found.startswith("~"):
        user = found.partition("/")[0]
        raise RefusedError(f"names the home folder of a user who does not exist here. A folder {user} is ./{user}.")
    return found


def to_dict(config: Any) -> dict[str, Any]:
    """The tree as plain nested dicts, which checkpoints and MLflow keep and `build` reads back."""
    return {field.name: as_plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def as_plain(value: Any) -> Any:
    """A setting's value, or a section, as YAML and JSON can hold it."""
    if hasattr(value, "parse"):
        return str(value)
    if isinstance(value, list):
        return [as_plain(item) for item in value]
    return to_dict(value) if dataclasses.is_dataclass(value) else value


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'model': {'name': x}} -> {'model.name': x}"""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def leaves(
    cls: type, prefix: str = "", on_change: OnChange = "result"
) -> typing.Iterator[tuple[str, Any, dataclasses.Field[Any], OnChange]]:
    """(dotted name, type, field, what a change means) of every setting that is no section, in order. prefix, on_change: of the section."""
    hints = json_record.type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, meaning = hints[field.name], field.metadata["rule"].on_change or on_change
        if is_record(kind):
            yield from leaves(kind, f"{prefix}{field.name}.", meaning)
        else:
            yield f"{prefix}{field.name}", kind, field, meaning


def describe(cls: type, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(dotted name, type and range, default, meaning) of every field as `--help` lists them: required ones first, else in order."""
    settings: list[
        list[tuple[str, str, str, str]]
    ] = []  # Each followed by those of its items, if it is a list of mappings.
    for name, kind, field, _ in leaves(cls, prefix):
        if field.default is not REQUIRED:
            default = as_yaml(field.default)
        else:
            default = "required" if field.default_factory is REQUIRED else str(field.default_factory())
        rule: Rule = field.metadata["rule"]
        named = type_name(kind).replace("text", "path") if rule.is_path else type_name(kind)
        accepted = ", ".join(filter(None, ["" if rule.choices else named, rule.range]))
        settings.append([(name, accepted, default, field.metadata["doc"])])
        if typing.get_origin(kind) is list and is_record(typing.get_args(kind)[0]):
            settings[-1] += describe(typing.get_args(kind)[0], f"{name}[].")
    return [row for rows in sorted(settings, key=lambda rows: rows[0][2] != "required") for row in rows]


def type_name(kind: Any) -> str:
    """The type in words, such as "whole number" or "list of numbers"."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if origin in (typing.Union, types.UnionType):
        return f"{type_name(typing.get_args(kind)[0])} or null"
    if origin is dict or is_record(kind):
        return "mapping"
    if origin is list:
        inner = type_name(typing.get_args(kind)[0])
        return f"list of {inner}{'s' if inner.endswith(('number', 'length', 'size', 'mapping')) else ''}"
    names = {bool: "true|false", str: "text", int: "whole number", float: "number"}
    # ImageSize is "image size".
    return names.get(kind) or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", getattr(kind, "__name__", str(kind))).lower()


def _apply(cls: type, tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        is_file = override.endswith((".yaml", ".yml"))
        way_out = f"--config {as_typed(override)}" if is_file else "setting=value, for example train.global_batch=512."
        raise UserError(f"{shortened(repr(override))} is no override: write {way_out}")
    root, parts = cls, name.split(".")
    for depth, part in enumerate(parts):
        prefix = "".join(f"{section}." for section in parts[:depth])
        kind = json_record.type_hints(cls).get(part)
        if kind is None:
            guess = _did_you_mean(cls, prefix, part, tuple(parts[depth + 1 :]), root)
            raise UserError(f"the command line: unknown setting {as_typed(name)}.{guess}")
        rest = parts[depth + 1 :]
        if not rest:
            value = _override_value(kind, text, name)
            (rule,) = (field.metadata["rule"] for field in dataclasses.fields(cls) if field.name == part)
            # So that errors do not blame the file.
            _SettingsConverter("the command line").convert(value, kind, name, rule)
            tree[part] = value
            return
        is_mapping = typing.get_origin(kind) is dict
        if not is_mapping and not is_record(kind):
            raise UserError(f"the command line: {prefix}{part} is a single value, so there is no {as_typed(name)}.")
        if not isinstance(tree.get(part), dict):
            if tree.get(part) is not None:
                raise UserError(f"{prefix}{part} is {as_typed(tree[part])} in the file, so {name} cannot be set in it.")
            tree[part] = {}
        tree = tree[part]
        if is_mapping:
            tree[".".join(rest)] = text if typing.get_args(kind)[1] is str else _override_value(Any, text, name)
            return
        cls = typing.cast(type, kind)


def _override_value(kind: Any, text: str, name: str) -> Any:
    """The value of an override.

    Text that is neither null nor quoted is taken as typed: name=true is the name "true", and out="trip #2" has no comment.
    """
    try:
        value = parse_yaml(text) if text else ""
    except ValueError as error:
        if kind == list[str] and text.startswith("[") and text.endswith("]"):  # Else it may be a pattern: [ab]*.jpg
            raise UserError(f"the command line: {name} = {as_typed(text)} is no list: {error}") from None
        return text
    is_text = kind in (str, str | None) or (kind == list[str] and isinstance(value, str | None))
    is_quoted = isinstance(value, str) and text.startswith(("'", '"'))
    is_null = value is None and "#" not in text
    return text.strip() if is_text and not is_quoted and not is_null else value


def _did_you_mean(cls: type, prefix: str, key: str, rest: tuple[str, ...] = (), root: type | None = None) -> str:
    """The hint of an error about `prefix.key.rest`, where `key` is not in `cls`. root: all settings, whose sections are searched too."""
    known = [f.name for f in dataclasses.fields(cls)]
    section, dot, name = key.partition(".")
    if dot and section in known:
        return f" In a file, write it in its section: {section}: {{{name}: ...}}"
    if key == "config" and not prefix:
        return " A file of settings is given by --config FILE."
    every = [name for name, *_ in leaves(root or cls, "" if root else prefix)]
    near = [f"{prefix}{name}" for name in difflib.get_close_matches(key, known, n=1, cutoff=0.5)]
    inside = {".".join([name, *rest]) for name in near if rest}.intersection(every)
    # The section spelt right, else the same name in another section: lr=1 is optimizer.lr. A name like it in the section that was typed is as likely.
    elsewhere = [name for name in every if name.split(".")[-1] == [key, *rest][-1]]
    guesses = [*inside] or ([*near, *elsewhere] if prefix else elsewhere or near)
    if guesses:
        return f" Did you mean {' or '.join(guesses[:4])}?"
    return f" Known here: {', '.join(known)}." if known else " There are none here: leave it out."


def _whole(value: Any) -> int | None:
    text = str(value)
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return int(text)  # A float has 53 bits, and a seed may have more.
    number = finite(value)
    return int(number) if number is not None and number.is_integer() else None
