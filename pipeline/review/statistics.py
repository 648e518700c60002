"""Which runs can be compared, and the differences between them (`evaluate/differences.py` has the tests)."""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.base.metric import MAIN, Metric, kind_of
from pipeline.base.trained_on import TRAINED_BY
from pipeline.base.words import counted, first_of
from pipeline.evaluate.differences import (
    ScoreDifference,
    holm,
    of_proportions,
    of_same_groups,
    of_same_images,
    of_seeds,
)
from pipeline.monitor.run_page import TEACHER_TAG
from pipeline.review.record import PREDICTIONS, LastPredictions, RunRecord
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

# Settings of a probe that its scores depend on, beside those in their names.
_KNN, _FEW_SHOT = ("train_split", "temperature", "neighbour_images"), ("train_split", "shots_seeds", "l2")


# ---------------------------------------------------------------------- runs
Records = Mapping[str, RunRecord]


@dataclass(frozen=True)
class Contender:
    """One run, or several that differ in their seed only. record: the first one. values: their scores, of `metric`.
    effective: see `Score`.
    """

    names: tuple[str, ...]
    record: RunRecord
    metric: Metric
    values: tuple[float, ...]
    num_samples: int
    effective: float

    @property
    def title(self) -> str:
        return in_seeds(self.names)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


@dataclass(frozen=True)
class Pair:
    """Two contenders, the better one first. corrected: the p-value by `holm` over all pairs of the group."""

    first: Contender
    second: Contender
    difference: ScoreDifference
    corrected: float


def contenders(records: Records) -> list[Contender]:
    """Runs scored on the same images, those of the same settings and different seeds as one; the best first.

    A grid's mean over seeds is one contender, too. Runs without an accuracy or one of MAIN are left out.
    """
    scores = {
        name: score
        for name, record in records.items()
        if (score := record.last_score)
        and (score.is_accuracy or kind_of(record.scored) in MAIN)
        and math.isfinite(score.value)
    }
    found = []
    for names in seed_groups({name: records[name] for name in scores}):
        record, score = records[names[0]], scores[names[0]]
        values = tuple(scores[name].value for name in names)
        if len(names) == 1 and record.seed_scores:
            values = tuple(record.seed_scores)
        # A mean over tasks is not a proportion of images.
        num_samples = 0 if record.kind == "vtab" or not score.is_accuracy else score.num_samples
        found.append(Contender(names, record, score.metric, values, num_samples, num_samples and score.effective))
    return sorted(found, key=lambda contender: -contender.mean)


def seed_groups(records: Records) -> list[tuple[str, ...]]:
    """The names of runs that differ in nothing but their seed, scored at the same step, together; other runs alone."""
    groups = list[tuple[str, ...]]()
    for names in _by_value(records, lambda record: _but_the_seed(record) or id(record)).values():
        is_repeated = len({records[name].settings.get("seed") for name in names}) < len(names)
        # Runs with the same seed are not independent samples.
        groups += [(name,) for name in names] if is_repeated else [tuple(names)]
    return groups


def pairs_of(found: Sequence[Contender]) -> list[Pair]:
    """All pairs that can be tested: with a number of images, or several seeds."""
    predictions = {contender.names: _right(contender) for contender in found}
    tested = []
    for first, second in itertools.combinations(found, 2):
        ours, theirs = predictions[first.names], predictions[second.names]
        if len(first.values) + len(second.values) > 2:
            num_samples = min(first.num_samples, second.num_samples)
            difference = of_seeds(first.values, second.values, num_samples, first.metric.is_share)
        elif ours and theirs and np.array_equal(ours[0], theirs[0]):
            groups = ours[2] if len(ours[2]) else theirs[2]
            right = ours[1], theirs[1]
            difference = of_same_groups(*right, groups) if len(groups) else of_same_images(*right)
        elif first.effective and second.effective:
            difference = of_proportions(first.mean, first.effective, second.mean, second.effective)
        else:
            continue
        tested.append((first, second, difference))
    corrected = holm([difference.p for _, _, difference in tested])
    return [Pair(*pair, p) for pair, p in zip(tested, corrected, strict=True)]


def _but_the_seed(record: RunRecord) -> Hashable:
    """Key that runs share if only their seeds differ; None if the settings are unknown."""
    if not record.has_all_settings:
        return None
    compared = schema.decisive(record.settings, schema.facts_of(RunConfig), "comparison")
    settings = {name: str(value) for name, value in compared.items() if name != "seed"}
    # These settings draw the excluded images by the seed.
    defaults, by_seed = schema.defaults(RunConfig), ("data.limit", "data.dev_share", "data.mix")
    is_drawn = any(str(record.settings.get(name, defaults[name])) != str(defaults[name]) for name in by_seed)
    data = (*(facts.digest for facts in record.datasets), None if is_drawn else record.parameters.get("excluded"))
    # The weights in a folder may change, and a run that ended halfway is not another sample of the same training.
    weights = record.origin and record.origin.sha256, record.tags.get(TEACHER_TAG, "").partition(", which scored")[0]
    step = record.last_score.step if record.last_score else None
    return (tuple(sorted(settings.items())), data, weights, record.revision, step)


