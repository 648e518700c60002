"""What is known of one run: `RunFacts` of its run.json, and what its other files say. Read from its folder, or from
what `mlflow artifacts download` made of it: these are files of the same names.

Metrics have the names of metrics.jsonl: the groups by which MLflow shows them are taken off.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from pipeline.base import json_record, npz
from pipeline.base.errors import UserError
from pipeline.base.metric import MAIN, Metric, probed_data, score_of, title_of
from pipeline.base.trained_on import TRAINED_BY
from pipeline.cluster.status_files import SETTINGS_FILE, holder, read_settings, read_status
from pipeline.evaluate.intervals import OVER_SAMPLES, Interval, of_samples, of_seeds
from pipeline.experiment.vtab_report import OVERALL, Column, column_of
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.monitor.export import run_id_of
from pipeline.monitor.metrics_file import METRICS_FILE, Record, by_name, read_metrics
from pipeline.monitor.page_folder import PAGE, RUN_FILE, PageFolder, RunFile, Start
from pipeline.monitor.run_page import PROBED_IMAGES, RunFacts
from pipeline.settings import schema

PREDICTIONS = f"{PAGE}/predictions.npz"
ACCURACY = Metric("proportion", "higher")
_MIN_LOGGED = 5
_RESULTS = "results.json"
# The status of run.json in the words of status.json, which reports and downloaded runs do not have.
_STATUS = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
# What only the results.json of one kind of run has.
_KIND_BY_RESULT = {"protocol": "vtab", "trials": "grid", "question": "study"}


@dataclass(frozen=True)
class Series:
    """One metric. steps: int64 (n,), ascending. values: float64 (n,)."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, points: Mapping[int, float]) -> "Series":
        """points: step -> value."""
        steps = sorted(points)
        return cls(np.array(steps, np.int64), np.array([points[step] for step in steps], np.float64))

    def __len__(self) -> int:
        return len(self.steps)


def best_of(series: Series, metric: Metric) -> int:
    """The place of the best value; of the last one if none is finite."""
    values = np.where(np.isfinite(series.values), metric.sign * series.values, -np.inf)
    return int(np.argmax(values)) if np.isfinite(values).any() else len(series) - 1


