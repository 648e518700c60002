"""Reads YAML text as plain values; every mistake is a one-line error. Knows no settings class.

`read_table` reads the tables of facts that stand beside the modules which explain their fields.
"""

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pipeline.base.errors import UserError, raise_outage
from pipeline.base.json_record import MAX_QUOTED, convert, quoted, shortened
from pipeline.base.words import on_one_line
from pipeline.process.installed import shipped

T = TypeVar("T")

# A file of settings has some KB; PyYAML reads about 100 KB in a second.
_MAX_BYTES = 1 << 20


class _YamlLoader(yaml.SafeLoader):
    """Leaves every scalar as text except null, true and false.

    The setting's type decides what is a number, so `name: 0123` is not 83 and `1e-3` is a number. Tags other than those of
    text, numbers, lists and mappings are refused.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own way
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rsplit(":", 1)[1] in ("null", "bool", "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_yaml_bool(self, node: yaml.Node) -> bool:
        value = self.construct_scalar(node).lower()  # type: ignore[arg-type]
        if value not in self.bool_values:
            raise _error(node, f"{as_typed(value)} is not true or false")
        return self.bool_values[value]

    yaml_constructors = {  # noqa: RUF012
        **{f"tag:yaml.org,2002:{kind}": yaml.SafeLoader.construct_yaml_str for kind in ("str", "int", "float")},
        "tag:yaml.org,2002:null": yaml.SafeLoader.construct_yaml_null,
        "tag:yaml.org,2002:bool": construct_yaml_bool,
        "tag:yaml.org,2002:seq": yaml.SafeLoader.construct_yaml_seq,
        "tag:yaml.org,2002:map": yaml.SafeLoader.construct_yaml_map,
        None: yaml.SafeLoader.construct_undefined,
    }


def parse_yaml(text: str) -> Any:
    """YAML text as plain values. Raises ValueError, in one line, for invalid YAML."""
    try:
        loader = _YamlLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _refuse_duplicates(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"(line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = " ".join(part for part in (error.context, error.problem, place) if part)
        raise ValueError(shortened(on_one_line(problem), 2 * MAX_QUOTED)) from None
    except yaml.YAMLError as error:
        raise ValueError(shortened(on_one_line(error), 2 * MAX_QUOTED)) from None


@lru_cache(maxsize=32)
def _parse_file(content: bytes) -> Any:
    """Kept, because a study or a grid reads the same file for each of its runs, and PyYAML takes milliseconds. Not to be changed."""
    return parse_yaml(content.decode())


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError when the file is missing, unreadable, too large or no mapping.

    A relative path `configs/...` that does not exist is the shipped file of that name. Raises OSError while its disk fails.
    """
    try:
        with open(shipped(path), "rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise UserError(f"{path} is no config file: it has more than {_MAX_BYTES:,} bytes.")
        tree = copy.deepcopy(_parse_file(content))
    except FileNotFoundError:
        raise UserError(f"{as_typed(str(path))}: no such config file. Shipped ones are in configs/.") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a config file.") from None
    except UserError:
        raise
    except OSError as error:
        raise_outage(error, path)
        raise UserError(f"{as_typed(str(path))}: cannot read the config file ({error.strerror}).") from None
    except ValueError as error:  # Also raised for bytes that are not UTF-8, and for a path that contains NUL.
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold a mapping of settings, not {as_typed(tree)}.")
    return tree


def read_table(module: str, kind: type[T]) -> T:
    """Returns the YAML file beside a module, of the same name, as `kind` (`json_record.convert`). module: `__file__`."""
    path = Path(module).with_suffix(".yaml")
    return convert(yaml.safe_load(path.read_text("utf-8")), kind, path.name)


def as_typed(value: Any) -> str:
    """A value roughly as the user wrote it, at most 200 characters on one line: printable text without quotes."""
    return shortened(value) if isinstance(value, str) and value and value.isprintable() else quoted(value)


def _refuse_duplicates(node: yaml.Node) -> None:
    """Raise YAMLError for a key that a mapping has twice, of which PyYAML would take the last."""
    children = [] if isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, _ in children:
            if str(key.value) in seen:
                raise _error(key, f"{as_typed(key.value)} is set twice")
            seen.add(str(key.value))
        children = [value for _, value in children]
    for child in children:
        _refuse_duplicates(child)


def _error(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
