"""Settings that have no effect, because a setting that they need is not set. What each needs is declared at it (`needs`
of `setting`).

needs: names with | between, of settings of the same class (of a section: of its own), or else of one that contains it,
at least one of which is not 0, empty, null or false; or `name=value,value`, where one item of a list is enough and an
empty list means all. What a section needs, its settings need, too, unless they declare `ignores_section`.
"""

import dataclasses
from typing import Any

from pipeline.base.errors import UserError
from pipeline.settings.schema import Settings, default_of, to_dict

# (settings, prefix of their names) of a section, then of those that contain it.
Sections = list[tuple[Any, str]]


def without_effect(settings: Settings, prefix: str = "") -> list[str]:
    """A line for each setting that is not at its default and has no effect. prefix: of the settings' names."""
    return _collect([(settings, prefix)], "")


def refuse_without_effect(settings: Settings, why: str = "", prefix: str = "") -> None:
    """Raise UserError if settings that are not at their defaults have no effect. why: beginning of the message. prefix:
    of their names.
    """
    for line in without_effect(settings, prefix):
        raise UserError(f"{why}{line}. Set what is needed, or leave out what has no effect.")


def _collect(sections: Sections, of_section: str) -> list[str]:
    """The lines of the first section. of_section: what all of it needs and lacks."""
    settings, prefix = sections[0]
    found = []
    for field in dataclasses.fields(settings):
        name, value, rule = f"{prefix}{field.name}", getattr(settings, field.name), field.metadata
        if isinstance(value, Settings):
            inner = [(value, f"{name}."), *sections]
            found += _collect(inner, of_section or _missing(rule["needs"], inner))
        elif value != default_of(field):
            missing = (not rule["ignores_section"] and of_section) or _missing(rule["needs"], sections)
            # What is needed may be off in another way than by default: 0% instead of 0 steps.
            if missing and name not in missing.split():
                found.append(f"{name} = {to_dict(value)} has no effect without {missing}")
    return found


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