@dataclass(frozen=True)
class LastPredictions:
    """Content of predictions.npz, of a run that predicts classes: of the first n images of the evaluated split. All
    (n,).

    rows: int64, in the split. true, predicted: int64, -1 for no label, and for an unreadable image. probability,
    of_label: float32, of the predicted class and of the label. groups: int64, of `Split.groups`; empty without.
    """

    rows: np.ndarray
    true: np.ndarray
    predicted: np.ndarray
    probability: np.ndarray
    of_label: np.ndarray
    groups: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Of a run folder. Raises UserError for a damaged file."""
        file, (*names, groups) = folder / PREDICTIONS, [one.name for one in fields(cls)]
        return cls(**npz.read_arrays(file.read_bytes(), str(file), names, [groups]))


@dataclass(frozen=True)
class Score:
    """A score on held-out images. step: None if it has none. num_samples: 0 if unknown. effective: of images in groups,
    their `effective_number`, else num_samples.

    interval: at 95 %, of a proportion; None where the number of images is unknown.
    """

    name: str
    value: float
    step: int | None = None
    num_samples: int = 0
    interval: Interval | None = None
    metric: Metric = ACCURACY
    effective: float = 0

    @property
    def is_accuracy(self) -> bool:
        """Whether it is a proportion of images, each of which is right or wrong."""
        return self.metric.unit == "proportion"

    def __str__(self) -> str:
        interval = self.metric.interval_text(self.interval.low, self.interval.high) if self.interval else ""
        return f"{self.metric.text(self.value)}{interval}"


def best_first(score: Score) -> float:
    """Sort key of scores, best first; NaN comes last."""
    return math.inf if math.isnan(score.value) else -score.metric.sign * score.value


@dataclass(frozen=True, kw_only=True)
class RunRecord(RunFacts):
    """What is known of one run. tags: also those of its end.

    settings: by dotted name, complete if the folder has a config.yaml (has_all_settings), else those that differ from
    the defaults; `model.*` is the architecture as built. split: name of the split that the run is evaluated on, as its
    metrics begin. period: times of the first and the last record, seconds since 1970; (0, 0) without metrics. results:
    of a grid, a study or a sweep. num_damaged: lines of metrics.jsonl that could not be read.
    """

    folder: Path
    run_id: str | None
    status: str
    outcome: str
    settings: dict[str, Any]
    has_all_settings: bool
    split: str
    series: dict[str, Series]
    period: tuple[float, float]
    starts: tuple[Start, ...]
    results: dict[str, Any]
    num_damaged: int

    # ------------------------------------------------------------------ data and model
    @property
    def data_name(self) -> str:
        """Name of the data that the run is about; "" if it is unknown."""
        if self.kind == "vtab":
            return "VTAB-1k"
        train = self.dataset("training")
        return train.name if train else self.tags.get("dataset") or Path(str(self.results.get("data", ""))).name

    @property
    def model_name(self) -> str:
        return str(self.settings.get("model.name") or self.tags.get("model") or "")

    @property
    def revision(self) -> str:
        """Commit of the code, with '+changes' if files differed from it."""
        changes = "+changes" if self.tags.get("mlflow.source.git.dirty") == "true" else ""
        return self.tags.get("mlflow.source.git.commit", "")[:12] + changes

    # ------------------------------------------------------------------ progress
    @cached_property
    def last_step(self) -> int:
        return max((int(series.steps[-1]) for series in self.series.values()), default=0)

    @property
    def images_seen(self) -> int:
        return self.last_step * self.images_per_step

    @cached_property
    def training_seconds(self) -> float:
        """Seconds of training steps: without start-up, evaluation and saving. From the speed of each log line."""
        if (speed := self.series.get("images_per_second")) is None:
            return 0.0
        images = np.diff(speed.steps.astype(np.float64), prepend=0) * self.images_per_step
        return float(np.sum(np.divide(images, speed.values, out=np.zeros(len(speed)), where=speed.values > 0)))

    def median(self, name: str) -> float | None:
        """Median of a metric over the log lines; None for fewer than five, because the first ones are slow."""
        series = self.series.get(name)
        return float(np.nanmedian(series.values)) if series and len(series) >= _MIN_LOGGED else None

    # ------------------------------------------------------------------ scores
    @cached_property
    def held_out(self) -> list[str]:
        """Names of what was measured on the held-out split and has a direction, the most telling first."""
        known = (f"{self.split}_{name}" for name in (*MAIN, "top1", "top5", "loss"))  # A report declares nothing.
        measured = {name: self.metric(name) for name in dict.fromkeys([*self.metrics, *known]) if name in self.series}
        return [name for name, metric in measured.items() if metric.group == "eval" and metric.better]

    @cached_property
    def probes(self) -> list[str]:
        """Names of the accuracies that probes measured: few-shot, then kNN."""
        return [name for name in self.series if (metric := self.metric(name)).group == "probe" and metric.is_share]

    @cached_property
    def scored(self) -> str:
        """The metric that is the score, "" without any."""
        return score_of({name: self.metric(name) for name in (*self.held_out, *self.probes)})

    @property
    def scored_split(self) -> tuple[str, str]:
        """(data set, split) of a score that is the probe's of a run in training; ("", "") for scores on the run's
        evaluation split.
        """
        if self.kind == "evaluation" or self.scored not in self.probes:
            return "", ""
        data, split = (str(self.settings.get(f"probe.{name}", "")).partition(",")[0] for name in ("data", "split"))
        return data or str(self.settings.get("data.path")), split

    def _at(self, name: str, step: int, otherwise: float) -> float:
        """The value of a metric at a step, `otherwise` where it has none."""
        series = self.series.get(name)
        return float(next(iter(series.values[series.steps == step]), otherwise)) if series else otherwise

    def score_at(self, number: int, name: str) -> Score:
        """The score of evaluation `number` by a metric, counted in its series."""
        series, metric, is_probe = self.series[name], self.metric(name), name in self.probes
        step, value, evaluated = int(series.steps[number]), float(series.values[number]), self.dataset("evaluation")
        if is_probe and self.kind != "evaluation":
            num = int(self.parameters.get(f"{PROBED_IMAGES}_{probed_data(name)}", 0))
        else:
            num = int(self._at(f"{self.split}_num_samples", step, evaluated.num_samples if evaluated else 0))
        if is_probe and self.kind == "evaluation":  # Not tested for runs in training.
            metric = replace(metric, unit="proportion")
        effective = min(num, max(1.0, self._at(f"{name}_effective_images", step, num)))
        is_proportion = (is_probe or metric.unit == "proportion") and 0 <= value <= 1
        interval = of_samples(value, effective) if num and is_proportion else None
        low, high = (self._at(f"{name}_{end}", step, math.nan) for end in ("low", "high"))
        if not math.isnan(low):
            interval = Interval(low, high, OVER_SAMPLES)
        trained = " (trained on)" * bool(evaluated and evaluated.notes.get(TRAINED_BY))
        own = title_of(name.removeprefix(f"{self.split}_"))
        title = title_of(name) if is_probe else f"{self.split}{trained} {own}"
        return Score(title, value, step, num, interval, metric, effective)

    @cached_property
    def last_score(self) -> Score | None:
        """The last score: of `scored`, else over a sweep's tasks or a grid's seeds. None without one."""
        if self.scored:
            return self.score_at(-1, self.scored)
        if self.sweep:
            mean = self.sweep.means.get(OVERALL)
            name = f"{OVERALL}, not all of the published files" if self.sweep.unpublished else OVERALL
            return Score(name, mean.accuracy, None, mean.num_test, mean.interval) if mean else None
        if not (tops := self.seed_scores):
            return None
        num, effective = (self.results["runs"][0].get(name, 0) for name in ("num_samples", "effective_images"))
        effective = effective or num
        interval = of_seeds(tops, num) if len(tops) > 1 else of_samples(tops[0], effective) if num else None
        name = f"{self.results.get('split', '')} top-1".strip()
        return Score(name, float(np.mean(tops)), None, num, interval, effective=effective)

    @cached_property
    def best_score(self) -> Score | None:
        """The best score of all evaluations."""
        if not self.scored:
            return self.last_score
        return self.score_at(best_of(self.series[self.scored], self.metric(self.scored)), self.scored)

    @cached_property
    def sweep(self) -> Column | None:
        """A sweep's scores by task; None for other runs, and where results.json is missing."""
        return column_of(self.name, self.results) if "protocol" in self.results else None

    @cached_property
    def seed_scores(self) -> list[float]:
        """The score of each seed of a grid, or of a sweep's tasks; empty for other runs."""
        by_seed: dict[int, list[float]] = {}
        for row in self.results.get("scores", ()):
            by_seed.setdefault(row["seed"], []).append(row["accuracy"])
        means = [float(np.mean(of_seed)) for of_seed in by_seed.values() if len(of_seed) == len(TASKS)]
        return means or [run["top1"] for run in self.results.get("runs", ())]


