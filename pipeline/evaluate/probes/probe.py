"""Few-shot linear and kNN accuracy of extracted features, and their RankMe, exact on any number of ranks.

Shapes: m test samples, M labels of each, D features, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.architecture.pixels import Pixels
from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.metric import SPREAD
from pipeline.base.random_numbers import Purpose
from pipeline.base.trained_on import TrainedSet, trained_by
from pipeline.data.dataset.manifest import Dataset, Split
from pipeline.evaluate.classify import Features, extract, is_any, label_table
from pipeline.evaluate.intervals import effective_number, sample_deviation
from pipeline.evaluate.probes import fewshot
from pipeline.evaluate.probes.knn import knn_predict
from pipeline.evaluate.probes.rankme import spread
from pipeline.evaluate.split_reader import SplitReader
from pipeline.process.distributed import Ranks, StopRequest
from pipeline.settings.run import ProbeConfig, RunConfig

# Test samples per chunk: their scores for 21,843 classes take 180 MB.
_CHUNK = 1024


@dataclass(frozen=True)
class ProbeSamples:
    """The training samples that a probe needs. rows: int64, ascending. labels: int64, the class of each row.

    shots: (shots, seed) -> indices into rows. neighbours: indices into rows; empty without kNN.
    """

    rows: np.ndarray
    labels: np.ndarray
    shots: dict[tuple[int, int], np.ndarray]
    neighbours: np.ndarray
    num_classes: int


def choose_samples(config: ProbeConfig, train: Split, num_classes: int) -> ProbeSamples:
    """Choose the samples of a training split that a probe needs. The class of a sample is its first label."""
    labels, groups = label_table(train)[:, 0], train.groups
    wanted = sorted(set(config.shots) - {0})
    shots = {
        (k, seed): fewshot.choose_shots(labels, num_classes, k, seed, groups)
        for k in wanted
        for seed in range(config.shots_seeds)
    }
    neighbours = np.empty(0, np.int64)
    if config.neighbours:
        neighbours = np.flatnonzero(labels >= 0)
        if config.neighbour_images:
            chosen = random_numbers.permutation(len(neighbours), 0, Purpose.NEIGHBOUR_IMAGES)[: config.neighbour_images]
            neighbours = neighbours[np.sort(chosen)]
    rows = np.unique(np.concatenate([neighbours, *shots.values()]))
    places = {key: np.searchsorted(rows, chosen) for key, chosen in shots.items()}
    return ProbeSamples(rows, labels[rows], places, np.searchsorted(rows, neighbours), num_classes)


def probe(
    config: ProbeConfig,
    choice: ProbeSamples,
    train: Features,
    test: Features,
    test_labels: np.ndarray,
    ranks: Ranks,
    groups: np.ndarray | None = None,
) -> dict[str, Any]:
    """Returns {"fewshot": one row per number of shots and strength, "knn": {...}, absent if disabled}.

    Collective; the result is the same on every rank. train: features of choice.rows. test: features (m, D).
    test_labels: int64 (m, M); any of them is correct, -1 never is. groups: int64 (m,), of `Split.groups`. A row has
    shots, l2, top1 (mean over seeds, in [0, 1]), std (over seeds, n - 1; None for one seed), and top1_of_seeds. With
    groups, rows and kNN also have effective_images (`effective_number`). Unreadable images and non-finite features
    count as wrong in the test and are not used for training; a score is NaN if no training sample is left.
    """
    usable, seen = train.usable, test.usable
    labels = np.where(seen[:, None], test_labels, -1)
    values = np.where(seen[:, None], test.values, 0)

    of_rows = np.zeros(len(values), np.int64) if groups is None else groups
    sizes = np.bincount(of_rows)

    def count_right(score: Callable[..., np.ndarray] | None, *strength: float) -> np.ndarray:
        """How many samples of each group are right; without groups, of all together. score: features (m, D) and
        strength -> scores of the classes (m, K); None if no training sample is left.
        """
        if score is None:
            return np.full(len(sizes), np.nan)
        right = np.zeros(len(sizes))
        for first in range(ranks.rank * _CHUNK, len(values), ranks.world_size * _CHUNK):
            part = slice(first, first + _CHUNK)
            hits = is_any(score(values[part], *strength).argmax(1)[:, None], labels[part])[:, 0]
            right += np.bincount(of_rows[part], weights=hits, minlength=len(sizes))
        return np.array(ranks.sum(*right.tolist()))

    def effective(right: np.ndarray) -> dict[str, float]:
        return {} if groups is None or np.isnan(right).any() else {"effective_images": effective_number(right, sizes)}

    found: dict[str, Any] = {"fewshot": []}
    for shots in sorted({shots for shots, _ in choice.shots}):
        of_seeds = []
        for seed in range(config.shots_seeds):
            places = choice.shots[shots, seed]
            places = places[usable[places]]
            learnt = train.values[places], choice.labels[places]
            ridge = fewshot.fit(*learnt, choice.num_classes) if len(places) else None
            of_seeds.append([count_right(ridge, l2) for l2 in config.l2])
        for l2, rights in zip(config.l2, np.swapaxes(of_seeds, 0, 1), strict=True):
            column = (rights.sum(1) / len(values)).tolist()
            row = {"shots": shots, "l2": l2, "top1": float(np.mean(column)), "std": sample_deviation(column)}
            found["fewshot"].append({**row, "top1_of_seeds": column, **effective(rights.mean(0))})
    if len(choice.neighbours):
        places = choice.neighbours[usable[choice.neighbours]]
        features, classes = (torch.from_numpy(of[places]).to(ranks.device) for of in (train.values, choice.labels))

        def votes(part: np.ndarray) -> np.ndarray:
            tested = torch.from_numpy(part).to(ranks.device)
            settings = choice.num_classes, config.neighbours, config.temperature
            return knn_predict(features, classes, tested, *settings).cpu().numpy()

        right = count_right(votes if len(places) else None)
        found["knn"] = {
            "top1": float(right.sum()) / len(values),
            "neighbours": config.neighbours,
            "temperature": config.temperature,
            "images": len(places),
            **effective(right),
        }
    return found


def probe_metrics(scores: dict[str, Any], prefix: str) -> dict[str, float]:
    """Metrics of a probe's scores: <prefix>_5shot, _5shot_std, _20nn; with several strengths _5shot_l2_1024; rankme,
    feature_std.
    """
    rows = scores.get("fewshot", [])
    several = len({row["l2"] for row in rows}) > 1
    found = {f"{row['shots']}shot" + (f"_l2_{row['l2']:g}" if several else ""): row for row in rows}
    if "knn" in scores:
        found[f"{scores['knn']['neighbours']}nn"] = scores["knn"]
    if "linear" in scores:
        found["linear"] = scores["linear"]
    endings = {"": "top1", "_std": "std", "_effective_images": "effective_images"}
    metrics = {f"{prefix}_{name}{end}": of.get(key) for name, of in found.items() for end, key in endings.items()}
    metrics |= {name: value for name, value in scores.get("spread", {}).items() if name in SPREAD}
    # A file has None where there is no number.
    return {name: value for name, value in metrics.items() if value is not None}


def metrics_in_words(metrics: dict[str, float]) -> str:
    """`probe_metrics` as a log says them, without numbers of effective images."""
    told = {name: value for name, value in metrics.items() if not name.endswith("_effective_images")}
    return ", ".join(f"{name} {value:{'.4g' if name in SPREAD else '.2%'}}" for name, value in told.items())


def spread_rows(config: ProbeConfig, num_samples: int) -> np.ndarray:
    """Rows, int64, ascending, of the random images that RankMe is measured of, or all of a smaller split."""
    return np.sort(random_numbers.permutation(num_samples, 0, Purpose.named("rankme"))[: config.rankme_images])


@dataclass(frozen=True)
class LabelledProbe:
    """The splits of labelled images that a run's probe is fitted to and tested on. name: with which its metrics begin.
    fingerprint: of their data set.
    """

    name: str
    train: Split
    test: Split
    choice: ProbeSamples
    fingerprint: str


@dataclass(frozen=True)
class RunProbe:
    """The probe of a run in training. own: its training split, of which RankMe is measured. labelled: the main one
    first; empty if only RankMe is measured.
    """

    config: RunConfig
    own: Split
    labelled: tuple[LabelledProbe, ...]

    def trained_by(self, trained: Sequence[TrainedSet]) -> dict[str, str]:
        """Name of each probe whose tested split was trained on -> what the function of this name returns."""
        found = {one.name: trained_by(trained, one.fingerprint, one.test.name) for one in self.labelled}
        return {name: runs for name, runs in found.items() if runs}

    def scores(
        self, features: Callable[[Tensor], Tensor], ranks: Ranks, stop: StopRequest, pixels: Pixels
    ) -> dict[str, Any]:
        """Scores of `features` (images of a batch -> (B, D)) on the main data set, as `probe` returns them, with
        "num_samples" tested; as "also" those of each other data set by its name; and as "spread" what `spread` does.

        pixels: of the model.

        Collective; raises Stopped on all ranks.
        """
        config = self.config

        def read(split: Split, rows: np.ndarray) -> Features:
            return extract(features, SplitReader.of_run(config, split, ranks, pixels, stop), rows)

        def scores_of(one: LabelledProbe) -> dict[str, Any]:
            test, labels = one.test, label_table(one.test)
            learnt, tested = read(one.train, one.choice.rows), read(test, np.arange(len(test)))
            found = probe(config.probe, one.choice, learnt, tested, labels, ranks, test.groups)
            return found | {"num_samples": len(test)}

        found = scores_of(self.labelled[0]) if self.labelled else {}
        if others := {one.name: scores_of(one) for one in self.labelled[1:]}:
            found["also"] = others
        if config.probe.rankme_images:
            found["spread"] = spread(read(self.own, spread_rows(config.probe, len(self.own))))
        return found


def open_run_probe(
    config: RunConfig, own: Dataset, own_split: Split, datasets: dict[str, Dataset], pixels: Pixels
) -> RunProbe:
    """Open the probe of a run that has one. Raises UserError for data without samples.

    own, own_split: what the run trains on. datasets: what it is probed on, by the names of `RunProbeConfig.tested`;
    they have labels if the probe reads them. pixels: of the model.
    """
    settings, opened = config.probe, []
    for name, dataset in datasets.items() if settings.reads_labels else ():
        path, tested = settings.tested[name]
        pixels.reading(dataset.pixels, f"a model of data.path = {own.path}", f"probe.data = {dataset.path}")
        exclude = config.data.exclude if dataset is own else "all"  # Another data set has other lists.
        splits = []
        for setting, split in (("probe.train_split", settings.train_split), ("probe.split", tested)):
            try:
                splits.append(dataset.split(split, exclude))
            except UserError as error:
                raise type(error)(f"{setting} = {split}: {error}") from error
        train, test = splits
        choice = choose_samples(settings, train, dataset.num_classes)
        if not len(choice.rows) or not len(test) or not test.max_labels:
            empty = train if not len(choice.rows) else test
            raise UserError(
                f"{path or config.data.path}: split {empty.name!r} has no images with a class. Set probe.data to a"
                " data set with classes, or measure what needs none: probe.rankme_images=2048 probe.shots=0"
                " probe.neighbours=0."
            )
        opened.append(LabelledProbe(name, train, test, choice, dataset.fingerprint))
    return RunProbe(config, own_split, tuple(opened))
