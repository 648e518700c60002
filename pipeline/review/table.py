"""One table of runs: a row for each run folder, which reports show and launch/compare.py writes as Parquet."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.base.words import on_one_line
from pipeline.checkpoint.store import Checkpoints
from pipeline.cluster.logged_models import logged_models
from pipeline.data.storage.bucket import to_path
from pipeline.monitor.run_page import TEACHER_TAG, ModelFacts
from pipeline.process.committed import checkpoints_of
from pipeline.review.record import RunRecord

# With fewer log lines the median speed says little, because the first ones are slow.
_MIN_SPEEDS = 5
# Settings that are names and places, not differences.
PLACES = ("name", "out", "track.uri", "launch.env")


def row(name: str, record: RunRecord) -> dict[str, Any]:
    """What is known of a run, by column; None for what is unknown. name: of the run in the table."""
    last, best, origin = record.last_score, record.best_score, record.origin
    train, held_out = record.dataset("training"), record.dataset("evaluation")
    weights, _ = weights_of(record)
    chosen = next((one for one in weights if "best" in one.roles), weights[-1] if weights else None)
    known: dict[str, Any] = {
        "run": name,
        "folder": str(record.folder),
        "mlflow_run_id": record.run_id,
        "kind": record.kind,
        "model": record.model,
        "data": record.data_name,
        "fingerprint": train and train.digest,
        "mixed_with": ", ".join(
            f"{one.name} {one.split} {one.digest}" for one in record.datasets if "share" in one.notes
        ),
        "excluded": record.parameters.get("excluded"),
        "evaluation_split": record.split,
        "evaluation_fingerprint": held_out and held_out.digest,
        "status": record.status,
        "outcome": record.outcome,
        "seed": record.settings.get("seed"),
        "steps": record.last_step,
        "planned_steps": record.steps,
        "images_seen": record.images_seen,
        "exaflops": record.exaflops,
        "images_per_second": median_speed(record),
        "training_seconds": record.training_seconds,
        "ranks": record.ranks,
        "device_seconds": record.training_seconds * record.ranks,
        "device": record.tags.get("device"),
        "revision": record.revision,
        "git_branch": record.tags.get("mlflow.source.git.branch"),
        "command": record.tags.get("mlflow.source.name"),
        "torch": record.tags.get("torch"),
        "user": record.tags.get("mlflow.user"),
        "ended": record.period[1],
        "parent": origin and origin.title,
        "parent_sha256": origin and origin.sha256,
        "teacher": record.tags.get(TEACHER_TAG),
        "weights_sha256": chosen and chosen.sha256,
        "score": last and last.name,
        "score_images": last and last.num_samples,
        "score_groups": last and last.effective < last.num_samples and last.effective,
    }
    for which, score in (("last", last), ("best", best)):
        interval = score and score.interval
        known |= {
            f"{which}_score": score and score.value,
            f"{which}_low": interval and interval.low,
            f"{which}_high": interval and interval.high,
            f"{which}_step": score and score.step,
        }
    measured = {"seed", "last_score", "best_score", "last_low", "best_low", "last_step", "best_step"}  # These may be 0.
    return {column: value if column in measured else value or None for column, value in known.items()}


def as_parquet(records: Mapping[str, RunRecord]) -> bytes:
    """A Parquet file of the rows, with each setting that differs (as text) and the last value of each metric."""
    differ = {key for alike in settings_of_kinds(records).values() for key, *_ in differences(alike)}
    metrics = {metric for record in records.values() for metric in record.metrics}
    rows = []
    for name, record in records.items():
        settings = {key: str(value) for key, value in settings_of(record).items() if key in differ}
        of_run = {
            **row(name, record),
            **{f"setting.{key}": settings.get(key) for key in sorted(differ)},
            **{
                f"metric.{key}": record.metrics[key].values[-1] if key in record.metrics else None
                for key in sorted(metrics)
            },
        }
        rows.append(
            {column: float(value) if isinstance(value, np.floating) else value for column, value in of_run.items()}
        )
    pq.write_table(pa.Table.from_pylist(rows), file := io.BytesIO())
    return file.getvalue()


def settings_of(record: RunRecord) -> dict[str, Any]:
    """The settings of a run other than names and places."""
    return {name: value for name, value in record.settings.items() if name not in PLACES}


def settings_of_kinds(records: Mapping[str, RunRecord]) -> dict[bool, dict[str, dict[str, Any]]]:
    """The settings of runs (True), and of evaluations and other reports (False), which have none of the settings of
    training.
    """
    found: dict[bool, dict[str, dict[str, Any]]] = {True: {}, False: {}}
    for name, record in records.items():
        found[record.has_all_settings][name] = settings_of(record)
    return found


def differences(values: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows (name, value in each run) of the values that differ. values: run -> name -> value."""
    keys = dict.fromkeys(key for of_run in values.values() for key in of_run)
    rows = [(key, *(str(of_run.get(key, "-")) for of_run in values.values())) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def median_speed(record: RunRecord) -> float:
    """Median training speed in images/s; 0 for fewer than five log lines."""
    speeds = record.metrics.get("images_per_second")
    return float(np.median(speeds.values)) if speeds and len(speeds) >= _MIN_SPEEDS else 0.0


def weights_of(record: RunRecord) -> tuple[list[ModelFacts], str]:
    """Returns (best, last and kept checkpoints of the run, oldest first; why there are none)."""
    folder = checkpoints_of(record.folder.resolve())
    if isinstance(folder, Path) and not folder.is_dir():
        return [], f"There is no checkpoint in {folder}."
    try:
        return logged_models(Checkpoints(to_path(str(folder))), ended=True), ""
    except (ValueError, OSError) as error:
        return [], f"The checkpoints cannot be read: {on_one_line(error)}"
