"""What is known of one run. See reader.py for where it comes from.

Metrics have the names of metrics.jsonl: the groups by which MLflow shows them are taken off.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base import npz
from pipeline.base.metric import SPREAD, Metric, metric_of, score_of
from pipeline.base.trained_on import TRAINED_BY
from pipeline.evaluate.intervals import Interval, of_samples, of_seeds
from pipeline.experiment.score_table import OVERALL, UNPUBLISHED_TAG, Column, column_of
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.monitor.page_folder import FIGURES, PAGE, Start
from pipeline.monitor.run_page import PROBED_IMAGES, DatasetFacts, WeightsOrigin

PREDICTIONS = f"{PAGE}/predictions.npz"
ACCURACY = Metric("proportion", "higher")


@dataclass(frozen=True)
class Series:
    """One metric. steps: int64 (n,), ascending. values: float64 (n,). times: float64 (n,), seconds since 1970."""

    steps: np.ndarray
    values: np.ndarray
    times: np.ndarray

    @classmethod
    def of(cls, points: Sequence[tuple[int, float, int]]) -> "Series":
        """points: (step, value, milliseconds since 1970). Of the points of one step, the last counts."""
        steps = np.array([step for step, _, _ in points], np.int64)
        last = len(steps) - 1 - np.unique(steps[::-1], return_index=True)[1]
        values, times = (np.array([point[place] for point in points], np.float64)[last] for place in (1, 2))
        return cls(steps[last], values, times / 1000)

    def __len__(self) -> int:
        return len(self.steps)


def best_of(series: Series, metric: Metric) -> int:
    """The place of the best value; of the last one if none is finite."""
    values = np.where(np.isfinite(series.values), metric.sign * series.values, -np.inf)
    return int(np.argmax(values)) if np.isfinite(values).any() else len(series) - 1


def title_of(name: str) -> str:
    """A metric's name in words, without the split: "top-1", "patch rank"."""
    return {"top1": "top-1", "top5": "top-5", "rankme": "RankMe", "miou": "mIoU"}.get(name, name.replace("_", " "))


@dataclass(frozen=True)
class LastPredictions:
    """Content of predictions.npz: of the first n images of the evaluated split. All (n,).

    rows: int64, in the split. true, predicted: int64, -1 for no label, and for an unreadable image. groups: int64, of
    `Split.groups`; empty without. probability: float32, empty if it was not read.
    """

    rows: np.ndarray
    true: np.ndarray
    predicted: np.ndarray
    groups: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    probability: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))


def parse_predictions(content: bytes, where: str, *more: str) -> LastPredictions:
    """The content of predictions.npz, with the probability if `more` names it. Raises UserError for a damaged file."""
    return LastPredictions(
        **npz.read_arrays(content, where, ("rows", "true", "predicted", *more), optional=("groups",))
    )


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
        """Whether it is a proportion of images: such scores are tested for more than noise, and of others the mIoU
        alone.
        """
        return self.metric.unit == "proportion"

    def __str__(self) -> str:
        spread = f" [{100 * self.interval.low:.2f}, {100 * self.interval.high:.2f}]" if self.interval else ""
        return f"{self.metric.text(self.value)}{spread}"


def best_first(score: Score | None) -> float:
    """Sort key of scores, best first; None and NaN come last."""
    return -score.metric.sign * score.value if score and not math.isnan(score.value) else math.inf


