"""A sweep as the command runs it: all 19 tasks from original files to results."""

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vtab_originals import Truth

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.cluster import ray_tasks
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.storage.checksums import digest_of
from pipeline.experiment import vtab
from pipeline.experiment.vtab import protocol_sha256
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.model.files import find_file
from pipeline.settings import schema
from pipeline.settings.commands.transfer import VtabConfig

TINY = [
    "protocol.name=tiny",
    "protocol.image_size=8",
    "protocol.batch=16",
    "protocol.length=[2 steps]",
    "protocol.lr=[0.1]",
    "protocol.schedule.decay=cosine",
    "protocol.schedule.warmup=0 steps",
    "protocol.augment.crop=resize_crop",
    "protocol.augment.eval_crop=resize",
    "threads=1",
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, vtab_tasks: tuple[Path, Truth]) -> list[str]:
    """The settings that name a tiny run's weights and the 19 tasks."""
    run = tmp_path_factory.mktemp("runs") / "pretrained"
    step = run / "checkpoints" / "step-00000007"
    step.mkdir(parents=True)
    models.save(
        models.create("ViT-mu/4", 8, 7),
        step / "model.safetensors",
        {"trained_on": [{"name": "photos", "fingerprint": "f" * 16, "split": "train"}]},
    )
    (run / "checkpoints" / "latest").write_text(step.name)
    (run / "mlflow.json").write_text(json.dumps({"sqlite:///there.db": {"run_id": "abc123"}}))
    return [f"weights={run}", f"data={vtab_tasks[0] / 'out'}", *TINY]


def sweep(folder: Path, settings: Sequence[str], *more: str) -> dict[str, Any]:
    results = vtab.run(schema.load(VtabConfig, None, [*settings, f"out={folder}", "mlflow=none", *more]))
    assert json.loads((folder / "results.json").read_text()) == results
    return results


@pytest.fixture(scope="module")
def all_tasks(tmp_path_factory: pytest.TempPathFactory, prepared: list[str]) -> Path:
    """The folder of a sweep of all 19 tasks; tests must not change it."""
    folder = tmp_path_factory.mktemp("sweep") / "out"
    sweep(folder, prepared)
    return folder


def test_all_19_tasks_from_original_files_to_results(
    all_tasks: Path, prepared: list[str], vtab_tasks: tuple[Path, Truth]
) -> None:
    results = json.loads((all_tasks / "results.json").read_text())
    weights = find_file(Path(prepared[0].partition("=")[2]))
    assert [row["task"] for row in results["scores"]] == [task.name for task in TASKS]
    assert results["checkpoint"] == {"path": str(weights), "sha256": digest_of(weights), "run_id": "abc123"}
    assert (results["method"], results["failed"], results["missing"]) == ("finetune", [], [])
    protocol = schema.load(VtabConfig, None, prepared).protocol
    assert results["protocol"] == {"name": "tiny", "sha256": protocol_sha256(protocol), **schema.to_dict(protocol)}
    for row, task in zip(results["scores"], TASKS, strict=True):
        dataset = open_dataset(vtab_tasks[0] / "out" / task.name)
        assert results["data"][task.name] == dataset.fingerprint
        assert row["num_test"] == dataset.info["samples"]["test"]
        assert 0 <= row["accuracy"] <= 1
        assert (row["accuracy"] * row["num_test"]) % 1 == pytest.approx(0, abs=1e-9)
        assert {name: row[name] for name in ("seed", "learning_rate", "weight_decay", "steps", "val_accuracy")} == {
            "seed": 0,
            "learning_rate": 0.1,
            "weight_decay": 0.0,
            "steps": 2,
            "val_accuracy": None,
        }
    assert len(list((all_tasks / "cells").iterdir())) == len(TASKS)
    assert not (all_tasks / "progress.json").exists()


def test_a_task_that_fails_is_told_and_the_others_go_on(ray_cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_tasks, "RETRY_PAUSES", [0.0] * 3)

    def work(number: int) -> int:
        if number == 1:
            raise UserError("repair it")
        if number == 2:
            raise RuntimeError("out of\nmemory")
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    retried: list[str] = []
    failed: dict[int, str] = {}
    found = dict(ray_tasks.run_tasks(work, range(6), retried.append, failed.__setitem__, limit=2))
    assert found == {0: 0, 4: 4, 5: 5}
    assert failed[1] == "repair it"
    assert failed[2] == "RuntimeError: out of memory"
    assert re.search(r"gave up on a task after 3 retries: .*died.*use fewer tasks at a time", failed[3])
    assert len(retried) == 6
