"""Declares the metrics of a run: kept with the run, and read by everything that shows them.

A run's declarations are in its run.json. So a name that no reader
has heard of is checked, grouped, ranked and drawn like any other.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

# Sections of MLflow's page, and the beginning of a metric's name there. "eval": on held-out images; "train": of the
# training steps.
GROUPS = ("train", "eval", "probe", "speed", "health")
# proportion: number of images with a property, such as a right prediction, over all; it has an interval. share: another
# value in [0, 1]. loss: compares only with those of the same objective. "": any number; the others are not negative.
UNITS = ("proportion", "share", "loss", "count", "ratio", "seconds", "GiB", "images/s", "")


@dataclass(frozen=True)
class Metric:
    """unit: one of UNITS. better: "higher", "lower", or "" where neither is. group: one of GROUPS, or "" for none."""

    unit: str = ""
    better: str = ""
    group: str = ""

    @property
    def is_share(self) -> bool:
        """Whether it is in [0, 1], and is shown in per cent."""
        return self.unit in ("proportion", "share")

    @property
    def sign(self) -> int:
        """Factor that makes higher values better: 1 or -1."""
        return -1 if self.better == "lower" else 1

    def text(self, value: float) -> str:
        """A value as reports show it."""
        if self.is_share:
            return f"{100 * value:.2f} %"
        if self.unit == "loss":
            return f"{value:.4f}"
        return f"{value:,.0f}" if self.unit == "count" and math.isfinite(value) else f"{value:,.4g}"

    def interval_text(self, low: float, high: float) -> str:
        """An interval, to follow a value in reports."""
        return f" [{', '.join(f'{100 * end:.2f}' if self.is_share else self.text(end) for end in (low, high))}]"


_TITLES = {
    "top1": "top-1",
    "top5": "top-5",
    "rankme": "RankMe",
    "miou": "mIoU",
    "map": "mAP",
    "r2": "R²",
    "rmse": "RMSE",
    "mae": "MAE",
    "spearman": "Spearman",
}
# Scores of the head that are more telling than its accuracy, where they are measured.
MAIN = ("map", "r2")
# The accuracy of a probe: data, number and kind, and the strength if there are several.
_PROBE = re.compile(r"(?:(.+)_)?(?:(\d+)(nn|shot)(?:_l2_(.+))?|linear)")
# Metrics of a probe that need no labels.
SPREAD = {"rankme": Metric("", "higher", "probe"), "feature_std": Metric(group="probe")}
# Metrics of reports and the training loop, which are not declared. The first matching pattern counts.
_KNOWN = {
    "loss": Metric("loss", "lower", "train"),
    **dict.fromkeys(("lr", "grad_norm", "epoch", "images_seen", "exaflops"), Metric(group="train")),
    "images_per_second": Metric("images/s", "higher", "speed"),
    "mfu": Metric("ratio", "higher", "speed"),
    "data_wait": Metric("ratio", "lower", "speed"),
    "peak_memory_gib": Metric("GiB", "lower", "speed"),
    **dict.fromkeys(("time_*", "checkpoint_*_seconds"), Metric(group="speed")),
    **dict.fromkeys(
        ("skipped_steps", "loss_spikes", "bad_samples", "storage_retries"), Metric("count", "lower", "health")
    ),
    **dict.fromkeys(("collapse", "probe_collapse"), Metric("count", "lower", "health")),  # 1, at steps that show one.
    **SPREAD,
    **dict.fromkeys(("top1", "vtab_mean"), Metric("proportion", "higher")),
    "best_score": Metric("share", "higher"),  # In studies.
    "*_effective_images": Metric("count", "", "eval"),
    **dict.fromkeys(("*_low", "*_high"), Metric(group="eval")),  # The ends of a score's interval.
    **dict.fromkeys(("*_r2", "*_spearman"), Metric("", "higher", "eval")),
    **dict.fromkeys(("*_rmse", "*_mae"), Metric("", "lower", "eval")),
    **dict.fromkeys(("*_[0-9]*shot_std", "*_[0-9]*shot_l2_*_std"), Metric(group="probe")),
    **dict.fromkeys(
        ("*_[0-9]*shot", "*_[0-9]*shot_l2_*", "*_[0-9]*nn", "*_linear"), Metric("share", "higher", "probe")
    ),
    **dict.fromkeys(("*_top1", "*_top5"), Metric("proportion", "higher", "eval")),
    **dict.fromkeys(
        ("*_color_accuracy", "*_macro_*", "*_miou", "*_map", "*_label_f1"),
        Metric("share", "higher", "eval"),
    ),
    "*_loss": Metric("loss", "lower", "eval"),
    **dict.fromkeys(("*_num_samples", "*_num_unreadable"), Metric("count", "", "eval")),
}


def metric_of(name: str, declared: Mapping[str, Metric] | None = None) -> Metric:
    """The metric of a name in metrics.jsonl. declared: by the run. An undeclared name is a number without a
    group.
    """
    if declared and name in declared:
        return declared[name]
    return next((metric for pattern, metric in _KNOWN.items() if fnmatchcase(name, pattern)), Metric())


def title_of(name: str) -> str:
    """A metric's name in words, without the split: "top-1", "patch rank", "kNN of pets (k = 20)"."""
    if (probe := _PROBE.fullmatch(name)) is None:
        score, _, target = name.partition("_")  # "r2_age", of one target of several.
        return f"{_TITLES[score]}{target and f' of {target}'}" if score in _TITLES else name.replace("_", " ")
    data, number, kind, strength = probe.groups()
    of_data = f" of {data}" if data else ""
    if kind == "nn":
        return f"kNN{of_data} (k = {number})"
    shots = f" ({number} shots{f', l2 = {strength}' if strength else ''})" if number else ""
    return f"linear probe{of_data}{shots}"


def probed_data(name: str) -> str | None:
    """The data set, or split of the run's own, that a probe's accuracy is of; None for other metrics."""
    return probe[1] if (probe := _PROBE.fullmatch(name)) else None


def kind_of(name: str) -> str:
    """The kind of a score, of which there is one column each in MLflow, because an accuracy of nearest neighbours does
    not compare with one of a head: "knn", "linear", "miou" or one of MAIN; "" for top-1 and its means.
    """
    if probe := _PROBE.fullmatch(name):
        return "knn" if probe[3] == "nn" else "linear"
    return next((kind for kind in ("miou", *MAIN) if f"_{name}".endswith(f"_{kind}")), "")


def score_of(metrics: Mapping[str, Metric]) -> str:
    """The metric that is a run's score: of the held-out split but its losses, else a probe's accuracy, kNN before
    few-shot, else a loss. Of probes of several data sets, the first counts.

    metrics: what the run measures, the most telling first; few-shot before kNN. "" if none says how good a run is.
    Losses of different objectives do not compare, and an objective without labels has no accuracy of its own.
    """
    held_out = [name for name, metric in metrics.items() if metric.group == "eval" and metric.better]
    probes = [name for name, metric in metrics.items() if metric.group == "probe" and metric.better and metric.is_share]
    told = [name for name in held_out if metrics[name].unit != "loss"]
    main = [name for name in probes if probed_data(name) == probed_data(probes[0])]
    return next(iter([*told, *reversed(main), *held_out]), "")
