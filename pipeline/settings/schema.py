"""Typed trees of settings: dataclasses filled from YAML and from `key=value` overrides, checked before anything runs.

A settings class is a frozen dataclass whose fields are made by `setting(default, "what it means")`. Every field is
documented, has a type that is checked, and can be set from the command line by its dotted name. The tree itself is
in `run.py` and its neighbours; this file knows nothing of training.
"""

import dataclasses
import difflib
import math
import os
import re
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pipeline.errors import UserError
from pipeline.outputs import Output

T = TypeVar("T")


# A file of settings has some KB; PyYAML reads about 100 KB in a second.
_MAX_YAML_BYTES = 1 << 20
# Values of a file once aliases (`*a`) are replaced by what they stand for, which can double with each line.
_MAX_YAML_VALUES = 100_000
# As long as the longest path.
_MAX_TEXT = 4096
# Where a setting names no other limit: what is larger is a mistake, and would overflow or take for ever somewhere.
_MOST = {int: 1e9, float: 1e30}
_QUOTED = 200


class _Yaml(yaml.SafeLoader):
    """YAML whose scalars stay as typed but for null, true and false.

    What is a number is decided by the setting's type, so `name: 0123` is not 83 and `1e-3` is no text. Other tags than those
    of text, numbers, lists and mappings are refused.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own way
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rsplit(":", 1)[1] in ("null", "bool", "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_yaml_bool(self, node: yaml.Node) -> bool:
        value = self.construct_scalar(node).lower()  # type: ignore[arg-type]
        if value not in self.bool_values:
            raise _yaml_error(node, f"{typed(value)} is not true or false")
        return self.bool_values[value]

    yaml_constructors = {  # noqa: RUF012
        **{f"tag:yaml.org,2002:{kind}": yaml.SafeLoader.construct_yaml_str for kind in ("str", "int", "float")},
        "tag:yaml.org,2002:null": yaml.SafeLoader.construct_yaml_null,
        "tag:yaml.org,2002:bool": construct_yaml_bool,
        "tag:yaml.org,2002:seq": yaml.SafeLoader.construct_yaml_seq,
        "tag:yaml.org,2002:map": yaml.SafeLoader.construct_yaml_map,
        None: yaml.SafeLoader.construct_undefined,
    }


def _parse_yaml(text: str) -> Any:
    """Text -> plain values. Raises ValueError, in one line, for text that is not valid YAML or takes too much."""
    try:
        loader = _Yaml(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if _num_values(node, {}) > _MAX_YAML_VALUES:
                raise _yaml_error(node, f"aliases make it more than {_MAX_YAML_VALUES:,} values")
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # "\\UFFFFFFFF" and `%YAML 99...9` are no YAMLError.
        raise ValueError(_short(" ".join(str(error).split()), 2 * _QUOTED)) from None


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node comes to. Raises for a key that is set twice, and for a node that contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = -1  # Being counted.
        children = node.value
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise _yaml_error(key, f"{typed(key.value)} is set twice")
                seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
            children = [child for pair in node.value for child in pair]
        known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    if known[id(node)] < 0:
        raise _yaml_error(node, "an anchor contains itself")
    return known[id(node)]


def _yaml_error(node: yaml.Node, said: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, said, node.start_mark)


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
            f"{where}: {prefix.rstrip('.') or 'the file'} must be a mapping of settings, not {typed(tree)}."
        )
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in tree:
        if key not in fields:
            raise UserError(f"{where}: unknown setting {prefix}{typed(key)}.{_did_you_mean(cls, prefix, str(key))}")
    values = {}
    for name, field in fields.items():
        if name in tree or _is_section(hints[name]):
            most = field.metadata.get("most")
            values[name] = convert(hints[name], tree.get(name), f"{prefix}{name}", where, most)
        elif field.default is REQUIRED and field.default_factory is REQUIRED:
            raise UserError(f"{where}: {prefix}{name} is not set ({field.metadata['doc']}). Set it: {prefix}{name}=...")
    return cls(**values)


def convert(kind: Any, value: Any, name: str, where: str, most: float | None = None) -> Any:
    """Turn a YAML value into `kind`, or raise a UserError that names the setting, the value and the type.

    most: the largest number, of either sign, that is accepted; None is the usual one.
    """
    if isinstance(kind, type) and hasattr(kind, "parse"):
        try:
            return kind.parse(value)
        except ValueError as error:
            raise UserError(f"{where}: {name} = {typed(value)}: {error}") from None
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return build(kind, value if value is not None else {}, where, f"{name}.")
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        # Numbers of a file come as text.
        named = {str(choice): choice for choice in choices}
        if not isinstance(value, bool) and str(value) in named:
            return named[str(value)]
        raise UserError(f"{where}: {name} = {typed(value)} is none of {', '.join(map(str, choices))}.")
    if origin in (typing.Union, types.UnionType):
        inner = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if value is None else convert(inner[0], value, name, where, most)
    if origin is dict:
        if isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
            return {_text(str(k), name, where): _text(v, name, where) for k, v in value.items()}
        raise UserError(f"{where}: {name} = {typed(value)} must be a mapping of names to text.")
    if origin is list:
        (inner,) = typing.get_args(kind)
        return [convert(inner, item, name, where, most) for item in (value if isinstance(value, list) else [value])]
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return _text(str(value), name, where)
    if kind in (int, float) and not isinstance(value, bool):
        number = _whole(value) if kind is int else _number(value)
        most = _MOST[kind] if most is None else most
        if number is not None and abs(number) > most:
            limit = f"at most {_plain(most)}" if number > 0 else f"at least -{_plain(most)}"
            raise UserError(f"{where}: {name} = {typed(value)} must be {limit}.")
        if number is not None:
            return number
    raise UserError(f"{where}: {name} = {typed(value)} must be a {type_name(kind)}.")


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
        with open(path, "rb") as file:
            content = file.read(_MAX_YAML_BYTES + 1)
        if len(content) > _MAX_YAML_BYTES:
            raise UserError(f"{path} is no config file: it has more than {_MAX_YAML_BYTES:,} bytes.")
        tree = _parse_yaml(content.decode())
    except FileNotFoundError:
        raise UserError(f"{typed(str(path))}: no such config file. Shipped ones are in configs/.") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a config file.") from None
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{typed(str(path))}: no config file ({error.strerror}).") from None
    except ValueError as error:  # Also of bytes that are not UTF-8, and of a path with a NUL.
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold a mapping of settings, not {typed(tree)}.")
    return tree


def _apply(cls: type, tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise UserError(
            f"{_short(repr(override))} is no override: write setting=value, for example train.global_batch=512."
        )
    parts = name.split(".")
    for depth, part in enumerate(parts):
        prefix = "".join(f"{section}." for section in parts[:depth])
        kind = typing.get_type_hints(cls).get(part)
        if kind is None:
            raise UserError(f"the command line: unknown setting {typed(name)}.{_did_you_mean(cls, prefix, part)}")
        rest = parts[depth + 1 :]
        if not rest:
            value = _override_value(kind, text)
            (most,) = (field.metadata.get("most") for field in dataclasses.fields(cls) if field.name == part)
            convert(kind, value, name, "the command line", most)  # A mistake here is not one of the file.
            tree[part] = value
            return
        is_mapping = typing.get_origin(kind) is dict
        if not is_mapping and not _is_section(kind):
            raise UserError(f"the command line: {prefix}{part} is a single value, so there is no {typed(name)}.")
        if not isinstance(tree.get(part), dict):
            if tree.get(part) is not None:
                raise UserError(f"{prefix}{part} is {typed(tree[part])} in the file, so {name} cannot be set in it.")
            tree[part] = {}
        tree = tree[part]
        if is_mapping:
            tree[".".join(rest)] = text
            return
        cls = typing.cast(type, kind)


def _override_value(kind: Any, text: str) -> Any:
    try:
        value = _parse_yaml(text) if text else ""
    except ValueError:
        return text
    # Where text is wanted, it is taken as it was typed: name=true is no truth value.
    wants_text = kind is str or kind == str | None
    return text if wants_text and value is not None and not isinstance(value, str) else value


def _did_you_mean(cls: type, prefix: str, key: str) -> str:
    known = [f.name for f in dataclasses.fields(cls)]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f" Did you mean {prefix}{near[0]}?" if near else f" Known here: {', '.join(known)}."


def typed(value: Any) -> str:
    """A value as the user wrote it, near enough; at most 200 characters on one line."""
    return _short(value if isinstance(value, str) and value and value.isprintable() else repr(value))


def _short(text: str, most: int = _QUOTED) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def _text(value: str, name: str, where: str) -> str:
    """The text, if it can be a file name or part of one: the system takes no NUL and no lone surrogate."""
    if len(value) > _MAX_TEXT:
        raise UserError(f"{where}: {name} = {typed(value)} must be at most {_MAX_TEXT:,} characters long.")
    try:
        if b"\0" not in os.fsencode(value):
            return value
    except UnicodeEncodeError:
        pass
    raise UserError(f"{where}: {name} = {typed(value)} has a character that no file name can have.")


def _plain(number: float) -> str:
    return f"{number:g}" if number > 1e20 else f"{int(number):,}"


def _whole(value: Any) -> int | None:
    text = str(value)
    if re.fullmatch(r"[-+]?[0-9]+", text):
        # Not by way of float, which has 53 bits: a seed may have more. Of thousands of digits, int() would raise.
        digits = text.lstrip("+-").lstrip("0")
        return int(digits[:21] or "0") * (-1 if text.startswith("-") else 1)  # Beyond every limit, if cut.
    number = _number(value)
    return int(number) if number is not None and number.is_integer() else None


def _number(value: Any) -> float | None:
    # PyYAML reads 1e-3 (no dot) as text; people write it all the time. No setting may be infinite or no number.
    try:
        number = float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and math.isfinite(number) else None
