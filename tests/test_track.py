"""MLflow never delays a step, and gets every metric once: now, or when it is back."""

import contextlib
import json
import math
import os
import shutil
import socket
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from pipeline import track
from pipeline.config import TrackConfig
from pipeline.track import Tracker, default_uri, send_report

PARAMETERS = {f"section.field{i}": i for i in range(120)} | {"long": "x" * 9000, "nothing": None}


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store, made once: making the tables takes MLflow many seconds."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def out(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs with a store in it."""
    monkeypatch.setattr(track, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(track, "_RETRY_SECONDS", (0.05,))
    shutil.copy(database, tmp_path / "mlflow.db")
    return tmp_path


def start(out: Path, uri: str = "", enabled: bool = True, **parameters: object) -> Tracker:
    config = TrackConfig(uri=uri, enabled=enabled)
    return Tracker(config, out, out / "run", "run", {**PARAMETERS, **parameters}, {"data": "abc"})


def closed_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def client(out: Path, uri: str = ""):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri or default_uri(out))


def runs(out: Path, uri: str = "") -> list:
    found = client(out, uri)
    experiment = found.get_experiment_by_name("vit")
    return found.search_runs([experiment.experiment_id]) if experiment else []


def history(out: Path, name: str, uri: str = "") -> list[tuple[int, float]]:
    (run,) = runs(out, uri)
    return [(m.step, m.value) for m in client(out, uri).get_metric_history(run.info.run_id, name)]


