"""A sweep: all 19 tasks from original files to results, and the same results however often it was killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
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
from pipeline.errors import UserError
from pipeline.model.files import find_file
from pipeline.transfer import vtab
from pipeline.transfer.vtab import protocol_sha256
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
    models.save(models.create("ViT-mu/4", 8, 7), step / "model.pt", {"fingerprint": "f" * 16})
    (run / "checkpoints" / "latest").write_text(step.name)
    (run / "mlflow.json").write_text(json.dumps({"sqlite:///there.db": {"run_id": "abc123"}}))
    return [f"weights={run}", f"data={vtab_tasks[0] / 'out'}", *TINY]


def sweep(folder: Path, settings: Sequence[str], *more: str) -> dict[str, Any]:
    config = schema.load(VtabConfig, None, [*settings, *more])
    results = vtab.run(config, folder, partial(on_ray, config))
    assert results is not None
    assert json.loads((folder / "results.json").read_text()) == results
    return results


def refused(folder: Path, settings: Sequence[str], *more: str) -> str:
    with pytest.raises(UserError) as error:
        sweep(folder, settings, *more)
    assert "\n" not in str(error.value)
    return str(error.value)


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
    assert results["checkpoint"] == {"path": str(weights), "sha256": vtab.file_sha256(weights), "run_id": "abc123"}
    assert (results["method"], results["failed"], results["missing"]) == ("finetune", [], [])
    assert results["contamination"] == dict.fromkeys(results["data"])
    protocol = schema.load(VtabConfig, None, prepared).protocol
    assert results["protocol"] == {
        "name": "tiny", "sha256": protocol_sha256(protocol), **schema.to_dict(protocol)
    }  # fmt: skip
    for row, task in zip(results["scores"], TASKS, strict=True):
        dataset = vtab.open_dataset(vtab_tasks[0] / "out" / task.name)
        assert results["data"][task.name] == dataset.fingerprint
        assert row["num_test"] == dataset.info["samples"]["test"]
        assert 0 <= row["accuracy"] <= 1
        assert (row["accuracy"] * row["num_test"]) % 1 == pytest.approx(0, abs=1e-9)
        assert {name: row[name] for name in ("seed", "learning_rate", "weight_decay", "steps", "val_accuracy")} == {
            "seed": 0, "learning_rate": 0.1, "weight_decay": 0.0, "steps": 2, "val_accuracy": None
        }  # fmt: skip
    assert len(list((all_tasks / "cells").iterdir())) == len(TASKS)
    assert not (all_tasks / "progress.json").exists()


def run_nowhere(*_: object) -> Iterable[tuple[int, dict[str, Any]]]:
    raise AssertionError("a cell that is done is run again")


def test_what_is_done_is_not_run_again_and_another_sweep_is_refused(
    all_tasks: Path, prepared: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (all_tasks / "results.json").read_bytes()
    config = schema.load(VtabConfig, None, prepared)
    vtab.run(config, all_tasks, run_nowhere)
    assert (all_tasks / "results.json").read_bytes() == before
    assert "19 cells, 19 of them done before" in capsys.readouterr().out

    said = refused(all_tasks, prepared, "protocol.lr=[0.2]", "precision=bf16")
    assert "holds another sweep: protocol.sha256 was " in said
    assert "protocol.lr was [0.1], is [0.2]" in said
    assert "precision was fp32, is bf16" in said
    assert "method was finetune, is knn" in refused(all_tasks, prepared, "method=knn")
    models.save(models.create("ViT-mu/4", 8, 7, seed=1), tmp_path / "other.pt")
    assert "checkpoint_sha256 was " in refused(all_tasks, prepared, f"weights={tmp_path / 'other.pt'}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert "is not empty (it holds thesis.tex), and holds no sweep" in refused(tmp_path / "mine", prepared)
    assert (all_tasks / "results.json").read_bytes() == before

    # A file that is not what was written there is no outcome.
    cell = next((all_tasks / "cells").glob("dtd-*"))
    content = cell.read_bytes()
    cell.write_bytes(content[:40])
    with pytest.raises(AssertionError, match="run again"):
        vtab.run(config, all_tasks, run_nowhere)
    cell.write_bytes(content)


def test_the_plan_counts_cells_and_work(
    all_tasks: Path, prepared: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = schema.load(
        VtabConfig, None, [*prepared, "plan=true", "tasks=[svhn,dtd]", "seeds=[0,1]", "protocol.lr=[0.1,0.01]"]
    )
    vtab.run(config, all_tasks, run_nowhere)
    printed = capsys.readouterr().out
    flops = models.training_flops_per_image(models.read_weights(config.weights)[0])
    (row,) = [line.split() for line in printed.splitlines() if line.startswith("DTD")]
    # 2 settings on train800, 2 seeds on the 1,000, 2 steps of 16 each; 5 and 12 images scored.
    assert row == ["DTD", "8", "2", "2", "0", "128", "34", f"{flops * (128 + 34 / 3) / 1e15:,.1f}"]
    assert "8 cells, 0 of them done; " in printed
    assert "Protocol tiny (" in printed


def test_tasks_that_are_not_prepared_are_named(
    prepared: list[str], vtab_tasks: tuple[Path, Truth], tmp_path: Path
) -> None:
    (tmp_path / "some").mkdir()
    for name in ("svhn", "eurosat"):
        (tmp_path / "some" / name).symlink_to(vtab_tasks[0] / "out" / name)
    some = f"data={tmp_path / 'some'}"
    results = sweep(tmp_path / "out", prepared, some, "method=linear")
    assert [row["task"] for row in results["scores"]] == ["svhn", "eurosat"]
    assert results["missing"] == [task.name for task in TASKS if task.name not in ("svhn", "eurosat")]
    assert {type(row["l2"]) for row in results["scores"]} == {float}
    said = refused(tmp_path / "out", prepared, some, "tasks=[svhn,dtd]")
    assert said.endswith("/some/dtd: no such data set. Make it with launch/vtab_prepare.py tasks=[dtd] ...")
    assert "there is no task 'cifar'. There are: caltech101, cifar100" in refused(tmp_path, prepared, "tasks=[cifar]")
    assert "no such data set" in refused(tmp_path, prepared, f"data={tmp_path / 'nowhere'}")
    assert "copy the tasks' data sets to a disk" in refused(tmp_path, prepared, "data=s3://bucket/vtab")
    assert "2 steps, but a training of 2 steps has 2" in refused(tmp_path, prepared, "protocol.schedule.warmup=2 steps")


def in_turn(
    outcome: Callable[[vtab.Cell], dict[str, Any] | str],
) -> vtab.RunCells:
    """Runs cells that are not computed: what `outcome` says becomes of each, an outcome or a failure."""

    def run(
        function: Callable[..., dict], jobs: Sequence[vtab.Job], on_retry: Callable, on_failure: Callable
    ) -> Iterable[tuple[int, dict[str, Any]]]:
        assert json.loads((vtab.output(jobs[0].config) / "progress.json").read_text())["cells"] > 0
        for number, job in enumerate(jobs):
            found = outcome(job.cell)
            if isinstance(found, str):
                on_retry("It was killed.")
                on_failure(number, found)
            else:
                yield number, {"steps": 2, "num_images": 10, "seconds": 1.0, **found}

    return run


def test_the_best_setting_is_chosen_and_a_failed_cell_loses_nothing_else(
    prepared: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    config = schema.load(
        VtabConfig, None,
        [*prepared, f"out={out}", "tasks=[dtd,pets,svhn]", "seeds=[4,5]", "protocol.lr=[0.1,0.01,0.001]", "protocol.weight_decay=[0,0.1]"],
    )  # fmt: skip
    ran: list[str] = []

    def outcome(cell: vtab.Cell) -> dict[str, Any] | str:
        ran.append(vtab.cell_name(cell))
        assert cell.setting is not None
        if cell.stage == "search":
            assert cell.seed == 4
            if cell.task.name == "svhn" and cell.setting == vtab.settings_of(config.protocol)[3] and "svhn" in broken:
                return "no space left"
            best = {"dtd": 0.01, "pets": 0.1, "svhn": 0.001}[cell.task.name]
            tie = cell.task.name == "pets" and cell.setting.lr == 0.01
            return {"accuracy": 0.9 if cell.setting.lr == best or tie else 0.5}
        if (cell.task.name, cell.seed) == ("dtd", 5) and "dtd" in broken:
            return "it burst"
        return {"accuracy": 0.7}

    broken = {"svhn", "dtd"}
    with pytest.raises(
        UserError, match=r"2 of 24 cells failed, such as svhn-search-lr0.01-wd0.1-2_steps-seed4: no space left"
    ):
        vtab.run(config, out, in_turn(outcome))
    results = json.loads((out / "results.json").read_text())
    assert [(row["task"], row["seed"], row["learning_rate"], row["weight_decay"], row["val_accuracy"]) for row in results["scores"]] == [
        ("dtd", 4, 0.01, 0.0, 0.9), ("pets", 4, 0.01, 0.0, 0.9), ("pets", 5, 0.01, 0.0, 0.9)
    ]  # fmt: skip
    assert [(row["task"], row["seed"], row["reason"]) for row in results["failed"]] == [
        ("dtd", 5, "it burst"), ("svhn", 4, "no space left")
    ] or [(row["task"], row["reason"]) for row in results["failed"]] == [("svhn", "no space left"), ("dtd", "it burst")]  # fmt: skip
    printed = capsys.readouterr()
    assert "FAILED: DTD, final, lr 0.01, weight decay 0, 2 steps, seed 5: it burst" in printed.out
    assert "SVHN          no score" in printed.out
    assert "It was killed. The cell is run again" in printed.err

    ran.clear()
    broken.clear()
    done = vtab.run(config, out, in_turn(outcome))
    assert ran == [
        "svhn-search-lr0.01-wd0.1-2_steps-seed4", "dtd-final-lr0.01-wd0.0-2_steps-seed5",
        "svhn-final-lr0.001-wd0.0-2_steps-seed4", "svhn-final-lr0.001-wd0.0-2_steps-seed5",
    ]  # fmt: skip
    assert done is not None
    assert done["failed"] == []
    assert len(done["scores"]) == 6


def test_copies_that_dedup_marked_are_told(prepared: list[str], all_tasks: Path, tmp_path: Path) -> None:
    data = json.loads((all_tasks / "results.json").read_text())["data"]
    trained = [*prepared, f"pretrained_on={tmp_path}", "tasks=[dtd,pets]"]
    assert "Make it with launch/dedup.py" in refused(tmp_path / "out", trained)
    report = {"data": {"fingerprint": "f" * 16}, "marked": True, "against": [
        {"name": "dtd:test", "fingerprint": data["dtd"], "copies": 3}, {"name": "dtd:val200", "fingerprint": data["dtd"], "copies": 9}]}  # fmt: skip
    (tmp_path / "dedup").mkdir()
    (tmp_path / "dedup" / "report.json").write_text(json.dumps(report))
    config = schema.load(VtabConfig, None, [*trained, f"out={tmp_path / 'out'}"])
    results = vtab.run(config, tmp_path / "out", in_turn(lambda cell: {"accuracy": 0.5}))
    assert results is not None
    assert results["contamination"] == {"dtd": 3, "pets": None}
    report["data"] = {"fingerprint": "0" * 16}
    (tmp_path / "dedup" / "report.json").write_text(json.dumps(report))
    assert "but the weights were trained on ffffffffffffffff" in refused(tmp_path / "out", trained)


def test_killed_workers_and_drivers_change_no_byte(
    prepared: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*prepared, "tasks=[dtd,svhn,eurosat]", "protocol.lr=[0.1,0.01]", "protocol.length=[150 steps]"]
    sweep(tmp_path / "whole", settings)
    out = tmp_path / "killed"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment["RAY_memory_monitor_refresh_ms"] = "0"
    with open(tmp_path / "said", "w+") as said:
        command = [sys.executable, "launch/vtab.py", *settings, f"out={out}"]
        driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT)
        family = {}

        def until(what: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 240
            while not what():
                assert driver.poll() is None, f"finished before it could be killed: {(tmp_path / 'said').read_text()}"
                assert time.monotonic() < deadline
                for process in psutil.Process(driver.pid).children(recursive=True):
                    family[process.pid] = process
                time.sleep(0.01)

        def at_work() -> list[psutil.Process]:
            found = []
            for process in family.values():
                with contextlib.suppress(psutil.Error):
                    if process.cmdline()[0].startswith("ray::run_cell"):
                        found.append(process)
            return found

        until(lambda: len(list(out.glob("cells/[!.]*.json"))) >= 1 and len(at_work()) > 0)
        at_work()[0].kill()
        until(lambda: "The cell is run again" in (tmp_path / "said").read_text())
        until(lambda: len(list(out.glob("cells/[!.]*.json"))) >= 4)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        psutil.wait_procs(family.values(), timeout=30)
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("cells/[!.]*")}
    assert 4 <= len(kept) < 9
    assert not (out / "results.json").exists()
    # What a kill in the middle of a write leaves.
    (out / "cells" / ".dtd-final.json.tmp").write_text("{")

    capsys.readouterr()
    sweep(out, settings)
    assert f"9 cells, {len(kept)} of them done before" in capsys.readouterr().out
    assert (out / "results.json").read_bytes() == (tmp_path / "whole" / "results.json").read_bytes()
    assert all((out / "cells" / name).stat().st_mtime_ns == written for name, written in kept.items())


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
