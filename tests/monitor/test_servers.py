"""Tracking with real servers: PostgreSQL, `mlflow server`, and what happens to servers."""

import json
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import servers
from polling import until
from servers import MlflowServer, Postgres, Recorder
from tracked_steps import log_step, warnings_in

from pipeline.cluster.status_files import write_settings
from pipeline.monitor.export import ExportTiming
from pipeline.monitor.mlflow.connection import connect
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker
from pipeline.settings.quantities import Length
from pipeline.settings.run import DataConfig, RunConfig, TrackConfig, TrainConfig

pytestmark = pytest.mark.slow
# The ends are far away: what is sent ends the wait, or what is refused.
FAST = ExportTiming(poll=0.05, retry=(0.1,), finish=300, finish_in_a_hurry=300)


@pytest.fixture(scope="module", autouse=True)
def no_telemetry_and_no_login() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
        yield


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    with servers.running(recorder):
        yield recorder


@pytest.fixture(scope="module")
def server(database: Path, tmp_path_factory: pytest.TempPathFactory, recorder: Recorder) -> Iterator[MlflowServer]:
    """`mlflow server` with SQLite. Everything beyond loopback would go to the recorder."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(database, folder / "mlflow.db")
    server = MlflowServer(folder, f"sqlite:///{folder / 'mlflow.db'}", **recorder.environment)
    with servers.running(server.start()):
        yield server


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    postgres = Postgres(tmp_path_factory.mktemp("postgres"))
    with servers.running(postgres):
        yield postgres


class Tracked:
    """A tracked run of a test: logs steps, none of which may wait for MLflow, and knows what the store has of it."""

    def __init__(self, uri: str, out: Path, experiment: str) -> None:
        self.uri, self.out, self.folder, self.experiment = uri, out, out / "run", experiment
        self.tracker = None

    def start(self, step: int = 0, timing: ExportTiming = FAST) -> "Tracked":
        facts = RunFacts(
            "run", "pretrain", {"optimizer.lr": 0.1}, description="A run.", steps=40, artifacts=("log.txt",)
        )
        config = TrackConfig(uri=self.uri, experiment=self.experiment)
        self.tracker = Tracker(config, self.out, self.folder, facts, step, timing)
        return self

    def log(self, first: int, last: int, **more: float) -> None:
        for step in range(first, last + 1):
            log_step(self.tracker, step, {"loss": float(step), **more})

    def finish(self) -> None:
        self.tracker.finish("FINISHED")

    @property
    def run(self) -> Any:
        client = connect(self.uri)
        experiment = client.get_experiment_by_name(self.experiment)
        (run,) = client.search_runs([experiment.experiment_id])
        return run

    def losses(self, run_id: str = "") -> list[tuple[int, float]]:
        client = connect(self.uri)
        return [(m.step, m.value) for m in client.get_metric_history(run_id or self.run.info.run_id, "train/loss")]

    def states(self) -> list[dict[str, Any]]:
        file = self.folder / "mlflow.json"
        return list(json.loads(file.read_text()).values()) if file.exists() else []

    def has_sent(self, step: int) -> bool:
        return any(state["last"].get("loss", -1) >= step for state in self.states())


def steps(first: int, last: int) -> list[tuple[int, float]]:
    return [(step, float(step)) for step in range(first, last + 1)]


# ------------------------------------------------------------------------------------------ PostgreSQL
def test_a_run_in_postgresql_whose_password_is_written_nowhere(
    postgres: Postgres, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = postgres.create("runs")
    monkeypatch.setattr(sys, "argv", ["launch/pretrain.py", f"track.uri={uri}"])
    config = RunConfig(
        name="run",
        out=str(tmp_path),
        data=DataConfig(path="data"),
        train=TrainConfig(length=Length.parse("20000 steps")),
        track=TrackConfig(uri=uri, experiment="vit"),
    )
    folder = tmp_path / "run"
    facts = RunFacts("run", "pretrain", {"optimizer.lr": 0.1}, steps=40, artifacts=("config.yaml", "log.txt"))
    folder.mkdir()
    (folder / "log.txt").write_text("a line\n")
    for begin, last in ((0, 20), (10, 30)):  # The second start continues from step 10.
        write_settings(config, folder)
        tracker = Tracker(config.track, tmp_path, folder, facts, begin, FAST)
        for step in range(begin + 1, last + 1):
            tracker.log(step, {"loss": float(step)})
        tracker.finish("FINISHED")
    tracked = Tracked(uri, tmp_path, "vit")
    run = tracked.run
    assert tracked.losses() == steps(1, 30)
    assert (run.info.status, run.data.tags["starts"]) == ("FINISHED", "2")
    assert {file.path for file in connect(uri).list_artifacts(run.info.run_id)} >= {"config.yaml", "log.txt"}
    assert run.data.tags["command"].endswith(f"track.uri={uri.replace(postgres.password, '***')}")

    out, err = capfd.readouterr()
    database = postgres.call("pg_dump", "runs")
    assert b"optimizer.lr" in database
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"config.yaml", "mlflow.json", "metrics.jsonl", "run.json"} <= {path.name for path in files}
    for where, content in {**files, "the database": database, "the output": (out + err).encode()}.items():
        assert postgres.password.encode() not in content, where


# ------------------------------------------------------------------------------------------ faults
def test_a_server_that_is_killed_and_comes_back(
    server: MlflowServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracked = Tracked(server.url, tmp_path, "killed").start()
    tracked.log(1, 10)
    until(lambda: tracked.has_sent(10))
    server.stop()
    tracked.log(11, 20)
    said: list[str] = []

    def warned() -> bool:
        said.extend(warnings_in(capfd.readouterr().err))
        return bool(said)

    until(warned)
    tracked.log(21, 30)
    server.start()
    until(lambda: tracked.has_sent(30))
    tracked.finish()
    assert tracked.losses() == steps(1, 30)
    assert tracked.run.info.status == "FINISHED"
    warned()
    (line,) = said
    assert "cannot be reached" in line


# ------------------------------------------------------------------------------------------ telemetry
def test_the_server_calls_nobody(server: MlflowServer, recorder: Recorder) -> None:
    """After all tests above, and what its page reports of its own use."""
    url = f"{server.url}/ajax-api/3.0/mlflow/ui-telemetry"
    with urllib.request.urlopen(url) as reply:
        assert json.load(reply)["disable_ui_telemetry"] is True
    event = json.dumps({"records": [{"event_name": "click", "timestamp_ns": 1, "params": {}}]}).encode()
    request = urllib.request.Request(url, event, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        assert json.load(reply)["status"] == "disabled"
    assert recorder.asked == []
    # By its own addresses, too: the Ray of an earlier test in this process does not use 127.0.0.1.
    here = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    for process in [psutil.Process(), *server.family()]:
        # An IPv6 socket names an IPv4 address with a prefix.
        connected = (connection.raddr.ip for connection in process.net_connections("inet") if connection.raddr)
        remote = {address.removeprefix("::ffff:") for address in connected}
        assert all(address.startswith("127.") or address in here for address in remote), remote
