"""A sweep as the command runs it: all 19 tasks from original files to results, and the same however often it is
killed.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import ROOT
from vtab_originals import Truth

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.cluster import ray_tasks
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.storage.checksums import digest_of
from pipeline.experiment import engine, vtab
from pipeline.experiment.vtab import protocol_sha256
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.model.files import find_file
from pipeline.process.launcher import free_port
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
    config = schema.load(VtabConfig, None, [*settings, *more])
    results = vtab.run_sweep(config, folder, engine.on_ray(config.threads, config.gpu_share, config.num_tasks)[0])
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


@pytest.fixture
def job_cluster(tmp_path: Path) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """A Ray that takes jobs, as `ray start` makes it, and the environment in which `ray job submit` finds it."""
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_raylet_start_wait_time_s": "300",
    }
    port, log = free_port(), tmp_path / "ray.log"
    # A folder of its own, or other Rays of this machine would take it for theirs; names of sockets must be short.
    folder = tempfile.mkdtemp(prefix="ray")
    command = ["ray", "start", "--head", "--block", "--port=0", "--num-cpus=2", "--node-ip-address=127.0.0.1"]
    command += [f"--temp-dir={folder}"]
    command += [f"--dashboard-port={port}", "--dashboard-agent-listen-port=0", "--object-store-memory=100000000"]
    command += ["--no-monitor", "--include-log-monitor=false"]  # Nothing here uses them.
    with open(log, "w") as file:
        head = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    family = psutil.Process(head.pid)
    try:
        while "Ray runtime started" not in log.read_text():
            assert head.poll() is None, log.read_text()
            time.sleep(0.1)
        yield family, {**environment, "RAY_ADDRESS": f"http://127.0.0.1:{port}"}
    finally:
        processes = [*family.children(recursive=True), family]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        head.wait()
        psutil.wait_procs(processes, timeout=300)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_job_whose_driver_is_killed_changes_no_byte(
    prepared: list[str],
    job_cluster: tuple[psutil.Process, dict[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = [*prepared, "tasks=[dtd,svhn]", "protocol.lr=[0.1,0.01]", "protocol.length=[100 steps]"]
    sweep(tmp_path / "whole", settings)
    family, environment = job_cluster
    out, said, checkout = tmp_path / "killed", tmp_path / "said", tmp_path / "checkout"
    for name in ("launch", "pipeline", "data_tools"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    submit = ["ray", "job", "submit", "--working-dir", ".", "--", "python", "launch/vtab.py", *settings, f"out={out}"]
    with open(said, "w") as file:
        job = subprocess.Popen(submit, cwd=checkout, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def wait_until(what: Callable[[], Any]) -> Any:
        while not (found := what()):
            assert job.poll() is None, f"ended before it could be killed: {said.read_text()}"
            time.sleep(0.02)
        return found

    def cells() -> list[Path]:
        return [*out.glob("cells/[!.]*.json")]

    def processes_of(title: str) -> list[psutil.Process]:
        found = []
        for process in family.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if title in " ".join(process.cmdline()):
                    found.append(process)
        return found

    # One stands still, so that not all are done before the driver is killed.
    halted = wait_until(lambda: processes_of("ray::run_cell"))[0]
    halted.suspend()
    wait_until(cells)
    drivers = processes_of("launch/vtab.py")
    assert drivers, "it has a cell to finish"
    for process in [*drivers, halted]:
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends what is left when the first of them is gone.
            process.kill()
    assert job.wait(timeout=300) != 0
    kept = {path: path.stat().st_mtime_ns for path in cells()}
    assert 1 <= len(kept) < 6
    # What a kill in the middle of a write leaves.
    (out / "cells" / ".dtd-final.json.tmp").write_text("{")

    capsys.readouterr()
    sweep(out, settings)
    assert f"6 runs, {len(kept)} of them done" in capsys.readouterr().out
    assert (out / "results.json").read_bytes() == (tmp_path / "whole" / "results.json").read_bytes()
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())


def test_a_task_that_fails_is_told_and_the_others_go_on(ray_cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_tasks.tasks, "RETRY_PAUSES", [0.0] * 3)

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
