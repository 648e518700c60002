"""Typed trees of settings: dataclasses filled from YAML and from `key=value` overrides, checked before anything runs.

A settings class is a frozen dataclass whose fields are made by `setting(default, "what it means")`. Every field is
documented, has a type that is checked, and can be set from the command line by its dotted name. The tree itself is
in `config.py`; this file knows nothing of training.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pipeline.errors import UserError
from pipeline.outputs import Output

T = TypeVar("T")


class _Yaml(yaml.SafeLoader):
    """YAML whose plain scalars stay as typed but for null, true and false; a key twice is an error.

    What is a number is decided by the setting's type, so `name: 0123` is not 83 and `1e-3` is no text.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own way
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rsplit(":", 1)[1] in ("null", "bool", "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key} is set twice", node.value[number][0].start_mark
                )
        return super().construct_mapping(node, deep)


REQUIRED = dataclasses.MISSING


def setting(
    default: Any, doc: str, most: float | None = None, output: Output | None = None, within: str | None = None
) -> Any:
    """A documented dataclass field.

    default: a value, REQUIRED, or a settings class (a nested section). most: the largest number that is accepted, of a list
    for each of its numbers. output: the setting is a path that the command writes (`outputs.py`). within: another
    field, the folder that it lies in.
    """
    metadata = {"doc": doc, "most": most, "output": output, "within": within}
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, (type, dict, list)):
        factory = default if isinstance(default, type) else lambda: default.copy()
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def load(cls: type[T], path: str | Path | None, overrides: typing.Sequence[str] = ()) -> T:
    """Read a settings tree from a YAML file, then apply `a.b=value` overrides (values are YAML).

    Raises UserError for a missing file, a syntax error, an unknown or missing key, a value of the wrong type, and
    whatever the class's own `check()` refuses.
    """
    tree: dict[str, Any] = {}
    where = "the command line"
    if path is not None:
        where = str(path)
        tree = _read_yaml(Path(path))
    for override in overrides:
        _apply(cls, tree, override)
    config = build(cls, tree, where)
    check = getattr(config, "check", None)
    if check is not None:
        check()
    return config


def build(cls: type[T], tree: Any, where: str, prefix: str = "") -> T:
    """Make a `cls` of a plain nested dict; `where` names the source in errors, `prefix` the section ('model.')."""
    if not isinstance(tree, dict):
        raise UserError(
            f"{where}: {prefix.rstrip('.') or 'the file'} must be a mapping of settings, not {_typed(tree)}."
        )
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in tree:
        if key not in fields:
            raise UserError(f"{where}: unknown setting {prefix}{key}.{_did_you_mean(cls, prefix, str(key))}")
    values = {}
    for name, field in fields.items():
        if name in tree or _is_section(hints[name]):
            values[name] = convert(hints[name], tree.get(name), f"{prefix}{name}", where)
        elif field.default is REQUIRED and field.default_factory is REQUIRED:
            raise UserError(f"{where}: {prefix}{name} is not set ({field.metadata['doc']}). Set it: {prefix}{name}=...")
    return cls(**values)


def convert(kind: Any, value: Any, name: str, where: str) -> Any:
    """Turn a YAML value into `kind`, or raise a UserError that names the setting, the value and the type."""
    if isinstance(kind, type) and hasattr(kind, "parse"):
        try:
            return kind.parse(value)
        except ValueError as error:
            raise UserError(f"{where}: {name} = {_typed(value)}: {error}") from None
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return build(kind, value if value is not None else {}, where, f"{name}.")
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        # Numbers of a file come as text.
        named = {str(choice): choice for choice in choices}
        if not isinstance(value, bool) and str(value) in named:
            return named[str(value)]
        raise UserError(f"{where}: {name} = {_typed(value)} is none of {', '.join(map(str, choices))}.")
    if origin in (typing.Union, types.UnionType):
        inner = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if value is None else convert(inner[0], value, name, where)
    if origin is dict:
        if isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
            return {str(k): v for k, v in value.items()}
        raise UserError(f"{where}: {name} = {_typed(value)} must be a mapping of names to text.")
    if origin is list:
        (inner,) = typing.get_args(kind)
        return [convert(inner, item, name, where) for item in (value if isinstance(value, list) else [value])]
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    if kind is int and not isinstance(value, bool) and re.fullmatch(r"[-+]?[0-9]+", str(value)):
        return int(value)  # Not by way of float, which has 53 bits: a seed may have more.
    if kind in (int, float) and not isinstance(value, bool):
        number = _number(value)
        if number is not None and (kind is float or number.is_integer()):
            return kind(number)
    raise UserError(f"{where}: {name} = {_typed(value)} must be a {type_name(kind)}.")