def _right(contender: Contender) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Returns (rows with their labels, whether each was right, groups if there are some) of a single run's last
    evaluation, or None.

    Predictions that do not give the last score are of another evaluation, and are not used. Raises UserError for a
    damaged file.
    """
    folder = contender.record.folder
    if len(contender.values) > 1 or not contender.num_samples or not (folder / PREDICTIONS).exists():
        return None
    found = LastPredictions.read(folder)
    right = found.predicted == found.true
    is_of_score = len(right) == contender.num_samples and abs(right.sum() - contender.mean * len(right)) < 0.5
    return (np.stack([found.rows, found.true]), right, found.groups) if is_of_score else None


# ---------------------------------------------------------------------- what can be compared
def by_evaluation(records: Records) -> dict[Hashable, list[str]]:
    """The names of the runs that were scored by the same measure on the same images; runs without a score are left
    out.
    """
    return _by_value(records, lambda record: scored_on(record)[0])


def scored_on(record: RunRecord) -> tuple[Hashable, str]:
    """Returns (data, split, number of images, measure unless it is the accuracy of the run's head), in which comparable
    scores agree, and the same in words; () without a score.
    """
    score, results, facts, count = record.last_score, record.results, record.dataset("evaluation"), 0
    if score is None:
        return (), ""
    measure = ""
    if record.scored in record.probes:
        measure = f"{score.name}{_fit(record)}"
    elif kind_of(record.scored) in MAIN:
        measure = score.name
        if kind_of(record.scored) == "r2":
            targets = record.settings.get("data.targets") or record.settings.get("targets") or ()
            measure += f" of {targets if isinstance(targets, str) else ', '.join(targets)}"
    elif not score.is_accuracy:
        measure = f"{score.name} {record.settings.get('train.loss')}"
    data, split = record.scored_split
    name = Path(data).name
    if record.kind == "vtab":
        name, data = "VTAB-1k", str(sorted(results["data"].items()))
        measure = f"{score.name}, protocol {results['protocol']['sha256']}"
    elif not data:
        data = (facts.digest or facts.source) if facts else str(results.get("data") or record.tags.get("data", ""))
        name = f"{facts.name}, fingerprint {data}" if facts else Path(data).name
        split, count = record.split or str(results.get("split", "")), score.num_samples
    words = {"split ": split, "": count and counted(count, "image"), "by ": measure}
    return (data, split, count, measure), ", ".join([name, *(f"{key}{told}" for key, told in words.items() if told)])


def _fit(record: RunRecord) -> str:
    """How the probe that is a run's score is fitted, as far as it differs from the defaults: ",
    probe.neighbour_images=10000".
    """
    is_knn, section = record.scored.endswith("nn"), "" if record.kind == "evaluation" else "probe."
    told, defaults = [], schema.defaults(RunConfig)
    for name in _KNN if is_knn else _FEW_SHOT:
        default = str(defaults[f"probe.{name}"])
        if (value := str(record.settings.get(f"{section}{name}", default))) != default:
            told.append(f", probe.{name}={value}")
    # The same images with groups and without have one fingerprint, but other shots.
    of_groups = not is_knn and f"{record.scored}_effective_images" in record.series
    return "".join([*told, *[", shots of different groups"] * of_groups])


def comparable(records: Records, groups: Sequence[Sequence[str]]) -> Iterator[str]:
    """Sentences that say what can be compared, and what cannot. groups: names of runs, of `by_evaluation`."""
    if len(groups) > 1:
        yield (
            "The runs were scored on different images, or by different measures. Scores of different sets are not put"
            " in one ranking."
        )
    for number, group in enumerate(groups, 1):
        yield f"Set {number} ({scored_on(records[group[0]])[1]}): {first_of(group, 12)}."
    scored = {name for group in groups for name in group}
    if absent := [name for name in records if name not in scored]:
        yield f"Without a score: {first_of(absent, 12)}."
    for name, record in records.items():
        held_out = record.dataset("evaluation")
        if held_out and TRAINED_BY in held_out.notes:
            yield f"{name} has no score of held-out images, since {held_out.notes[TRAINED_BY]} trained on them."
        if record.status != "finished":
            yield f"Not as planned: {name} ({record.outcome})."
    seen = {record.images_seen for record in records.values() if record.images_seen}
    if len(seen) > 1:
        yield (
            f"The runs saw different numbers of images, {min(seen):,} to {max(seen):,}: scores compare whole runs, and"
            " curves what the same amount of training gave."
        )


def loss_of(record: RunRecord) -> str:
    """The loss of a run, in words: values of the same can be compared. "" for a run whose settings are unknown."""
    smoothing = float(record.settings.get("train.label_smoothing") or 0)
    smoothed = f", label smoothing {smoothing:g}" if smoothing else ""
    return f"{record.settings.get('train.loss', 'unknown')}{smoothed}" if record.settings else ""


def _by_value(records: Records, value: Callable[[RunRecord], Hashable]) -> dict[Hashable, list[str]]:
    """The names of the runs of each value, without those that have none."""
    found: dict[Hashable, list[str]] = {}
    for name, record in records.items():
        if of_run := value(record):
            found.setdefault(of_run, []).append(name)
    return found


def in_seeds(names: Sequence[str]) -> str:
    """Name of runs that differ only in their seed: the first one's, and their number."""
    return names[0] if len(names) == 1 else f"{names[0]} ({counted(len(names), 'seed')})"
