"""Opens the data of a run, and what is held out of it: one data set, or those of a mixture with their labels brought
together.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.architecture.objectives import NEED_NO_LABELS, Labels
from pipeline.architecture.pixels import ANY_TYPE, Pixels
from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.random_numbers import Purpose
from pipeline.base.trained_on import TrainedSet, trained_by
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.data.dataset.split import Split
from pipeline.data.mixture.phases import Mixture, mixture_of
from pipeline.data.mixture.split import MixedSplit, Part, mix
from pipeline.data.storage.cache import Storage
from pipeline.settings.run import DataConfig

# The default of data.eval_split.
_USUAL_SPLIT = "val"


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    own: the data set data.path. dataset: the same one; in a mixture it has the classes of all sets whose labels are
    read, its own first.
    split: what is trained on. evaluated: name -> split of `own`, first the one that is held out, then those of
    data.eval_also. eval_split: see `held_out_split`.
    epoch_samples: samples of training in an epoch: so many use the training split of data.path once, at its first
    share. targets: names of the numbers that are learned, which all splits have in this order; [] for none.
    """

    own: Dataset
    dataset: Dataset
    split: Split
    evaluated: dict[str, Split]
    eval_split: str
    epoch_samples: int
    targets: list[str]

    @property
    def evaluation(self) -> Split | None:
        """The first split that is evaluated, None without one."""
        return next(iter(self.evaluated.values()), None)

    def trained_on(self, run: str) -> list[TrainedSet]:
        """What a run of this name trains on."""
        split = self.split
        sets = (
            [(one.dataset, one.split) for one in split.sets] if isinstance(split, MixedSplit) else [(self.own, split)]
        )
        return [TrainedSet(of.path.name, of.fingerprint, part.name, run) for of, part in sets]

    def not_held_out(self, trained: Sequence[TrainedSet]) -> dict[str, str]:
        """Name among `evaluated` of each split that weights with this training were trained on -> the names of the runs
        (`trained_by`).
        """
        own = self.own.fingerprint
        names = {name: trained_by(trained, own, split.name) for name, split in self.evaluated.items()}
        return {name: runs for name, runs in names.items() if runs}

    def notes(self) -> list[str]:
        """Lines to print about the splits."""
        lines = [*self.split.notes(), *(self.evaluation.notes() if self.evaluation else [])]
        return list(dict.fromkeys(lines))  # Those of a data set are notes of both.


def open_run_data(data: DataConfig, seed: int, labels: Labels, storage: Storage | None = None) -> RunData:
    """Open the data sets of a run and check them. storage: of all sets, with one cache for them.

    labels: what the run does with them. If they are only scored, or unread, those of data.path alone are there; if they
    are learned partly, those of sets that have some.
    Raises UserError as `open_dataset` and `run_splits` do, for sets that do not go together, and for training images of
    which none has a label, or a number, that is learned.
    """
    own = open_dataset(data.path, storage)
    targets = _chosen_targets(own, data) if labels == "targets" else []
    split, evaluation = run_splits(own, data, seed)
    split = split.with_targets(targets, own.targets)
    held_out = ([] if evaluation is None else [evaluation]) + [
        own.split(name, data.exclude) for name in data.evaluated if name != data.evaluated_split
    ]
    evaluated = {part.name: part.with_targets(targets, own.targets) for part in held_out}
    mixture = mixture_of(data)
    run = RunData(own, own, split, evaluated, held_out_split(own, data), len(split), targets)
    if len(mixture.sets) > 1:
        run = _with_other_sets(run, mixture, data, seed, labels)
    for part in evaluated.values():
        part.refuse_without_score(own.path, labels not in ("targets", "unread") and bool(run.dataset.classes))
    if targets:
        _refuse_without_targets(run)
    _refuse_remote(data, run.split)
    if labels in ("learned", "partly", "scored") and own.targets and not own.classes:
        raise UserError(
            f"{own.path} has no labels, but numbers: {', '.join(own.targets)}. train.loss=regression learns these."
        )
    # Another data set without any classes is refused by what reads them.
    if labels in ("learned", "partly") and own.classes and len(run.split) and not run.split.max_labels:
        raise UserError(
            f"no training image has a label (split {run.split.name!r} of {own.path}): nothing is learned. Name a split"
            " or a set with labels (data.train_split, data.path), or use an objective that needs none"
            f" (train.loss={NEED_NO_LABELS})."
        )
    return run


def _chosen_targets(own: Dataset, data: DataConfig) -> list[str]:
    """The numbers that a run learns. Raises UserError for data without any, or without one that data.targets names."""
    if not own.targets:
        raise UserError(
            f"{own.path} has no numbers to learn, which train.loss=regression needs. Shard it with"
            " target_columns=[age] of a list or Parquet (docs/sharding.md)."
        )
    if unknown := [name for name in data.targets if name not in own.targets]:
        raise UserError(
            f"data.targets = {quoted(data.targets)}: {own.path} has no numbers {unknown[0]!r}. It has:"
            f" {', '.join(own.targets)}."
        )
    return data.targets or own.targets