def to_dict(config: Any) -> dict[str, Any]:
    """The tree as plain nested dicts that `build` reads back (what goes into checkpoints and MLflow)."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if hasattr(value, "parse"):
            plain[field.name] = str(value)
        elif dataclasses.is_dataclass(value):
            plain[field.name] = to_dict(value)
        elif isinstance(value, list):
            plain[field.name] = [str(item) if hasattr(item, "parse") else item for item in value]
        else:
            plain[field.name] = value
    return plain


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
    """(dotted name, type, default, meaning) of every field, in order; what `--help` lists."""
    hints = typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if _is_section(kind):
            rows += describe(kind, f"{prefix}{field.name}.")
            continue
        if field.default is not REQUIRED:
            default = str(field.default)
        else:
            default = "required" if field.default_factory is REQUIRED else str(field.default_factory())
        rows.append((f"{prefix}{field.name}", type_name(kind), default, field.metadata["doc"]))
    return rows


def type_name(kind: Any) -> str:
    """How a person would say the type."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if origin in (typing.Union, types.UnionType):
        return f"{type_name(typing.get_args(kind)[0])} or null"
    if origin is dict:
        return "mapping"
    if origin is list:
        return f"list of {type_name(typing.get_args(kind)[0])}"
    names = {bool: "true|false", str: "text", int: "whole number", float: "number"}
    return names.get(kind, getattr(kind, "__name__", str(kind)).lower())


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and not hasattr(kind, "parse")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(), _Yaml)
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file. Shipped ones are in configs/.") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a config file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold a mapping of settings, not {_typed(tree)}.")
    return tree


def _apply(cls: type, tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise UserError(f"{override!r} is no override: write setting=value, for example train.global_batch=512.")
    parts = name.split(".")
    for depth, part in enumerate(parts):
        prefix = "".join(f"{section}." for section in parts[:depth])
        kind = typing.get_type_hints(cls).get(part)
        if kind is None:
            raise UserError(f"the command line: unknown setting {name}.{_did_you_mean(cls, prefix, part)}")
        rest = parts[depth + 1 :]
        if not rest:
            value = _override_value(kind, text)
            convert(kind, value, name, "the command line")  # A mistake here is not one of the file.
            tree[part] = value
            return
        is_mapping = typing.get_origin(kind) is dict
        if not is_mapping and not _is_section(kind):
            raise UserError(f"the command line: {prefix}{part} is a single value, so there is no {name}.")
        if not isinstance(tree.get(part), dict):
            if tree.get(part) is not None:
                raise UserError(f"{prefix}{part} is {_typed(tree[part])} in the file, so {name} cannot be set in it.")
            tree[part] = {}
        tree = tree[part]
        if is_mapping:
            tree[".".join(rest)] = text
            return
        cls = typing.cast(type, kind)


def _override_value(kind: Any, text: str) -> Any:
    try:
        value = yaml.load(text, _Yaml) if text else ""
    except yaml.YAMLError:
        return text
    # Where text is wanted, it is taken as it was typed: name=true is no truth value.
    wants_text = kind is str or kind == str | None
    return text if wants_text and value is not None and not isinstance(value, str) else value


def _did_you_mean(cls: type, prefix: str, key: str) -> str:
    known = [f.name for f in dataclasses.fields(cls)]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f" Did you mean {prefix}{near[0]}?" if near else f" Known here: {', '.join(known)}."


def _typed(value: Any) -> str:
    """A value as the user wrote it, near enough."""
    return value if isinstance(value, str) and value else repr(value)


def _number(value: Any) -> float | None:
    # PyYAML reads 1e-3 (no dot) as text; people write it all the time. No setting may be infinite or no number.
    try:
        number = float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and math.isfinite(number) else None