# ---------------------------------------------------------------------- reading it
def from_folder(folder: Path) -> RunRecord:
    """The record of the folder of a run, a grid, a sweep or a report. Raises UserError for a folder that is none, and
    for a damaged file in one line.
    """
    # A run in progress writes metrics, then how it ended, and leaves its folder last. Read in the other order, the end
    # that is found has its metrics, and is that of a run that was killed only if it was.
    is_free = False
    with contextlib.suppress(OSError):  # The lock may be unreadable (another user's run): only the status is known.
        is_free = holder(folder) is None
    status = read_status(folder)
    word, outcome = (status.status, status.reason or status.status) if status else ("", "")
    if word == "running" and is_free:
        word, outcome = "killed", "ended without a word: killed, or its host was lost"
    results: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        results = json_record.readable(json_record.read(folder / _RESULTS, dict[str, Any]))
    saved = PageFolder(folder).saved()
    if saved is None:  # A grid or a sweep that was not tracked.
        if not results:
            raise UserError(
                f"{folder} is not the folder of a run, or of an experiment that has ended: {RUN_FILE} and {_RESULTS}"
                " are missing."
            )
        kind = next((kind for name, kind in _KIND_BY_RESULT.items() if name in results), "")
        saved = RunFile("", RunFacts(str(results.get("name") or folder.resolve().name), kind))
    facts, tags = saved.facts, saved.facts.all_tags() | (saved.end.tags if saved.end else {})
    if not word and saved.end:
        word = "diverged" if tags.get("outcome", "").startswith("diverged") else _STATUS[saved.end.status]
    records, num_damaged = list[Record](), 0
    with contextlib.suppress(FileNotFoundError):
        records, num_damaged = read_metrics(folder / METRICS_FILE)
    series = {name: Series.of(points) for name, points in by_name(records).items()}
    times = [record.time / 1000 for record in records] or [0.0]
    settings, evaluated = dict(facts.parameters), facts.dataset("evaluation")
    splits = [evaluated.split] if evaluated else [name[:-5] for name in series if name.endswith("_top1")]
    if has_all_settings := (folder / SETTINGS_FILE).exists():
        config = read_settings(folder)
        splits = config.data.evaluated
        built = {name: value for name, value in facts.parameters.items() if name.startswith("model.")}
        found = schema.flatten(schema.to_dict(config))
        settings = {name: value for name, value in found.items() if not built or not name.startswith("model.")} | built
    return RunRecord(
        **{**vars(facts), "tags": tags},
        folder=folder,
        run_id=run_id_of(folder),
        status=word or "finished",
        outcome=tags.get("outcome", outcome or word or "finished"),
        settings=settings,
        has_all_settings=has_all_settings,
        split=next(iter(splits), ""),
        series=series,
        period=(min(times), max(times)),
        starts=saved.starts,
        results=results,
        num_damaged=num_damaged,
    )
