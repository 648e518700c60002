"""One table of runs: a row for each run folder, which reports show and launch/compare.py writes as Parquet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.base.words import on_one_line
from pipeline.checkpoint.store import Checkpoints
from pipeline.cluster.logged_models import logged_models
from pipeline.data.storage.bucket import to_path
from pipeline.experiment.table import as_parquet
from pipeline.monitor.run_page import TEACHER_TAG, ModelFacts
from pipeline.process.committed import checkpoints_of
from pipeline.review.record import RunRecord

# Settings that are names and places, not differences.
PLACES = ("name", "out", "track.uri")
# Columns that are tags of the run.
_TAGS = {
    "git_branch": "mlflow.source.git.branch",
    "command": "mlflow.source.name",
    "torch": "torch",
    "device": "device",
    "user": "mlflow.user",
}


def row(name: str, record: RunRecord) -> dict[str, dict[str, Any]]:
    """What is known of a run, by section of a page and column; None for what is unknown. name: of the run in the
    table.
    """
    last, best, origin = record.last_score, record.best_score, record.origin
    train, held_out = record.dataset("training"), record.dataset("evaluation")
    ranks = int(record.parameters.get("ranks", 0))
    weights, _ = weights_of(record)
    chosen = max(reversed(weights), key=lambda one: "best" in one.roles, default=None)
    mixed = (f"{one.name} {one.split} {one.digest}" for one in record.datasets if "share" in one.notes)
    known: dict[str, dict[str, Any]] = {
        "": {
            "run": name,
            "folder": str(record.folder),
            "mlflow_run_id": record.run_id,
            "outcome": record.outcome,
            "training_seconds": record.training_seconds,
            "ended": record.period[1],
            "weights_sha256": chosen and chosen.sha256,
            "score": last and last.name,
            "score_images": last and last.num_samples,
            "score_groups": last and last.effective < last.num_samples and last.effective,
        },
        "Runs": {
            "kind": record.kind,
            "model": record.model_name,
            "data": record.data_name,
            "status": record.status,
            "steps": record.last_step,
            "planned_steps": record.steps,
            "images_seen": record.images_seen,
            "exaflops": record.axes(record.last_step).get("exaflops"),
            "images_per_second": record.median("images_per_second"),
            "device_seconds": record.training_seconds * ranks,
        },
        "Data": {
            "fingerprint": train and train.digest,
            "mixed_with": ", ".join(mixed),
            "excluded": record.parameters.get("excluded"),
            "evaluation_split": record.split,
            "evaluation_fingerprint": held_out and held_out.digest,
            "parent": origin and origin.title,
            "parent_sha256": origin and origin.sha256,
            "teacher": record.tags.get(TEACHER_TAG),
        },
        "Code": {
            "revision": record.revision,
            **{column: record.tags.get(tag) for column, tag in _TAGS.items()},
            "ranks": ranks,
        },
    }
    known = {section: {column: value or None for column, value in of.items()} for section, of in known.items()}
    known[""]["seed"] = record.settings.get("seed")
    for which, score in (("last", last), ("best", best)):
        interval = score and score.interval
        known[""] |= {
            f"{which}_score": score and score.value,
            f"{which}_low": interval and interval.low,
            f"{which}_high": interval and interval.high,
            f"{which}_step": score and score.step,
        }
    return known


def parquet(records: Mapping[str, RunRecord]) -> bytes:
    """A Parquet file of the runs, with each setting that differs (as text) and the last value of each metric."""
    settings = settings_that_differ(records)
    differ = sorted({key for of_run in settings.values() for key in of_run})
    metrics = sorted({metric for record in records.values() for metric in record.series})
    rows = []
    for name, record in records.items():
        last = {metric: float(series.values[-1]) for metric, series in record.series.items()}
        rows.append(
            {column: value for of in row(name, record).values() for column, value in of.items()}
            | {f"setting.{key}": settings[name].get(key) for key in differ}
            | {f"metric.{metric}": last.get(metric) for metric in metrics}
        )
    return as_parquet(rows)


def settings_that_differ(records: Mapping[str, RunRecord]) -> dict[str, dict[str, str]]:
    """Run -> its settings that differ among runs, or among evaluations and other reports, which have none of those of
    training. Names and places are left out.
    """
    kinds: dict[bool, dict[str, dict[str, Any]]] = {}
    for name, record in records.items():
        kinds.setdefault(record.has_all_settings, {})[name] = record.settings
    differ = {key for alike in kinds.values() for key, *_ in differences(alike)} - set(PLACES)
    return {
        run: {key: str(of[key]) for key in of if key in differ} for alike in kinds.values() for run, of in alike.items()
    }


def differences(values: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows (name, value in each run) of the values that differ. values: run -> name -> value."""
    keys = dict.fromkeys(key for of_run in values.values() for key in of_run)
    rows = [(key, *(str(of_run.get(key, "-")) for of_run in values.values())) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def weights_of(record: RunRecord) -> tuple[list[ModelFacts], str]:
    """Returns (best, last and kept checkpoints of the run, oldest first; why there are none)."""
    folder = checkpoints_of(record.folder.resolve())
    if isinstance(folder, Path) and not folder.is_dir():
        return [], f"There is no checkpoint in {folder}."
    try:
        return logged_models(Checkpoints(to_path(str(folder))), ended=True), ""
    except (ValueError, OSError) as error:
        return [], f"The checkpoints cannot be read: {on_one_line(error)}"
