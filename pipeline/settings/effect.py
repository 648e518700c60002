"""Settings that have no effect, because a setting that they need is not set. What each needs is declared at it (`needs` of `setting`)."""

import dataclasses
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.json_record import is_record
from pipeline.settings.yaml_reader import as_typed

# (settings, prefix of their names) of a section, then of those that contain it.
Sections = list[tuple[Any, str]]


def without_effect(settings: Any, prefix: str = "") -> list[str]:
    """A line for each reason for which settings that are not at their defaults have no effect. prefix: of the settings' names."""
    found: dict[str, list[str]] = {}
    _collect([(settings, prefix)], "", found)
    return [
        f"{', '.join(of)} {'has' if len(of) == 1 else 'have'} no effect without {needs}" for needs, of in found.items()
    ]


def refuse_without_effect(settings: Any, why: str = "", prefix: str = "") -> None:
    """Raise UserError if settings that are not at their defaults have no effect. why: beginning of the message."""
    for line in without_effect(settings, prefix):
        raise UserError(f"{why}{line}. Set what is needed, or leave out what has no effect.")


def _collect(sections: Sections, why: str, found: dict[str, list[str]]) -> None:
    """Add the settings of a section to `found`, by what they need. why: what all of the section need, "" if that is set."""
    settings, prefix = sections[0]
    for field in dataclasses.fields(settings):
        name, value, needs = f"{prefix}{field.name}", getattr(settings, field.name), field.metadata["rule"].needs
        if is_record(type(value)):
            inner = [(value, f"{name}."), *sections]
            _collect(inner, why or _missing(inner, needs), found)
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        of_section = "" if field.metadata["rule"].ignores_section else why
        missing = of_section or _missing(sections, needs)
        # What is needed may be off in another way than by default: 0% instead of 0 steps.
        if missing and value != default and name not in missing.split():
            found.setdefault(missing, []).append(f"{name} = {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        value = [str(item) if hasattr(item, "parse") else item for item in value]
    return str(value).lower() if isinstance(value, bool) else as_typed(str(value))


def _missing(sections: Sections, needs: str) -> str:
    """What is needed, in words, if none of it is set and has an effect itself; else "". needs: as of `Rule`."""
    words = []
    for need in filter(None, needs.split("|")):
        name, _, accepted = need.partition("=")
        of = [(settings, prefix) for settings, prefix in sections if hasattr(settings, name)]
        if not of:  # Of a class that inherits the setting, or of a section that is read alone.
            continue
        settings, prefix = of[0]
        value, known = getattr(settings, name), accepted.split(",")
        if _is_one_of(value, known) if accepted else _is_set(value):
            (its,) = (field.metadata["rule"].needs for field in dataclasses.fields(settings) if field.name == name)
            if not (missing := _missing(sections, its)):
                return ""
            words.append(missing)
            continue
        # "auto" is one of the others, which is not known yet.
        words.append(f"{prefix}{name}" + f" = {' or '.join(one for one in known if one != 'auto')}" * bool(accepted))
    return " or ".join(words)


def _is_one_of(value: Any, accepted: list[str]) -> bool:
    """Whether a value is accepted, or one of a list; an empty list stands for all."""
    values = value if isinstance(value, list) else [value]
    return not values or any(str(one) in accepted for one in values)


def _is_set(value: Any) -> bool:
    """Whether a value is not 0, empty, null or false; a list of zeros is not set."""
    return any(value) if isinstance(value, list) else bool(getattr(value, "amount", value))
