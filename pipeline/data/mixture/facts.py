"""A checkpoint's record of a mixture, and the part of it that decides the batches and labels before a step."""

from collections.abc import Mapping
from typing import Any

from pipeline.data.dataset.split import NOTHING_EXCLUDED
from pipeline.data.mixture.split import MixedSplit

# Name in a run's identity.
MIXTURE = "mixture"


def mixture_facts(split: MixedSplit) -> dict[str, Any]:
    """Returns plain values: each set with its content, and by first batch the samples of each set in a period."""
    sets = [
        {
            "path": one.entry.path,
            "split": one.entry.split,
            "limit": str(one.entry.limit),
            "fingerprint": one.dataset.fingerprint,
            "excluded": one.split.excluded,
        }
        | ({} if one.entry.labels else {"labels": False})
        for one in split.sets
    ]
    return {
        "sets": sets,
        "phases": [[phase.first_batch, phase.shares.counts.tolist()] for phase in split.mixture.phases],
    }


def mixed_until(identity: Mapping[str, Any], batches: int) -> str:
    """Describes a run's first batches by its identity: equal texts have equal batches."""
    mixture = identity.get(MIXTURE) or _one_set(identity)
    phases = [(start, counts) for start, counts in mixture["phases"] if start < max(batches, 1)]
    words = []
    for number, one in enumerate(mixture["sets"]):
        counts = [of_phase[number] for _, of_phase in phases]
        if not any(counts):
            continue
        shares = ", then ".join(
            f"{of_phase[number]}/{sum(of_phase)}" + f" from step {start}" * bool(start) for start, of_phase in phases
        )
        but = f" without {one['excluded']}" * (one["excluded"] != NOTHING_EXCLUDED)
        but += " without its labels" * (not one.get("labels", True))
        words.append(f"set {number}: {one['fingerprint']} split {one['split']}{but}, {shares}")
    return "; ".join(words)


def _one_set(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a run with one data set."""
    one = {
        "split": identity.get("data.train_split", "train"),
        "fingerprint": identity.get("fingerprint"),
        "excluded": identity.get("excluded", NOTHING_EXCLUDED),
    }
    return {"sets": [one], "phases": [[0, [1]]]}
