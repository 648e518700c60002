"""What weights were trained on, as far as their files record it, and whether a split is among that."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# In the metadata of weights, and in state.json.
TRAINED_ON = "trained_on"
# In scores, and in what is known of evaluated data: the names that `trained_by` returns.
TRAINED_BY = "trained_by"


@dataclass(frozen=True)
class TrainedSet:
    """A split of a data set that weights were trained on. name: of its folder. run: which trained on it."""

    name: str
    fingerprint: str
    split: str
    run: str = ""


def recorded(extra: Mapping[str, Any]) -> list[TrainedSet]:
    """What weights were trained on: by their run, by those from whose weights it began, and by its teacher. extra: of
    their file.
    """
    return [TrainedSet(**one) for one in extra.get(TRAINED_ON) or ()]


def trained_by(sets: Iterable[TrainedSet], fingerprint: str, split: str) -> str:
    """Names of the runs that trained on images of this split of a data set; "" if none did, as far as is known."""
    found = {one.run or "their run": None for one in sets if (one.fingerprint, one.split) == (fingerprint, split)}
    return ", ".join(found)


def not_held_out(split: str, runs: str) -> str:
    """A line to print of a score on images that were trained on. runs: of `trained_by`."""
    return f"the scores on {split} are not of held-out images: it was trained on by {runs}"
