"""Reads data.path and data.mix: the sets of a run, and the phases of their weights."""

from typing import NamedTuple

from pipeline.base.errors import UserError
from pipeline.data.mixture.shares import Shares
from pipeline.settings.run import DataConfig, MixedSet

# What a later entry of a set may leave out, but not change.
_DETAILS = ("exclude", "limit")
_DEFAULT = MixedSet(path="", weight=1)


class Phase(NamedTuple):
    """The shares of the sets from a batch on. first_batch: counted from 0."""

    first_batch: int
    shares: Shares


class Mixture(NamedTuple):
    """sets: data.path first, then those of data.mix as they come. phases: ascending, from batch 0 on."""

    sets: tuple[MixedSet, ...]
    phases: tuple[Phase, ...]

    def first_share(self, number: int) -> float:
        """The share of a set in the first phase that uses it; 0 if none does."""
        return next((float(share) for phase in self.phases if (share := phase.shares.share(number))), 0.0)


def mixture_of(data: DataConfig) -> Mixture:
    """The sets and phases of a run. Raises UserError for entries that contradict one another."""
    main = MixedSet(path=data.path, weight=data.weight, split=data.train_split, exclude=data.exclude, limit=data.limit)
    sets, weights = {main.name: main}, {(0, main.name): main.weight}
    for number, entry in enumerate(data.mix):
        where = f"data.mix[{number}]"
        if (entry.from_step, entry.name) in weights:
            raise UserError(
                f"{where}: {entry.path}, split {entry.split!r}, has a weight from step {entry.from_step} already (that"
                " of data.path is data.weight). Leave one of them out, or give one of them labels: false"
                " (train.loss=pseudo_labels)."
            )
        weights[entry.from_step, entry.name] = entry.weight
        known = sets.setdefault(entry.name, entry)
        for name in _DETAILS:
            if getattr(entry, name) not in (getattr(known, name), getattr(_DEFAULT, name)):
                raise UserError(
                    f"{where}.{name} differs from that of the same set before: a later entry changes its weight alone."
                )
    phases, now = [], dict.fromkeys(sets, 0.0)
    for start in sorted({start for start, _ in weights}):
        now |= {name: weight for (at, name), weight in weights.items() if at == start}
        if not sum(now.values()):
            raise UserError(f"the weights of all data sets are 0 from step {start} on: give one of them another.")
        phases.append(Phase(start, Shares([*now.values()])))
    return Mixture(tuple(sets.values()), tuple(phases))