@dataclass(frozen=True)
class RunRecord:
    """What is known of one run.

    kind: pretrain, finetune, grid, study, vtab, data or explain. settings: by dotted name, complete if the folder has a
    config.yaml (has_all_settings), else those that differ from the defaults; `model.*` is the architecture as built.
    parameters: what follows from the settings. origin: the weights that the run began with, as they were then; None for
    new ones. steps: planned ones. steps, images_per_step, flops_per_image: 0 for a run without steps. results: of a
    grid, a study or a sweep. num_damaged: lines of metrics.jsonl that could not be read. declared: what the run says of
    its metrics.
    """

    name: str
    kind: str
    folder: Path
    run_id: str | None = None
    status: str = ""
    outcome: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    has_all_settings: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: tuple[DatasetFacts, ...] = ()
    origin: WeightsOrigin | None = None
    steps: int = 0
    images_per_step: int = 0
    flops_per_image: float = 0.0
    starts: tuple[Start, ...] = ()
    results: dict[str, Any] = field(default_factory=dict)
    num_damaged: int = 0
    declared: dict[str, Metric] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Content of a text file in `page/`; "" if it is missing."""
        file = self.folder / PAGE / name
        return file.read_text(errors="replace").strip() if file.exists() else ""

    def figures(self) -> list[Path]:
        return sorted((self.folder / FIGURES).glob("*.png"))

    @cached_property
    def predictions(self) -> LastPredictions | None:
        """What the last evaluation predicted; None if that is not at hand. Raises UserError for a damaged file."""
        file = self.folder / PREDICTIONS
        return parse_predictions(file.read_bytes(), str(file)) if file.exists() else None

    # ------------------------------------------------------------------ data and model
    def dataset(self, context: str) -> DatasetFacts | None:
        """The data of a context, "training" or "evaluation"."""
        return next((facts for facts in self.datasets if facts.context == context), None)

    @property
    def data_name(self) -> str:
        """Name of the data that the run is about; "" if it is unknown."""
        if self.kind == "vtab":
            return "VTAB-1k"
        train = self.dataset("training")
        return train.name if train else self.tags.get("dataset") or Path(str(self.results.get("data", ""))).name

    @property
    def model(self) -> str:
        return str(self.settings.get("model.name") or self.tags.get("model") or "")

    @property
    def revision(self) -> str:
        """Commit of the code, with '+changes' if files differed from it."""
        changes = "+changes" if self.tags.get("mlflow.source.git.dirty") == "true" else ""
        return self.tags.get("mlflow.source.git.commit", "")[:12] + changes

    # ------------------------------------------------------------------ progress
    @cached_property
    def last_step(self) -> int:
        return max((int(series.steps[-1]) for series in self.metrics.values() if len(series)), default=0)

    @property
    def images_seen(self) -> int:
        return self.last_step * self.images_per_step

    @property
    def exaflops(self) -> float:
        return self.flops_until(self.last_step) / 1e18

    def flops_until(self, step: int) -> float:
        """FLOPs of training in the first `step` steps."""
        return self.images_per_step * (step * self.flops_per_image)

    @cached_property
    def training_seconds(self) -> float:
        """Seconds of training steps: without start-up, evaluation and saving. From the speed of each log line."""
        speed = self.metrics.get("images_per_second")
        if not speed or not self.images_per_step:
            return 0.0
        images = np.diff(speed.steps.astype(np.float64), prepend=0) * self.images_per_step
        return float(np.sum(np.divide(images, speed.values, out=np.zeros(len(speed)), where=speed.values > 0)))

    @property
    def ranks(self) -> int:
        return int(self.parameters.get("ranks", 0))

    @cached_property
    def period(self) -> tuple[float, float]:
        """Times of the first and the last record, seconds since 1970; (0, 0) without metrics."""
        times = np.concatenate([series.times for series in self.metrics.values()] or [np.zeros(1)])
        return float(times.min()), float(times.max())

    # ------------------------------------------------------------------ scores
    @cached_property
    def split(self) -> str:
        """Name of the split that the run is evaluated on, as its metrics begin."""
        if "data.eval_split" in self.settings:
            held_out = float(self.settings.get("data.dev_share") or 0)
            # Without a split of data.path, it is the first one of another set.
            others = (name.removesuffix("_num_samples") for name in self.declared if name.endswith("_num_samples"))
            return "dev" if held_out else str(self.settings["data.eval_split"]) or next(others, "")
        evaluated = self.dataset("evaluation")
        named = (name.removesuffix("_top1") for name in self.metrics if name.endswith("_top1"))
        return evaluated.split if evaluated else next(named, "")

    def metric(self, name: str) -> Metric:
        """The declaration of a metric of this run."""
        return metric_of(name, self.declared)

    @cached_property
    def held_out(self) -> list[str]:
        """Names of what was measured on the held-out split and has a direction, the most telling first."""
        known = (f"{self.split}_{name}" for name in ("top1", "top5", "loss"))  # A report declares nothing.
        order = dict.fromkeys([*self.declared, *known])
        measured = {name: self.metric(name) for name in order if name in self.metrics}
        return [name for name, metric in measured.items() if metric.group == "eval" and metric.better]

    @cached_property
    def probes(self) -> list[str]:
        """Names of the accuracies that probes measured: few-shot, then kNN."""
        probed = {name: metric for name in self.metrics if (metric := self.metric(name)).group == "probe"}
        return [name for name, metric in probed.items() if metric.better and metric.is_share]

    @property
    def scored_split(self) -> tuple[str, str]:
        """(data set, split) of a score that is the probe's of a run in training; ("", "") for scores on the run's
        evaluation split.
        """
        if self.kind == "evaluation":
            return "", ""
        data = self.settings.get("probe.data") or self.settings.get("data.path")
        return (str(data), str(self.settings.get("probe.split"))) if self.scored in self.probes else ("", "")

    @cached_property
    def scored(self) -> str:
        """The metric that is the score, "" without any."""
        return score_of({name: self.metric(name) for name in (*self.held_out, *self.probes)})

    @cached_property
    def further(self) -> dict[str, str]:
        """What figures show beside accuracy and losses, of the held-out split, the objective and probes: own name ->
        metric.
        """
        measured = {name.removeprefix(f"{self.split}_"): name for name in self.held_out}
        logged = [
            name
            for name, metric in self.declared.items()
            if name in self.metrics and (metric.group == "train" or name in SPREAD)
        ]
        found = measured | {name: name for name in (*self.probes, *logged)}
        return {own: name for own, name in found.items() if own not in ("top1", "top5", "loss")}

    def of_split(self, name: str) -> Series | None:
        """A metric of the held-out split by its name without the split, such as "top1"."""
        return self.metrics.get(f"{self.split}_{name}")

    def num_tested(self, name: str, step: int) -> int:
        """Number of images of which a metric was measured at this step; 0 if unknown."""
        if name in self.probes and self.kind != "evaluation":
            return int(self.parameters.get(PROBED_IMAGES, 0))
        evaluated = self.dataset("evaluation")
        return int(self._at(f"{self.split}_num_samples", step, evaluated.num_samples if evaluated else 0))

    def _at(self, name: str, step: int, otherwise: float) -> float:
        """The value of a metric at a step, `otherwise` where it has none."""
        series = self.metrics.get(name)
        return float(next(iter(series.values[series.steps == step]), otherwise)) if series else otherwise

    def score_at(self, number: int, name: str = "") -> Score:
        """The score of evaluation `number`, counted in the series of a metric. name: of it; default, `scored`."""
        name = name or self.scored
        series, metric = self.metrics[name], self.metric(name)
        step, value = int(series.steps[number]), float(series.values[number])
        num, is_proportion = self.num_tested(name, step), metric.unit == "proportion" or name in self.probes
        if name in self.probes and self.kind == "evaluation":  # Not tested for runs in training.
            metric = replace(metric, unit="proportion")
        effective = min(num, max(1.0, self._at(f"{name}_effective_images", step, num)))
        interval = of_samples(value, effective) if num and is_proportion and 0 <= value <= 1 else None
        own = title_of(name.removeprefix(f"{self.split}_"))
        facts = self.dataset("evaluation")
        trained = " (trained on)" * bool(facts and facts.notes.get(TRAINED_BY))
        title = title_of(name) if name in self.probes else f"{self.split}{trained} {own}"
        return Score(title, value, step, num, interval, metric, effective)

    @cached_property
    def last_score(self) -> Score | None:
        """The last score: of `scored`, over a grid's seeds, or over a sweep's tasks. None without one."""
        if self.scored:
            return self.score_at(-1)
        if self.kind == "vtab":
            return self._vtab_score()
        if "top1" in self.results or "top1" in self.metrics:
            return self._grid_score()
        return None

    @cached_property
    def best_score(self) -> Score | None:
        """The best score of all evaluations."""
        if not self.scored:
            return self.last_score
        return self.score_at(best_of(self.metrics[self.scored], self.metric(self.scored)))

    @cached_property
    def sweep(self) -> Column | None:
        """A sweep's scores by task; None for other runs, and where results.json is missing."""
        return column_of(self.name, self.results) if self.kind == "vtab" and "protocol" in self.results else None

    @property
    def seed_scores(self) -> list[float]:
        """The score of each seed of a grid, or of a sweep's tasks; empty for other runs and for a single seed."""
        if self.kind == "vtab" and "protocol" in self.results:
            by_seed: dict[int, list[float]] = {}
            for row in self.results.get("scores", []):
                by_seed.setdefault(row["seed"], []).append(row["accuracy"])
            means = [float(np.mean(of_seed)) for of_seed in by_seed.values() if len(of_seed) == len(TASKS)]
        else:
            means = [run["top1"] for run in self.results.get("runs", [])]
        return means if len(means) > 1 else []

    def _grid_score(self) -> Score:
        runs = [run["top1"] for run in self.results.get("runs", [])]
        if not runs:
            return Score("top-1", float(self.metrics["top1"].values[-1]))
        num, found = (self.results["runs"][0].get(name, 0) for name in ("num_samples", "effective_images"))
        effective = min(num, max(1, found or num))
        interval = of_seeds(runs, num) if len(runs) > 1 else of_samples(runs[0], effective) if num else None
        name = f"{self.results.get('split', '')} top-1".strip()
        return Score(name, float(np.mean(runs)), None, num, interval, effective=effective)

    def _vtab_score(self) -> Score | None:
        is_vtab = not (self.sweep.unpublished if self.sweep else self.tags.get(UNPUBLISHED_TAG))
        name = OVERALL if is_vtab else f"{OVERALL}, not all of the published files"
        if self.sweep and (mean := self.sweep.means.get(OVERALL)):
            return Score(name, mean.accuracy, None, mean.num_test, mean.interval)
        mean_metric = self.metrics.get("vtab_mean")
        return Score(name, float(mean_metric.values[-1])) if mean_metric else None
