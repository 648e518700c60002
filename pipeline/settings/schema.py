"""Typed trees of settings: classes filled from YAML and from `key=value` overrides by pydantic, checked before anything
runs.

A class of settings derives from `Settings`. Every field has a type and a range (`setting(2, min=1)`), a documentation,
which is the text below it, and a dotted name by which the command line sets it. pydantic checks types and ranges and
writes the JSON schemas for editors; here is what it does not do: files with overrides, errors of one line with a way
out, paths, `--help`, and what a changed setting means. A class may have a method `check()` for what depends on several
fields. The classes are in `run.py` and the files beside it.
"""

import ast
import dataclasses
import difflib
import functools
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import MinLen
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from pipeline.architecture.variants import as_yaml
from pipeline.base.errors import UserError
from pipeline.process.outputs import Holds, Output
from pipeline.settings.quantities import PathText, Seed
from pipeline.settings.yaml_reader import as_typed, parse_yaml, read_table, read_yaml

T = TypeVar("T")
# What another value of a setting means for what was made with it, from least to most: see `Fact`.
OnChange = Literal["nothing", "comparison", "result", "run"]

REQUIRED = dataclasses.MISSING
# pydantic's names of limits, and how `--help` shows those of numbers.
_LIMITS = {
    "min": "ge",
    "above": "gt",
    "max": "le",
    "below": "lt",
    "pattern": "pattern",
    "min_items": "min_length",
}
_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def setting(
    default: Any = REQUIRED,
    *,
    choices: typing.Iterable[str] = (),
    output: Output | None = None,
    within: str | None = None,
    holds: Holds | None = None,
    on_change: OnChange | None = None,
    needs: str = "",
    ignores_section: bool = False,
    **limits: Any,
) -> Any:
    """A field with more than a default.

    default: a value, REQUIRED, or a factory, such as the class of a section. limits: min, max, above and below of a
    number or of the amount of a length, pattern of a text, min_items of a list. Common ranges are types
    (quantities.py). choices: for `--help` and editors.
    output: the text is a path that the command writes (`outputs.py`).
    within: name of the field whose folder contains that path, which then is a plain name. holds: what kind of results
    the output folder is for.
    on_change: what another value means for what was made with it; a section's is that of its fields which give none,
    and without any it is "result".
    needs: names with | between, of settings of the same class (of a section: of its own), or else of one that contains
    it, at least one of which is not 0, empty, null or false; or `name=value,value`, where one item of a list is enough
    and an empty list means all. Without it, the setting has no effect. What a section needs, its settings need, too,
    unless they declare ignores_section.
    """
    metadata = {
        "description": "",  # The text below the field.
        "json_schema_extra": {"enum": [*choices]} if choices else None,
        "output": output,
        "within": within,
        "holds": holds,
        "on_change": on_change,
        "needs": needs,
        "ignores_section": ignores_section,
        **{_LIMITS[name]: limit for name, limit in limits.items()},
    }
    if isinstance(default, (type, dict, list)):
        factory = default if isinstance(default, type) else default.copy
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of settings and their sections: makes each subclass a frozen dataclass that pydantic fills and that refuses
    unknown names.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    def __init_subclass__(cls) -> None:
        for name, doc in _docs(cls).items():
            value = vars(cls).get(name, REQUIRED)
            field = value if isinstance(value, dataclasses.Field) else setting(value)
            field.metadata = types.MappingProxyType({**field.metadata, "description": doc})
            setattr(cls, name, field)
        dataclass(frozen=True, kw_only=True)(cls)

    def check(self) -> None:
        """Raise UserError for settings that do not fit together."""