def _refuse_without_targets(run: RunData) -> None:
    """Raise UserError for a number that no training image has, and for a split to evaluate on without any."""
    for split in run.evaluated.values():
        if not np.isfinite(split.target_values).any():
            raise UserError(
                f"{run.own.path}: split {split.name!r} has images, but no values of {', '.join(run.targets)}, so"
                " nothing can be scored on it. Name another split."
            )
    if (lacking := ~np.isfinite(run.split.target_values).any(0)).any():
        raise UserError(
            f"no training image has a value of {run.targets[int(lacking.argmax())]!r} (split {run.split.name!r} of"
            f" {run.own.path}): choose others (data.targets), or another data.train_split."
        )


def _refuse_remote(data: DataConfig, split: Split) -> None:
    """Raise UserError if processes were to read a bucket, whose client does not survive a fork. A local manifest may
    list shards of one.
    """
    remote = [path for path in split.shard_paths if "://" in path]
    if data.processes and remote:
        raise UserError(
            f"data.processes = {data.processes} reads local files only: leave it out for {remote[0]}, or copy the data"
            " set to a disk."
        )


def _with_other_sets(run: RunData, mixture: Mixture, data: DataConfig, seed: int, labels: Labels) -> RunData:
    """The data of a run with the other sets of its mixture."""
    sets = [Part(mixture.sets[0], run.own, run.split)]
    for entry in mixture.sets[1:]:
        try:
            other = open_dataset(entry.path, run.own.storage)
            split = other.split(entry.split, entry.exclude, entry.limit, seed)
            split = split.with_targets(run.targets, other.targets)
        except UserError as error:
            raise UserError(f"data.mix, {entry.path}: {error}") from None
        is_same = (other.fingerprint, entry.split) == (run.own.fingerprint, run.split.name)
        if data.dev_share and is_same and run.evaluation is not None:
            split = _without(split, run.evaluation)
        if not entry.labels and labels != "partly":
            raise UserError(f"data.mix, {entry.path}: labels = false is for train.loss=pseudo_labels.")
        sets.append(Part(entry, other, split))
    pixels = Pixels.of_all([one.dataset.pixels for one in sets])
    range_notes = _notes_of_ranges(sets, pixels)
    dataset, sets, class_notes = _bring_together(sets, labels)
    epoch_samples = round(len(run.split) / mixture.first_share(0))
    epoch_note = f"an epoch is one of {run.own.path.name}: {counted(epoch_samples, 'sample')} of the mixture"
    if pixels != run.own.pixels:
        dataset = replace(dataset, info=dataset.info | {"pixels": pixels.to_dict()})
    mixed = mix(mixture, sets, [epoch_note, *class_notes, *range_notes], pixels)
    return replace(run, dataset=dataset, split=mixed, epoch_samples=epoch_samples)


def run_splits(dataset: Dataset, data: DataConfig, seed: int) -> tuple[Split, Split | None]:
    """(training split, evaluation split, None without one) of a run.

    Raises UserError as `Dataset.split` and `hold_out` do, and for a balance of classes where no sample of the split has
    a label.
    """
    train = dataset.split(data.train_split, data.exclude, data.limit, seed)
    if data.balance != 1 and not train.max_labels:
        raise UserError(
            f"data.balance = {data.balance:g} balances classes, and no sample of {dataset.path}, split {train.name!r},"
            " has a label. Leave it at 1."
        )
    if data.dev_share:
        return hold_out(train, data.dev_share, seed)
    name = held_out_split(dataset, data)
    if name and name not in dataset.splits:
        raise UserError(
            f"data.eval_split = {name}: {dataset.without_split(name)} To evaluate on a tenth of the training images:"
            " data.dev_share=0.1; on none: data.eval_split= (empty)."
        )
    return train, dataset.split(name, data.exclude) if name else None


def held_out_split(dataset: Dataset, data: DataConfig) -> str:
    """data.eval_split, "" if there is none: it is empty, or has its default and the data set has neither such a split
    nor labels.
    """
    is_missing = data.eval_split == _USUAL_SPLIT and data.eval_split not in dataset.splits
    return "" if is_missing and not dataset.classes else data.eval_split


