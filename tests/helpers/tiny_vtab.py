"""Tiny weights and three of VTAB's tasks, for the tests of sweeps."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny import make_dataset

from pipeline import model as models
from pipeline.cluster.ray_tasks import RunJobs
from pipeline.data.storage.checksums import digest_of
from pipeline.experiment.vtab_cell import SweepJob, VtabCell
from pipeline.model.files import find_file
from pipeline.settings.commands.transfer import VtabConfig

PREPARED = ("dtd", "pets", "svhn")
_SPLITS = {"train800": 16, "val200": 5, "train800val200": 21, "test": 12}
SETTINGS = [
    "protocol.name=tiny",
    "protocol.image_size=8",
    "protocol.batch=16",
    "protocol.length=[2 steps]",
    "protocol.schedule.decay=cosine",
    "protocol.schedule.warmup=0 steps",
    "protocol.augment.crop=resize_crop",
    "protocol.augment.eval_crop=resize",
    "threads=1",
    "mlflow=none",
]


def prepare_tasks(folder: Path, names: Sequence[str]) -> None:
    """Writes the data sets of tasks, in folders of their names, as if they were made of all published files."""
    for seed, name in enumerate(names):
        file = make_dataset(folder / name, _SPLITS, seed=seed) / "dataset.json"
        about = json.loads(file.read_text())
        about["source"]["vtab"] = {"task": name, "published": True, "notes": []}
        del about["checksum"]  # Of the unchanged file.
        file.write_text(json.dumps(about))


def prepare(folder: Path) -> list[str]:
    """Writes weights and tasks into the folder. Returns the settings of a sweep but its learning rates."""
    models.save(
        models.create("ViT-mu/4", 8, 7),
        folder / "weights.pt",
        {"trained_on": [{"name": "photos", "fingerprint": "f" * 16, "split": "train"}]},
    )
    prepare_tasks(folder / "tasks", PREPARED)
    return [f"weights={folder / 'weights.pt'}", f"data={folder / 'tasks'}", *SETTINGS]


def job_of(cell: VtabCell, config: VtabConfig) -> SweepJob:
    """The job of a cell as a sweep makes it."""
    weights = find_file(Path(config.weights))
    return SweepJob(cell, replace(config, weights=str(weights)), digest_of(weights))


def run_here(
    function: Callable[[SweepJob], dict], jobs: Sequence[SweepJob], on_retry: object, on_failure: object
) -> Iterable[tuple[int, dict[str, Any]]]:
    """Runs cells one after another in this process: a `RunJobs`."""
    for number, job in enumerate(jobs):
        yield number, function(job)


def in_turn(outcome: Callable[[VtabCell], dict[str, Any] | str]) -> RunJobs:
    """Yields made-up outcomes; a text is the reason of a failure."""

    def run_cells(
        function: object,
        jobs: Sequence[SweepJob],
        on_retry: Callable[[str], None],
        on_failure: Callable[[int, str], None],
    ) -> Iterable[tuple[int, dict[str, Any]]]:
        for number, job in enumerate(jobs):
            found = outcome(job.cell)
            if isinstance(found, str):
                on_retry("It was killed.")
                on_failure(number, found)
            else:
                yield number, {"steps": 2, "num_images": 12, "seconds": 3.0, **found}

    return run_cells