def _docs(cls: type) -> dict[str, str]:
    """The text below each field of a class, in the file of its module; none for a class without a file."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    body = next((found.body for found in _classes_in(file) if found.name == cls.__name__), []) if file else []
    return {
        field.target.id: " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


@functools.cache
def _classes_in(file: str) -> list[ast.ClassDef]:
    return [found for found in ast.walk(ast.parse(Path(file).read_bytes())) if isinstance(found, ast.ClassDef)]


def _distinct(values: list[T]) -> list[T]:
    if any(value in values[:i] for i, value in enumerate(values)):
        raise ValueError("must have different values: one is there twice")
    return values


Distinct = Annotated[list[T], AfterValidator(_distinct)]
Seeds = Annotated[Distinct[Seed], MinLen(1)]
type_adapter = functools.cache(TypeAdapter)
type_hints = functools.cache(typing.get_type_hints)


def load(cls: type[T], path: str | Path | None, overrides: Sequence[str] = ()) -> T:
    """Read settings from a YAML file, then apply `a.b=value` overrides.

    Raises UserError for a missing file, a syntax error, an unknown or missing name, a value of the wrong type or
    outside its range, and whatever the class's own `check()` refuses; and for one without effect, unless the class
    `notes_without_effect`.
    """
    tree = {} if path is None else read_yaml(Path(path).expanduser())
    for override in overrides:
        _apply(tree, override)
    config: Any = build(cls, tree, "the command line" if path is None else str(path), overrides=overrides)
    config.check()
    if not getattr(cls, "notes_without_effect", False):
        refuse_without_effect(config)
    return config


def build(cls: type[T], tree: Any, where: str, section: str = "", overrides: Sequence[str] = ()) -> T:
    """Make a `cls` of a plain nested dict. where: source named in errors. section: of the settings, "" for all of a
    command's.

    Checks names, types and ranges, not the class's `check()`. Raises UserError. overrides: that are in the tree
    already, for errors.
    """
    kind: Any = cls
    try:
        return type_adapter(kind).validate_python(_prepared(tree, cls))
    except ValidationError as error:
        found = min(error.errors(), key=lambda one: one["type"] == "missing")  # What is given, before what is missing.
    parts = ((section,) if section else ()) + found["loc"]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)[1:]
    given = [override.partition("=")[0] for override in overrides]
    if any(f"{of}.".startswith(f"{name}.") or name.startswith(of) for of in given):
        where = "the command line"  # So that errors do not blame the file.
    if found["type"] == "unexpected_keyword_argument":
        raise UserError(f"{where}: unknown setting {as_typed(name)}.{did_you_mean(cls, name, section)}")
    value = found["input"]
    what = f"{where}: {name} = {as_typed(value)}"
    if found["type"] in ("dataclass_type", "dict_type"):
        raise UserError(f"{what}: must be a mapping, as {name}.NAME=value.{did_you_mean(cls, name)}")
    docs = {of: field.metadata["description"] for of, _, field, _ in leaves(cls)}
    doc = docs.get(name.partition("[")[0], "in this section")
    if found["type"] == "missing":
        raise UserError(f"{where}: {name} is not set ({doc}). Set it: {name}=...")
    told = re.sub(r"^\w+ should", "must", found["msg"]).partition(", unable to parse")[0]
    said = found.get("ctx", {}).get("error") or told
    said = f"{said} ({doc.rstrip('.')})" if "pattern" in found["type"] else said
    raise UserError(f"{what}: {said}.")


def _prepared(tree: Any, cls: Any) -> Any:
    """Settings as pydantic takes them: a section without settings is empty, and one value in place of a list is a list
    of it.
    """
    if isinstance(tree, list):
        return [_prepared(item, cls) for item in tree]
    if not is_section(cls) or not isinstance(tree, dict):
        return tree
    found = dict(tree)
    for field in dataclasses.fields(cls):
        name, kind, value = field.name, type_hints(cls)[field.name], found.get(field.name)
        if is_section(kind):
            found[name] = _prepared({} if value is None else value, kind)
        elif value in ("", []) and default_of(field) in (None, REQUIRED):
            del found[name]  # `out=$OUT` without such a variable is not the current folder.
        elif name in found and typing.get_origin(kind) is list:
            values = value if isinstance(value, list) else [value] if value != "" else []
            found[name] = _prepared(values, *typing.get_args(kind))
    return found


def is_section(kind: Any) -> bool:
    """Whether a type is a class of settings."""
    return isinstance(kind, type) and issubclass(kind, Settings)


def to_dict(value: Any) -> Any:
    """Settings as plain nested dicts, which checkpoints and MLflow keep and `build` reads back; a value as YAML and
    JSON can hold it.
    """
    if hasattr(value, "parse"):
        return str(value)
    if isinstance(value, list):
        return [to_dict(item) for item in value]
    if isinstance(value, Settings):
        return {field.name: to_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'model': {'name': x}} -> {'model.name': x}"""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def leaves(
    cls: type, prefix: str = "", on_change: OnChange = "result"
) -> Iterator[tuple[str, Any, dataclasses.Field[Any], OnChange]]:
    """(dotted name, type, field, what a change means) of every setting, in order; sections are flattened.

    prefix, on_change: the section's.
    """
    for field in dataclasses.fields(cls):
        kind, meaning = type_hints(cls, include_extras=True)[field.name], field.metadata["on_change"] or on_change
        if is_section(kind):
            yield from leaves(kind, f"{prefix}{field.name}.", meaning)
        else:
            yield f"{prefix}{field.name}", kind, field, meaning


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a setting; REQUIRED without one."""
    return field.default if field.default_factory is REQUIRED else field.default_factory()


def describe(cls: type, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(dotted name, type and range, default, meaning) of every field as `--help` lists them: required ones first, else
    in order.
    """
    rows = []  # Each followed by those of its items, if it is a list of mappings.
    for name, kind, field, _ in leaves(cls, prefix):
        rule, default = field.metadata, default_of(field)
        accepted = "|".join(rule["json_schema_extra"]["enum"]) if rule["json_schema_extra"] else type_name(kind)
        for limit, number in limits_of(kind, field).items():
            accepted += f", {_WORDS[limit]} {number:{',' if isinstance(number, int) else 'g'}}"
        shown = "required" if default is REQUIRED else as_yaml(default)
        rows.append([(name, accepted, shown, rule["description"])])
        if typing.get_origin(kind) is list and is_section(typing.get_args(kind)[0]):
            rows[-1] += describe(typing.get_args(kind)[0], f"{name}[].")
    return [row for several in sorted(rows, key=lambda several: several[0][2] != "required") for row in several]


