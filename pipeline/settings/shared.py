"""Settings that several commands have, and kinds of settings with the same range: each declared once."""

import re
import shlex
from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import MinLen
from pydantic import AfterValidator

from pipeline.base.errors import UserError
from pipeline.process.outputs import Holds
from pipeline.settings.quantities import MINUTES_PER_YEAR, Seed
from pipeline.settings.schema import REQUIRED, Distinct, Settings, setting

Seeds = Annotated[Distinct[Seed], MinLen(1)]


def _split(words: str) -> str:
    shlex.split(words)
    return words


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    return pattern


RegularExpression = Annotated[str, AfterValidator(_compiles)]
# Words as in a shell, with quotes.
ShellWords = Annotated[str, AfterValidator(_split)]


def result_name(doc: str, holds: Holds, **rule: Any) -> Any:
    """The name of a result, whose folder is in `out`."""
    return setting(REQUIRED, doc, pattern="^[^./][^/]*$", output="folder", within="out", holds=holds, **rule)


class MlflowConfig(Settings):
    """Where a command sends its numbers and figures."""

    mlflow: str = setting("", "MLflow tracking URI for the numbers and figures; empty sends nothing.")
    experiment: str = setting("vit", "MLflow experiment, with mlflow.", needs="mlflow")


def mlflow_of_runs(what: str) -> Any:
    """Where a command sends what it makes of many runs, and the runs."""
    return setting(
        "",
        f"MLflow tracking URI of the {what} and its runs; none sends no {what}. Empty is track.uri of the runs, else "
        "sqlite:///<out>/mlflow.db, or nothing with track.enabled=false.",
    )


def refuse_overrides(subject: str, overrides: Sequence[str], prefixes: tuple[str, ...], reason: str) -> None:
    """Raise UserError for `setting=value` that begins with one of the prefixes. subject: the beginning of the
    sentence.
    """
    if given := [override for override in overrides if override.startswith(prefixes)]:
        raise UserError(f"{subject} {', '.join(given)}, which {reason}")


def minutes(default: float, doc: str, **rule: Any) -> Any:
    """A limit of time, which changes no result."""
    return setting(default, doc, **{"min": 0, "max": MINUTES_PER_YEAR, "on_change": "nothing", **rule})


def group_pattern() -> Any:
    """A setting that finds the groups of images."""
    return setting(
        "",
        "Regular expression that finds the group of an image, such as its patient or video, in its key (the path"
        " without extension, below its split or folder): what the first parentheses match, or all of it."
        " '^[^/]+/(patient[0-9]+)' of cat/patient12_3.",
    )
