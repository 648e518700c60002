"""What a changed setting means for what was made with it: one rule for checkpoints, finished runs, grids, studies and
sweeps.

Each setting declares it (`on_change` of `setting`), from least to most:

    nothing     where things are and how fast: paths, threads, monitoring, limits of time
    comparison  the run goes on, and if it is finished it stays as it is; but runs are compared with the same value
    only: rounding, how
                they are measured, how long they train
    result      a run may go on with it, but a finished one would have become another
    run         another run: the tensors or the order of samples; no checkpoint is continued with it

A run is continued unless `run` differs, and a finished one taken as it is unless `result` does. From `comparison` on, a
grid starts a run again, and a study refuses; a run with a checkpoint is refused by a grid, too, if its length differs,
or `result` does. A setting that did not exist when something was saved counts as its default; one that no longer
exists, as nothing.
"""

import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.settings import schema
from pipeline.settings.schema import REQUIRED, OnChange

_FROM_LEAST = typing.get_args(OnChange)


@dataclass(frozen=True)
class Fact:
    """A setting, or something else that is saved with it. default: its value in what was saved before it existed."""

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
        return f"{self.name} was {self.then}, is {self.now}"


@functools.cache
def facts_of(cls: type, prefix: str = "", on_change: OnChange = "result") -> Mapping[str, Fact]:
    """The settings of a class by dotted name. prefix, on_change: of the section that they are. A required one has the
    default None.
    """
    facts = {}
    for name, kind, declared, meaning in schema.leaves(cls, prefix, on_change):
        default = schema.default_of(declared)
        default = None if default is REQUIRED else default
        if typing.get_origin(kind) is dict:  # Its entries are names of their own.
            facts.update({f"{name}.{key}": Fact(value, meaning) for key, value in (default or {}).items()})
            default = None
        facts[name] = Fact(schema.to_dict(default), meaning)
    return facts


def defaults(cls: type) -> dict[str, Any]:
    """The defaults of a class by dotted name, as `schema.to_dict` and `schema.flatten` give them; None for a required
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