def limits_of(kind: Any, field: dataclasses.Field[Any]) -> dict[str, float]:
    """The range of a number, by pydantic's names. kind: its type, which may have one."""
    marks = typing.get_args(kind)[1:]
    found = {limit: [field.metadata.get(limit), *(getattr(mark, limit, None) for mark in marks)] for limit in _WORDS}
    return {limit: number for limit, numbers in found.items() for number in numbers if number is not None}


def json_schema(cls: type) -> dict[str, Any]:
    """The JSON schema of a file of settings, by which editors complete and check it."""
    found = type_adapter(cls).json_schema()
    for section in (found, *found.get("$defs", {}).values()):
        section.pop("required", None)  # The command line may give them.
    return found


def type_name(kind: Any) -> str:
    """The type in words, such as "whole number" or "list of text"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind == PathText:
        return "path"
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return "|".join(arguments)
    if origin in (typing.Union, types.UnionType):
        return f"{type_name(arguments[0])} or null"
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if origin is dict or is_section(kind):
        return "mapping"
    return {bool: "true|false", str: "text", int: "whole number", float: "number"}.get(kind) or kind.__name__


def _apply(tree: dict[str, Any], override: str) -> None:
    """Put an override into a tree of settings."""
    name, equals, text = override.partition("=")
    if not equals or not name:
        is_file = override.endswith((".yaml", ".yml"))
        how = f", or a file of settings: --config {override}" if is_file else "; --help lists all settings"
        raise UserError(f"{as_typed(override)} must be setting=value{how}.")
    *sections, last = name.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        if not isinstance(tree := tree[section], dict):
            raise UserError(f"{section} = {as_typed(tree)}: leave it out to set {name}.")
    # What is neither a list, a mapping, quoted nor null is taken as typed: name=true is the name "true", and out="trip
    # #2" has no comment.
    is_yaml = text == "null" or re.fullmatch(r"\[.*\]|\{.*\}|'.*'|\".*\"", text, re.DOTALL)
    try:
        tree[last] = parse_yaml(text) if is_yaml else text
    except ValueError as error:
        raise UserError(f"the command line: {name} = {as_typed(text)} is not valid YAML: {error}") from None


def did_you_mean(cls: type, name: str, section: str = "") -> str:
    """The hint of an error about an unknown setting, or about a section that has a value."""
    name = name.lower().replace("-", "_")
    owner, _, last = name.rpartition(".")
    known = [of for of, *_ in leaves(cls, f"{section}." if section else "") if of != name]
    sections = {of.rpartition(".")[0] for of in known}
    # Up to four settings, or a section, that may be meant: of the same last name, of a synonym, else a similar one.
    near = [of for of in known if of.split(".")[-1] == last]
    # What other tools call settings. Those in one row mean the same in different commands.
    for row, words in read_table(str(Path(__file__).with_name("synonyms")), dict[str, str]).items():
        near += [of for of in row.split() if of in known and last in f"{row} {words}".split()]
    near = near or difflib.get_close_matches(name, [*known, *(sections - {name})], n=1, cutoff=0.75)
    # Of optimizer.learning_rate and model=ViT-B/16, the section is known.
    near = [of for of in near if of.startswith(f"{name if name in sections else owner}.")] or near
    near = [*dict.fromkeys(near)][:4]
    return f" Did you mean {' or '.join(near)}?" if near else " --help lists all settings."


# ---------------------------------------------------------------------- changed settings
_FROM_LEAST = typing.get_args(OnChange)


@dataclass(frozen=True)
class Fact:
    """A setting, or something else that is saved with it. default: its value in what was saved before it existed.

    on_change: what another value means, one rule for checkpoints, finished runs, grids, studies and sweeps:

    nothing     where things are and how fast: paths, threads, monitoring, limits of time
    comparison  the run goes on, and if it is finished it stays as it is; but runs are compared with the same value
                only: rounding, how they are measured, how long they train
    result      a run may go on with it, but a finished one would have become another
    run         another run: the tensors or the order of samples; no checkpoint is continued with it

    A run is continued unless `run` differs, and a finished one taken as it is unless `result` does. From `comparison`
    on, a grid starts a run again, and a study refuses; a run with a checkpoint is refused by a grid, too, if its length
    differs, or `result` does. A setting that did not exist when something was saved counts as its default; one that no
    longer exists, as nothing.
    """

    default: Any = None
    on_change: OnChange = "result"

    def means(self, least: OnChange) -> bool:
        """Whether another value means `least` or more."""
        return _FROM_LEAST.index(self.on_change) >= _FROM_LEAST.index(least)


@dataclass(frozen=True)
class Change:
    """A value that differs from the one that was saved."""

    name: str
    then: Any
    now: Any
    fact: Fact

    def __str__(self) -> str:
        return f"{self.name} was {in_words(self.then)}, is {in_words(self.now)}"


def in_words(value: Any) -> Any:
    """A value in a sentence."""
    return "empty" if value in ("", []) else value


@functools.cache
def facts_of(cls: type, prefix: str = "", on_change: OnChange = "result") -> Mapping[str, Fact]:
    """The settings of a class by dotted name. prefix, on_change: of the section that they are. A required one has the
    default None.
    """
    facts = {}
    for name, kind, declared, meaning in leaves(cls, prefix, on_change):
        default = default_of(declared)
        if default is REQUIRED or typing.get_origin(kind) is dict:  # Of which the entries are names of their own.
            default = None
        facts[name] = Fact(to_dict(default), meaning)
    return facts


def defaults(cls: type) -> dict[str, Any]:
    """The defaults of a class by dotted name, as `to_dict` and `flatten` give them; None for a required
    setting.
    """
    return {name: fact.default for name, fact in facts_of(cls).items()}


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], known: Mapping[str, Fact], least: OnChange = "nothing"
) -> list[Change]:
    """The values that differ, by dotted name, where that means `least` or more. The name of a mapping in `known` stands
    for its entries.

    What only `now` has and `known` lacks, counts as a result.
    """
    found = []
    for name in {**now, **then}:
        fact = fact_of(name, known) or (Fact() if name in now else None)
        if fact and fact.means(least):
            change = Change(name, then.get(name, fact.default), now.get(name, fact.default), fact)
            # Compared as text, too: a size may be a number or a text.
            if change.then != change.now and str(change.then) != str(change.now):
                found.append(change)
    return found


def decisive(values: Mapping[str, Any], known: Mapping[str, Fact], least: OnChange) -> dict[str, Any]:
    """The values, by dotted name, of which another one would mean `least` or more."""
    return {name: value for name, value in values.items() if (fact_of(name, known) or Fact()).means(least)}


def fact_of(name: str, known: Mapping[str, Fact]) -> Fact | None:
    """The fact of a name, else of the mapping that has it as an entry."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return known.get(name)