def written(out: Path) -> list[dict]:
    def strict(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [
        json.loads(line, parse_constant=strict) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def test_everything_arrives_in_one_run_over_two_lives(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = start(out)
    for step in range(1, 701):  # more than a batch
        tracker.log(step, {"loss": 1 / step, "lr": step * 1e-6})
    (out / "run" / "config.json").write_text("{}")
    tracker.artifact(out / "run" / "config.json")
    tracker.artifact(out / "run" / "scores.json")  # There are none yet.
    tracker.finish("FAILED")
    (run,) = runs(out)
    assert run.info.status == "FAILED"
    assert run.data.params["section.field7"] == "7"
    assert len(run.data.params) == len(PARAMETERS)
    assert run.data.params["long"] == "x" * 6000
    assert run.data.tags["data"] == "abc"
    assert len(run.data.tags["git_revision"]) >= 7
    # Beside the database, and not in whatever folder the command was started in.
    assert [path.name for path in (out / "mlartifacts").rglob("*.json")] == ["config.json"]

    # A later life may have other settings; MLflow keeps the first ones.
    tracker = start(out, added=1, **{"section.field7": 8})
    for step in range(701, 711):
        tracker.log(step, {"loss": 1 / step, "lr": step * 1e-6})
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(step, 1 / step) for step in range(1, 711)]
    assert len(history(out, "lr")) == 710
    (run,) = runs(out)
    assert run.info.status == "FINISHED"
    assert [line["step"] for line in written(out)] == list(range(1, 711))
    assert "warning" not in capfd.readouterr().err


def test_metrics_arrive_while_the_run_goes_on(out: Path) -> None:
    tracker = start(out)
    tracker.log(1, {"loss": 2.0})
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (runs(out) and runs(out)[0].data.metrics):
        time.sleep(0.1)
    assert history(out, "loss") == [(1, 2.0)]
    assert runs(out)[0].info.status == "RUNNING"
    tracker.finish("FINISHED")


def test_nothing_is_sent_twice(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    sent: list[tuple[str, int]] = []
    log_batch = MlflowClient.log_batch

    def remember(self, run_id, metrics=(), **others):
        sent.extend((m.key, m.step) for m in metrics)
        return log_batch(self, run_id, metrics=metrics, **others)

    monkeypatch.setattr(MlflowClient, "log_batch", remember)
    for life in range(3):
        tracker = start(out)
        for step in range(10 * life, 10 * life + 10):
            tracker.log(step, {"loss": 1.0})
            time.sleep(0.01)
        tracker.finish("FINISHED")
    assert sent == [("loss", step) for step in range(30)]


def test_an_absent_server_delays_nothing_and_loses_nothing(
    out: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = closed_port()
    tracker = start(out, uri=uri)
    slowest = 0.0
    for step in range(100):
        begin = time.perf_counter()
        tracker.log(step, {"loss": float(step)})
        slowest = max(slowest, time.perf_counter() - begin)
        time.sleep(0.005)
    begin = time.perf_counter()
    tracker.finish("FINISHED")
    assert time.perf_counter() - begin < 10
    assert slowest < 0.05
    said = capfd.readouterr().err
    assert said.count("cannot be reached") == 1
    assert "the rest goes with the next start" in said
    assert len(written(out)) == 100

    # The server is back under the same name: here, a store that the client takes for it.
    from mlflow import tracking

    real = tracking.MlflowClient
    monkeypatch.setattr(tracking, "MlflowClient", lambda tracking_uri: real(default_uri(out)))
    tracker = start(out, uri=uri)
    tracker.log(100, {"loss": 100.0})
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(step, float(step)) for step in range(101)]


def test_a_server_that_answers_slowly_does_not_hold_up_the_end(
    out: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(track, "_FINISH_SECONDS", 0.3)
    monkeypatch.setattr(Tracker, "_send", lambda self: time.sleep(3))
    tracker = start(out)
    begin = time.perf_counter()
    tracker.log(1, {"loss": 1.0})
    tracker.finish("FINISHED")
    assert time.perf_counter() - begin < 2
    assert "does not have all of" in capfd.readouterr().err
    assert len(written(out)) == 1


def test_a_store_on_a_full_disk_gets_the_rest_when_there_is_room(
    out: Path, database: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A real small file system; needs root to mount it."""
    disk = out / "disk"
    disk.mkdir()
    size = database.stat().st_size + 2**20
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        shutil.copy(database, disk / "mlflow.db")
        uri = f"sqlite:///{disk / 'mlflow.db'}"
        tracker = start(out, uri=uri)
        tracker.log(0, {"loss": 0.0})
        tracker.finish("FINISHED")
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1024))
        tracker = start(out, uri=uri)
        slowest = 0.0
        for step in range(1, 40):
            begin = time.perf_counter()
            tracker.log(step, {f"metric{i}": float(step) for i in range(50)} | {"loss": float(step)})
            slowest = max(slowest, time.perf_counter() - begin)
        tracker.finish("FINISHED")
        assert slowest < 0.05
        assert "disk is full" in capfd.readouterr().err
        assert len(written(out)) == 40
        (disk / "filler").unlink()
        tracker = start(out, uri=uri)
        tracker.finish("FINISHED")
        assert history(out, "loss", uri) == [(step, float(step)) for step in range(40)]
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_each_tracking_uri_has_its_own_cursor(out: Path, database: Path) -> None:
    shutil.copy(database, out / "other.db")
    other = f"sqlite:///{out / 'other.db'}"
    for step, uri in enumerate(["", other, "", other]):
        tracker = start(out, uri=uri)
        tracker.log(step, {"loss": float(step)})
        tracker.finish("FINISHED")
    # One run in each store; each has what was logged until it was last used.
    assert history(out, "loss") == [(step, float(step)) for step in range(3)]
    assert history(out, "loss", other) == [(step, float(step)) for step in range(4)]


def test_a_run_that_was_deleted_is_made_again_with_everything(out: Path) -> None:
    tracker = start(out)
    tracker.log(1, {"loss": 1.0})
    tracker.finish("FINISHED")
    client(out).delete_run(runs(out)[0].info.run_id)
    tracker = start(out)
    tracker.log(2, {"loss": 2.0})
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(1, 1.0), (2, 2.0)]
    assert runs(out)[0].data.params["section.field7"] == "7"


def test_a_store_that_was_lost_gets_everything(out: Path, database: Path) -> None:
    tracker = start(out)
    for step in (1, 2):
        tracker.log(step, {"loss": float(step)})
    tracker.finish("FINISHED")
    shutil.copy(database, out / "mlflow.db")
    tracker = start(out)
    tracker.log(3, {"loss": 3.0})
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_parameters_are_sent_again_when_the_first_try_failed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    log_batch = MlflowClient.log_batch
    failures = iter([True])

    def fails_once(self, run_id, metrics=(), params=(), tags=()):
        if params and next(failures, False):
            raise ConnectionError("gone")
        return log_batch(self, run_id, metrics=metrics, params=params, tags=tags)

    monkeypatch.setattr(MlflowClient, "log_batch", fails_once)
    tracker = start(out)
    tracker.log(1, {"loss": 1.0})
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (runs(out) and history(out, "loss")):
        time.sleep(0.1)
    tracker.finish("FINISHED")
    assert len(runs(out)[0].data.params) == len(PARAMETERS)
    assert history(out, "loss") == [(1, 1.0)]


def test_a_line_that_a_kill_cut_short_spoils_no_other(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = start(out)
    tracker.log(1, {"loss": 1.0})
    tracker.finish("KILLED")
    with open(out / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "time": 17000')
    tracker = start(out)
    tracker.log(3, {"loss": 3.0})
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(1, 1.0), (3, 3.0)]
    assert "cut short" in capfd.readouterr().err


def test_metrics_that_were_removed_start_again(out: Path) -> None:
    tracker = start(out)
    for step in range(20):
        tracker.log(step, {"loss": 1.0})
    tracker.finish("FINISHED")
    (out / "run" / "metrics.jsonl").unlink()
    tracker = start(out)
    tracker.log(20, {"loss": 1.0})
    tracker.finish("FINISHED")
    assert len(history(out, "loss")) == 21


def test_nan_and_inf(out: Path) -> None:
    tracker = start(out)
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    tracker.finish("FINISHED")
    (line,) = written(out)  # strict JSON, unlike Python's NaN
    assert {name: float(value) for name, value in line["metrics"].items() if name != "a"} == {
        "b": math.inf,
        "c": -math.inf,
        "d": 1,
    }
    assert math.isnan(float(line["metrics"]["a"]))
    assert math.isnan(history(out, "a")[0][1])
    # MLflow stores infinity as the largest double.
    assert history(out, "b") == [(1, 1.7976931348623157e308)]
    assert history(out, "c") == [(1, -1.7976931348623157e308)]
    assert history(out, "d") == [(1, 1.0)]


def test_disabled_tracking_writes_the_file_only(out: Path) -> None:
    before = (out / "mlflow.db").read_bytes()
    tracker = start(out, enabled=False)
    tracker.log(1, {"loss": 1.0})
    tracker.finish("FINISHED")
    assert [line["metrics"] for line in written(out)] == [{"loss": 1.0}]
    assert [path.name for path in (out / "run").iterdir()] == ["metrics.jsonl"]
    assert (out / "mlflow.db").read_bytes() == before


def test_a_report_made_twice_is_one_run(out: Path) -> None:
    uri, report = default_uri(out), out / "report"
    report.mkdir()
    (report / "stats.json").write_text("{}")
    for value in (1.0, 2.0):
        send_report(uri, report, "stats x", {"train.samples": value}, [report / "stats.json"], {"tag": "value"})
    experiment = client(out).get_experiment_by_name("data")
    (sent,) = client(out).search_runs([experiment.experiment_id])
    assert (sent.info.run_name, sent.info.status) == ("stats x", "FINISHED")
    assert (sent.data.metrics["train.samples"], sent.data.tags["tag"]) == (2.0, "value")
    assert [file.path for file in client(out).list_artifacts(sent.info.run_id)] == ["stats.json"]


def test_a_locked_store_is_waited_for(out: Path) -> None:
    """Another process holds the database for a while: the metrics come after it."""
    tracker = start(out)
    lock = sqlite3.connect(out / "mlflow.db")
    lock.execute("BEGIN EXCLUSIVE")
    tracker.log(1, {"loss": 1.0})
    time.sleep(0.3)
    lock.rollback()
    lock.close()
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(1, 1.0)]
