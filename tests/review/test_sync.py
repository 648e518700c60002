"""Run folders are sent to MLflow afterwards: what a run could not send, or all of it to another store."""

import json
import os
import re
import shutil
import signal
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.base.errors import UserError
from pipeline.cluster.status_files import RunFolder, Status
from pipeline.monitor.export import ExportTiming
from pipeline.monitor.mlflow.connection import connect
from pipeline.monitor.run_page import DatasetFacts, RunFacts
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.review.sync import run
from pipeline.settings.commands.reports import SyncConfig
from pipeline.settings.run import TrackConfig

FAST = ExportTiming(poll=0.05, retry=(0.05,), finish=300)
DATA = DatasetFacts("photos", "/data/photos", "0123456789abcdef", "train", 900, 3, "training")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, database: Path, tmp_path: Path) -> None:
    for name in ("mlflow.db", "a/mlflow.db", "other.db"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(database, tmp_path / name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def trained(out: Path, name: str, status: str | None = "FINISHED", **settings: object) -> Tracker:
    facts = RunFacts(
        name,
        "pretrain",
        {"seed": 1},
        {"model": "ViT-Ti/16"},
        (DATA,),
        f"What {name} is.",
        steps=20,
        artifacts=("notes.txt",),
    )
    tracker = Tracker(TrackConfig(**settings), out, out / name, facts, 0, FAST)
    for step in range(1, 21):
        tracker.log(step, {"loss": 1 / step})
    (out / name / "notes.txt").write_text("A file.")
    figures = out / name / "page" / "figures"
    figures.mkdir()
    (figures / "loss.png").write_bytes(b"a picture")
    if status:
        tracker.finish(status, outcome="finished", result="**Result**: good.")
    return tracker


def page(uri: str, name: str) -> dict:
    """What a reviewer sees of a run."""
    client = connect(uri)
    (found,) = client.search_runs(["1"], f"attributes.run_name = '{name}'")
    run_id = found.info.run_id
    points = [(m.step, m.value) for m in client.get_metric_history(run_id, "train/loss")]
    tags = {k: v for k, v in found.data.tags.items() if k != "run_folder"}
    files = [
        file.path
        for folder in ("", "page", "page/figures")
        for file in client.list_artifacts(run_id, folder)
        if not file.is_dir
    ]
    inputs = [given.dataset.digest for given in found.inputs.dataset_inputs]
    return {
        "status": found.info.status,
        "params": found.data.params,
        "tags": tags,
        "points": points,
        "files": files,
        "data": inputs,
    }


def test_a_run_that_was_not_tracked_gets_the_page_of_one_that_was(tmp_path: Path) -> None:
    trained(tmp_path / "a", "run")
    trained(tmp_path / "b", "run", enabled=False)
    assert not (tmp_path / "b" / "mlflow.db").exists()
    run(SyncConfig(runs=[str(tmp_path / "b")]))  # A folder of runs.
    tracked, sent = page(default_uri(tmp_path / "a"), "run"), page(default_uri(tmp_path / "b"), "run")
    assert sent == tracked
    assert tracked["files"] == [
        "metrics.jsonl",
        "notes.txt",
        "run.json",
        "page/figures/loss.png",
    ]
    assert tracked["tags"]["mlflow.note.content"] == "**Result**: good.\n\nWhat run is."
    assert len(tracked["points"]) == 20


def test_the_rest_of_a_run_whose_server_was_away(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    away = "http://127.0.0.1:1"  # A port that no other test is given meanwhile.
    trained(tmp_path, "run", uri=away)
    assert "launch/track_sync.py" in capfd.readouterr().err
    # Without uri, it goes where the run was tracked: it went to runs/mlflow.db, and was said to be sent.
    with pytest.raises(UserError, match=rf"{away} cannot be reached .*The same command sends the rest"):
        run(SyncConfig(runs=[str(tmp_path / "run")]))
    uri = f"sqlite:///{tmp_path / 'other.db'}"
    for _ in range(2):  # Sending twice changes nothing.
        run(SyncConfig(runs=[str(tmp_path / "run")], uri=uri))
    assert len(page(uri, "run")["points"]) == 20
    assert page(uri, "run")["status"] == "FINISHED"


def test_a_damaged_run_does_not_keep_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c"):
        trained(tmp_path, name, enabled=False)
    damaged = tmp_path / "b" / "run.json"
    damaged.write_text(damaged.read_text()[:-10])
    with pytest.raises(UserError, match=r"^1 of 3 runs could not be read and sent, see above"):
        run(SyncConfig(runs=[str(tmp_path)]))
    assert f"{tmp_path / 'b'}: not sent: {damaged}" in capfd.readouterr().out
    assert [len(page(default_uri(tmp_path), name)["points"]) for name in ("a", "c")] == [20, 20]
    with pytest.raises(UserError, match=re.escape(str(damaged))):
        run(SyncConfig(runs=[str(tmp_path / "b")]))


def test_a_killed_run_is_said_to_be_killed(tmp_path: Path) -> None:
    tracker = trained(tmp_path, "run", status=None)  # As after SIGKILL: nothing is said any more.
    tracker._exports[0]._stop.set()
    tracker._exports[0].thread.join()
    (tmp_path / "run" / "status.json").write_text(json.dumps(asdict(Status("running", 18, -1, ""))))
    run(SyncConfig(runs=[str(tmp_path / "run")]))
    shown = page(default_uri(tmp_path), "run")
    assert shown["status"] == "FAILED"
    assert shown["tags"]["outcome"] == "killed, or lost with its host, at step 18 or later"


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, "run", enabled=False)
    holder = RunFolder(tmp_path / "run", 0)
    if (pid := os.fork()) == 0:  # A record lock does not keep its own process out.
        holder.lock()
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    try:
        run(SyncConfig(runs=[str(tmp_path / "run")]))
        assert "in use by host" in capsys.readouterr().out
        assert not (tmp_path / "run" / "mlflow.json").exists()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_mlflow_refuses_does_not_keep_the_rest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    facts = RunFacts("lr-0.003", "finetune", {"seed": 1, "what?": 2, "lr": 0.003})
    tracker = Tracker(TrackConfig(enabled=False), tmp_path, tmp_path / "lr-0.003", facts, 0, FAST)
    tracker.log(1, {"loss": 1.0})
    tracker.finish("FINISHED")
    run(SyncConfig(runs=[str(tmp_path / "lr-0.003")]))
    (shown,) = connect(default_uri(tmp_path)).search_runs(["1"])
    assert (shown.data.params, shown.data.metrics) == ({"seed": "1", "lr": "0.003"}, {"train/loss": 1.0})
    assert shown.info.status == "FINISHED"
    assert "parameter what?" in capfd.readouterr().err


def test_a_hidden_password_has_to_be_given_again(tmp_path: Path) -> None:
    trained(tmp_path, "run", enabled=False)
    (tmp_path / "run" / "mlflow.json").write_text('{"postgresql://me:***@host/db": {"run_id": "f00"}}')
    with pytest.raises(UserError, match="whose password is not kept: give uri="):
        run(SyncConfig(runs=[str(tmp_path / "run")]))