# ---------------------------------------------------------------------- settings without effect
# (settings, prefix of their names) of a section, then of those that contain it.
Sections = Sequence[tuple[Any, str]]


def without_effect(settings: Settings, prefix: str = "", containing: Sections = (), of_section: str = "") -> list[str]:
    """A line for each setting that is not at its default and has no effect. prefix: of the settings' names. containing:
    the sections that contain these settings. of_section: what all of these need and lack.
    """
    sections = [(settings, prefix), *containing]
    found = []
    for field in dataclasses.fields(settings):
        name, value, rule = f"{prefix}{field.name}", getattr(settings, field.name), field.metadata
        if isinstance(value, Settings):
            missing = of_section or _missing(rule["needs"], [(value, f"{name}."), *sections])
            found += without_effect(value, f"{name}.", sections, missing)
        elif value != default_of(field):
            missing = (not rule["ignores_section"] and of_section) or _missing(rule["needs"], sections)
            # What is needed may be off in another way than by default: 0% instead of 0 steps.
            if missing and name not in missing.split():
                found.append(f"{name} = {to_dict(value)} has no effect without {missing}")
    return found


def refuse_without_effect(settings: Settings, why: str = "", prefix: str = "") -> None:
    """Raise UserError if settings that are not at their defaults have no effect. why: beginning of the message. prefix:
    of their names.
    """
    for line in without_effect(settings, prefix):
        raise UserError(f"{why}{line}. Set what is needed, or leave out what has no effect.")


def _missing(needs: str, sections: Sections) -> str:
    """The needed settings if none is set, else ""."""
    words = []
    for name, _, accepted in (need.partition("=") for need in needs.split("|")):
        value, prefix = next(((getattr(of, name), prefix) for of, prefix in sections if hasattr(of, name)), (True, ""))
        values = value if isinstance(value, list) else [value]
        if accepted and (not values or any(str(one) in accepted.split(",") for one in values)):
            return ""
        if not accepted and any(getattr(one, "amount", one) for one in values):
            return ""  # Also where nothing is needed, or a setting that a section which is read alone does not know.
        words.append(
            f"{prefix}{name}" + (f" = {accepted.removeprefix('auto,').replace(',', ' or ')}" if accepted else "")
        )
    return " or ".join(words)
