"""A sweep as the command runs it: all 19 tasks from original files to results, and the same however often it is killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from vtab_originals import Truth

from data_tools import cluster
from launch.vtab import on_ray
from pipeline import model as models
from pipeline import schema
from pipeline.data.manifest import file_sha256, open_dataset
from pipeline.errors import UserError
from pipeline.model.files import find_file
from pipeline.transfer import vtab
from pipeline.transfer.sweep import protocol_sha256
from pipeline.transfer.vtab_tasks import TASKS
from pipeline.transfer_config import VtabConfig

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "protocol.name=tiny", "protocol.image_size=8", "protocol.batch=16", "protocol.length=[2 steps]", "protocol.lr=[0.1]",
    "protocol.schedule.decay=cosine", "protocol.schedule.warmup=0 steps", "protocol.augment.crop=resize_crop",
    "protocol.augment.eval_crop=resize", "threads=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, vtab_tasks: tuple[Path, Truth]) -> list[str]:
    """The settings that name a tiny run's weights and the 19 tasks."""
    run = tmp_path_factory.mktemp("runs") / "pretrained"
    step = run / "checkpoints" / "step-00000007"
    step.mkdir(parents=True)
    models.save_safetensors(models.create("ViT-mu/4", 8, 7), step / "model.safetensors", {"fingerprint": "f" * 16})
    (run / "checkpoints" / "latest").write_text(step.name)
    (run / "mlflow.json").write_text(json.dumps({"sqlite:///there.db": {"run_id": "abc123"}}))
    return [f"weights={run}", f"data={vtab_tasks[0] / 'out'}", *TINY]


def sweep(folder: Path, settings: Sequence[str], *more: str) -> dict[str, Any]:
    config = schema.load(VtabConfig, None, [*settings, *more])
    results = vtab.run(config, folder, partial(on_ray, config))
    assert results is not None
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
    assert results["checkpoint"] == {"path": str(weights), "sha256": file_sha256(weights), "run_id": "abc123"}
    assert (results["method"], results["failed"], results["missing"]) == ("finetune", [], [])
    assert results["contamination"] == dict.fromkeys(results["data"])
    protocol = schema.load(VtabConfig, None, prepared).protocol
    assert results["protocol"] == {
        "name": "tiny", "sha256": protocol_sha256(protocol), **schema.to_dict(protocol)
    }  # fmt: skip
    for row, task in zip(results["scores"], TASKS, strict=True):
        dataset = open_dataset(vtab_tasks[0] / "out" / task.name)
        assert results["data"][task.name] == dataset.fingerprint
        assert row["num_test"] == dataset.info["samples"]["test"]
        assert 0 <= row["accuracy"] <= 1
        assert (row["accuracy"] * row["num_test"]) % 1 == pytest.approx(0, abs=1e-9)
        assert {name: row[name] for name in ("seed", "learning_rate", "weight_decay", "steps", "val_accuracy")} == {
            "seed": 0, "learning_rate": 0.1, "weight_decay": 0.0, "steps": 2, "val_accuracy": None
        }  # fmt: skip
    assert len(list((all_tasks / "cells").iterdir())) == len(TASKS)
    assert not (all_tasks / "progress.json").exists()


def test_killed_workers_and_drivers_change_no_byte(
    prepared: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*prepared, "tasks=[dtd,svhn]", "protocol.lr=[0.1,0.01]", "protocol.length=[100 steps]"]
    sweep(tmp_path / "whole", settings)
    out, said = tmp_path / "killed", tmp_path / "said"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment["RAY_memory_monitor_refresh_ms"] = "0"
    with open(said, "w") as file:
        command = [sys.executable, "launch/vtab.py", *settings, f"out={out}"]
        driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    family = psutil.Process(driver.pid)

    def wait_until(what: Callable[[], bool], pause: float) -> None:
        while not what():
            assert driver.poll() is None, f"finished before it could be killed: {said.read_text()}"
            time.sleep(pause)

    def cells() -> list[Path]:
        return [*out.glob("cells/[!.]*.json")]

    def a_worker_died() -> bool:
        """Kills one in the middle of a cell; another one, if that cell came to its end all the same."""
        if "The cell is run again" in said.read_text():
            return True
        for process in family.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "ray::run_cell" in " ".join(process.cmdline()):
                    process.kill()
                    time.sleep(3)
                    break
        return False

    wait_until(lambda: len(cells()) >= 1, pause=0.02)
    wait_until(a_worker_died, pause=0.02)
    wait_until(lambda: len(cells()) >= 2, pause=0.02)
    workers = family.children(recursive=True)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    psutil.wait_procs(workers, timeout=30)
    kept = {path: path.stat().st_mtime_ns for path in cells()}
    assert 2 <= len(kept) < 6
    assert not (out / "results.json").exists()
    # What a kill in the middle of a write leaves.
    (out / "cells" / ".dtd-final.json.tmp").write_text("{")

    capsys.readouterr()
    sweep(out, settings)
    assert f"6 cells, {len(kept)} of them done before" in capsys.readouterr().out
    assert (out / "results.json").read_bytes() == (tmp_path / "whole" / "results.json").read_bytes()
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())


def test_a_task_that_fails_is_told_and_the_others_go_on(ray_cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_PAUSES", (0.0, 0.0, 0.0))

    def work(number: int) -> int:
        if number == 1:
            raise UserError("mend it")
        if number == 2:
            raise RuntimeError("out of\nmemory")
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    retried: list[str] = []
    failed: dict[int, str] = {}
    found = dict(cluster.run_tasks(work, range(6), 2, retried.append, failed.__setitem__))
    assert found == {0: 0, 4: 4, 5: 5}
    assert failed[1] == "mend it"
    assert failed[2] == "RuntimeError: out of memory"
    assert "gave up on a task after 3 retries" in failed[3]
    assert len(retried) == 6
    assert cluster.room(1, 0.25) == (2, 0.0)
    with pytest.raises(UserError, match="threads = 3, but no node of this cluster has so many CPUs: 2 at most"):
        cluster.room(3, 0.25)