def hold_out(split: Split, share: float, seed: int) -> tuple[Split, Split]:
    """(the rest, a random share called "dev") of a split; of samples with groups, whole groups of nearly the share.

    Raises UserError when either would be empty.
    """
    count = round(share * len(split))
    what = f"data.dev_share = {share} of the {counted(len(split), 'sample')} of {split.name!r} is"
    if not 0 < count < len(split):
        raise UserError(f"{what} {counted(count, 'sample')}.")
    units = _units(split)
    is_dev = _in_groups(units, count, seed)
    if not is_dev.any():
        least = counted(int(np.unique(units, return_counts=True)[1].min()), "sample")
        raise UserError(
            f"{what} {counted(count, 'sample')}, but groups are held out whole, and the smallest has {least}."
        )
    return split.only(np.flatnonzero(~is_dev)), replace(split.only(np.flatnonzero(is_dev)), name="dev")


def _units(split: Split) -> np.ndarray:
    """int64 (n,): the group of each sample, or its row in the manifest, so that the choice of a sample does not depend
    on which others are excluded.
    """
    return split.manifest_rows(np.arange(len(split))) if split.groups is None else split.groups


def _in_groups(groups: np.ndarray, count: int, seed: int) -> np.ndarray:
    """bool (n,), the samples of whole groups with about `count` samples: in random order, each that brings their number
    nearer to it.

    groups: int64 (n,), which do not depend on what is excluded.
    """
    names, of_rows, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    chosen, so_far = np.zeros(len(names), bool), 0
    for number in np.argsort(random_numbers.bits(seed, Purpose.DEV_SPLIT, names), kind="stable"):
        if so_far == count:
            break
        after = so_far + int(sizes[number])
        if abs(after - count) < abs(so_far - count) and after < len(groups):  # Something is left to train on.
            chosen[number], so_far = True, after
    return chosen[of_rows]


def _without(split: Split, held_out: Split) -> Split:
    """A split without samples, or groups, that are held out of the same split of the same data set, which is there
    twice (`MixedSet.labels`).
    """
    return split.only(np.flatnonzero(~np.isin(_units(split), _units(held_out))))


def _notes_of_ranges(sets: Sequence[Part], pixels: Pixels) -> list[str]:
    """Lines about sets that are not read as they would be alone. pixels: `Pixels.of_all` sets."""
    own, path = sets[0].dataset.pixels, sets[0].dataset.path
    if pixels.type != ANY_TYPE:
        others = (one.entry.path for one in sets if replace(one.dataset.pixels, nodata=own.nodata) != own)
        return [f"{other} is read by the range of {path}" for other in others]
    filled = (note for one in sets for note in pixels.filled_notes(one.dataset.pixels, one.entry.path))
    return [f"the sets differ in channels or type, so each is read by its own range: {pixels}", *filled]


def _bring_together(sets: Sequence[Part], labels: Labels) -> tuple[Dataset, list[Part], list[str]]:
    """(the first data set with the classes of all, the sets with these classes' numbers or without labels, a line for
    each set with own classes).

    The classes are those of the first set in its order, then the new ones of each other set in its order; the same name
    is the same class. Without any labels there are no classes. Raises UserError for sets with and without labels, and
    with one and several labels a sample.
    """
    own = sets[0].dataset
    # Those of data.mix whose labels are read; of the others, only the images are.
    partly = [one for one in sets[1:] if labels == "partly" and one.entry.labels and one.dataset.classes]
    joined = sets if labels == "learned" else [sets[0], *partly]
    labelled = {bool(one.dataset.classes): one.entry.path for one in joined}
    several = {one.split.max_labels > 1: one.entry.path for one in joined}
    if len(labelled) > 1:
        raise UserError(
            f"data.mix: {labelled[False]} has no labels, and {labelled[True]} has: a run needs them of every set from"
            " which it learns classes. Leave it out, or use an objective that learns"
            " without labels, such as train.loss=dino."
        )
    if len(several) > 1 and own.classes:
        raise UserError(
            f"data.mix: {several[True]} has several labels a sample and {several[False]} has one: what is not named"
            " means something else in each. Mix sets of one form, or use an objective that learns without labels, such"
            " as train.loss=dino."
        )
    shown: dict[str, str] = {}  # Class -> readable name.
    for one in joined:
        for name, readable in zip(one.dataset.classes, one.dataset.class_names, strict=True):
            shown.setdefault(name, readable)
    places = {name: place for place, name in enumerate(shown)}
    having = Counter(name for one in joined for name in one.dataset.classes)
    together, notes = [], []
    for one in sets:
        if one not in joined:
            together.append(replace(one, split=one.split.without_labels()))
            continue
        numbers = np.array([places[name] for name in one.dataset.classes], np.int32)
        together.append(replace(one, label_map=numbers))
        alone = [name for name in one.dataset.classes if having[name] == 1]
        if alone and len(joined) > 1:
            notes.append(
                f"of {counted(len(shown), 'class')} of the mixture, only {one.entry.path} has {len(alone):,}, such as"
                f" {alone[0]!r}"
            )
    of_all = {"classes": list(shown), "class_names": list(shown.values())}
    return replace(own, info=own.info | of_all), together, notes
