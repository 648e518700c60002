"""Tracking with real servers: PostgreSQL, `mlflow server` with artifacts in S3, and what happens to servers."""

import json
import os
import resource
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faulty_s3
import psutil
import pytest
import servers
import track_a_run
from polling import until
from servers import MlflowServer, Postgres, Proxy, Recorder
from tracked_steps import log_step, warnings_in

from pipeline.monitor.mlflow.sender import SenderTimeouts
from pipeline.monitor.mlflow.store import MlflowStore
from pipeline.monitor.run_page import DatasetFacts, RunFacts
from pipeline.monitor.tracking import Tracker
from pipeline.settings.quantities import Length
from pipeline.settings.run import DataConfig, RunConfig, TrackConfig, TrainConfig
from pipeline.train.setup import write_settings
from pipeline.transfer.track.children import ChildSender, NestedRun

pytestmark = pytest.mark.slow
# The ends are far away: what is sent ends the wait, or what is refused.
FAST = SenderTimeouts(poll=0.05, retry=(0.1,), finish=300, finish_in_a_hurry=300)


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
def server(
    database: Path, tmp_path_factory: pytest.TempPathFactory, s3_server: faulty_s3.S3, recorder: Recorder
) -> Iterator[MlflowServer]:
    """`mlflow server` with SQLite, and its artifacts in S3. Everything beyond loopback would go to the recorder."""
    s3_server.bucket("artifacts")
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(database, folder / "mlflow.db")
    options = ("--artifacts-destination", "s3://artifacts/store")
    server = MlflowServer(folder, f"sqlite:///{folder / 'mlflow.db'}", *options, **recorder.environment)
    with servers.running(server.start()):
        yield server


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[Proxy]:
    proxy = Proxy(server.url)
    with servers.running(proxy):
        yield proxy


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

    def start(self, step: int = 0, timing: SenderTimeouts = FAST) -> "Tracked":
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
        client = MlflowStore(self.uri).client
        experiment = client.get_experiment_by_name(self.experiment)
        (run,) = client.search_runs([experiment.experiment_id])
        return run

    def losses(self, run_id: str = "") -> list[tuple[int, float]]:
        client = MlflowStore(self.uri).client
        return [(m.step, m.value) for m in client.get_metric_history(run_id or self.run.info.run_id, "train/loss")]

    def states(self) -> list[dict[str, Any]]:
        file = self.folder / "mlflow.json"
        return list(json.loads(file.read_text()).values()) if file.exists() else []

    def has_uploaded(self, name: str) -> bool:
        return any(name in state["artifacts"] for state in self.states())

    def has_sent(self, step: int) -> bool:
        sent = max((state["sent_bytes"] for state in self.states()), default=0)
        return f'"step": {step},' in (self.folder / "metrics.jsonl").read_text()[:sent].replace('":', '": ').replace(
            "  ", " "
        )


def steps(first: int, last: int) -> list[tuple[int, float]]:
    return [(step, float(step)) for step in range(first, last + 1)]


# ------------------------------------------------------------------------------------------ PostgreSQL
def test_two_runs_that_begin_together_on_a_fresh_postgresql(
    postgres: Postgres, recorder: Recorder, tmp_path: Path
) -> None:
    uri = postgres.create("fresh")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MLFLOW", "CI"))}
    environment = {**inherited, **recorder.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, track_a_run.__file__, uri, str(tmp_path), "a", "b"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert said.returncode == 0, said
    client = MlflowStore(uri).client
    experiment = client.get_experiment_by_name("vit")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.run_name"])
    assert [(run.info.run_name, run.info.status) for run in runs] == [("a", "FINISHED"), ("b", "FINISHED")], said
    for run in runs:
        points = client.get_metric_history(run.info.run_id, "train/loss")
        assert [(point.step, point.value) for point in points] == [(step, 1 / step) for step in range(1, 6)]
    lines = (said.stdout + said.stderr).splitlines()
    assert not [line for line in lines if not line.startswith("waiting for MLflow at ")], "one may wait for the other"
    assert experiment.artifact_location == (tmp_path / "mlartifacts").as_uri()
    assert recorder.asked == []


def test_a_run_in_postgresql_whose_password_is_written_nowhere(
    postgres: Postgres, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = postgres.create("runs")
    monkeypatch.setattr(sys, "argv", ["launch/pretrain.py", f"track.uri={uri}"])
    config = RunConfig(
        name="run", out=str(tmp_path), data=DataConfig(path="data"), train=TrainConfig(length=Length.parse("20000 steps")),
        track=TrackConfig(uri=uri, experiment="vit"),
    )  # fmt: skip
    folder = tmp_path / "run"
    facts = RunFacts("run", "pretrain", {"optimizer.lr": 0.1}, steps=40, artifacts=("config.yaml", "log.txt"))
    folder.mkdir()
    (folder / "log.txt").write_text("a line\n")
    for begin, last in ((0, 20), (10, 30)):  # The second start continues from step 10: the points after it are deleted.
        write_settings(config, folder)
        tracker = Tracker(config.track, tmp_path, folder, facts, begin, FAST)
        for step in range(begin + 1, last + 1):
            tracker.log(step, {"loss": step + 100.0 * begin})
        until(lambda: MlflowStore(uri).client.get_experiment_by_name("vit") is not None)
        tracker.go_back(last - 5)
        for step in range(last - 4, last + 1):
            tracker.log(step, {"loss": step + 0.5})
        tracker.finish("FINISHED")
    tracked = Tracked(uri, tmp_path, "vit")
    run = tracked.run
    assert tracked.losses() == [
        *[(step, float(step)) for step in range(1, 11)],
        *[(step, step + 1000.0) for step in range(11, 26)],
        *[(step, step + 0.5) for step in range(26, 31)],
    ]
    assert (run.info.status, run.data.tags["starts"]) == ("FINISHED", "2")
    assert {file.path for file in MlflowStore(uri).client.list_artifacts(run.info.run_id)} >= {"config.yaml", "log.txt"}
    assert run.data.tags["command"].endswith(f"track.uri={uri.replace(postgres.password, '***')}")

    # With a wrong password, one line, and it is not in it either.
    tracked.uri = postgres.uri("runs", "not-the-password")
    tracked.start(30).log(31, 32)
    tracked.tracker.finish("FINISHED", in_a_hurry=True)
    out, err = capfd.readouterr()
    assert err.count("password authentication failed") == 1
    assert "not-the-password" not in err

    database = postgres.call("pg_dump", "runs")
    assert b"optimizer.lr" in database
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"config.json", "config.yaml", "mlflow.json", "metrics.jsonl", "facts.json"} <= {path.name for path in files}
    for where, content in {**files, "the database": database, "the output": (out + err).encode()}.items():
        assert postgres.password.encode() not in content, where
        assert b"not-the-password" not in content, where


# ------------------------------------------------------------------------------------------ mlflow server, S3
def test_artifacts_go_to_s3_through_the_server_or_directly(
    server: MlflowServer, s3_server: faulty_s3.S3, tmp_path: Path
) -> None:
    import boto3

    client = MlflowStore(server.url).client
    client.create_experiment("direct", "s3://artifacts/direct")
    for experiment in ("through", "direct"):
        tracked = Tracked(server.url, tmp_path / experiment, experiment)
        figures = tracked.folder / "page" / "figures"
        figures.mkdir(parents=True)
        (figures / "loss.png").write_bytes(b"\x89PNG of " + experiment.encode())
        (tracked.folder / "log.txt").write_text("a line\n")
        tracked.start().log(1, 3)
        tracked.finish()
        for name in ("log.txt", "figures/loss.png"):
            read = Path(client.download_artifacts(tracked.run.info.run_id, name, str(tmp_path)))
            assert read.read_bytes().endswith(experiment.encode() if name.endswith("png") else b"a line\n")
    keys = [found["Key"] for found in boto3.client("s3").list_objects_v2(Bucket="artifacts")["Contents"]]
    for prefix in ("store/", "direct/"):
        assert any(key.startswith(prefix) and key.endswith("figures/loss.png") for key in keys), keys


def test_a_server_that_asks_for_a_password(
    proxy: Proxy, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a reverse proxy does that holds the certificate."""
    proxy.login = "ada:right"
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong")
    tracked = Tracked(proxy.url, tmp_path, "login").start()
    tracked.log(1, 10)
    until(lambda: len(proxy.requests) > 3)
    tracked.tracker.finish("FINISHED", in_a_hurry=True)
    first, second = warnings_in(capfd.readouterr().err)
    assert "401" in first
    assert "training continues" in first
    assert "launch/track_sync.py" in second
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "right")
    tracked.start(10).log(11, 12)
    tracked.finish()
    assert tracked.losses() == steps(1, 12)
    assert warnings_in(capfd.readouterr().err) == []


def test_mlflows_own_logins(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "flask_wtf", reason="mlflow server --app-name basic-auth needs Flask-WTF: pip install mlflow[auth]"
    )
    (tmp_path / "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{tmp_path / 'auth.db'}\n"
        "admin_username = admin\nadmin_password = a-long-password\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    server = MlflowServer(
        tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}", "--app-name", "basic-auth",
        MLFLOW_AUTH_CONFIG_PATH=str(tmp_path / "auth.ini"), MLFLOW_FLASK_SERVER_SECRET_KEY="of this test",
    )  # fmt: skip
    with servers.running(server.start()):
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong")
        tracked = Tracked(server.url, tmp_path, "login").start()
        tracked.log(1, 3)
        tracked.tracker.finish("FINISHED", in_a_hurry=True)
        assert "401" in warnings_in(capfd.readouterr().err)[0]
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a-long-password")
        tracked.start(3).log(4, 5)
        tracked.finish()
        assert tracked.losses() == steps(1, 5)


# ------------------------------------------------------------------------------------------ faults
@pytest.mark.parametrize("when", ["at the start", "in the middle"])
def test_a_server_that_is_down(proxy: Proxy, tmp_path: Path, capfd: pytest.CaptureFixture[str], when: str) -> None:
    """At the start it closes connections without an answer; in the middle, as after a kill, it also refuses new ones."""
    tracked = Tracked(proxy.url, tmp_path, f"down {when}")
    proxy.down = when == "at the start"
    tracked.start().log(1, 10)
    said: list[str] = []

    def warned() -> bool:
        said.extend(warnings_in(capfd.readouterr().err))
        return bool(said)

    if not proxy.down:
        # An upload that fails, before a server that is back answers again, is said in other words.
        until(lambda: tracked.has_sent(10) and tracked.has_uploaded("starts.jsonl"))
        proxy.down = True
        proxy.close()
        tracked.log(11, 20)
        until(warned)
        proxy.open()
    proxy.requests.clear()
    until(lambda: len(proxy.requests) > 2)
    tracked.log(21, 30)
    proxy.down = False
    tracked.finish()
    expected = steps(1, 30) if when == "in the middle" else [*steps(1, 10), *steps(21, 30)]
    assert tracked.losses() == expected
    assert tracked.run.info.status == "FINISHED"
    warned()
    (line,) = said
    assert "cannot be reached" in line


def test_a_server_that_does_not_answer_in_time(proxy: Proxy, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It answers once the end of the run has given up waiting, which thus waited no longer than it may."""
    proxy.answers.clear()
    tracked = Tracked(proxy.url, tmp_path, "slow").start(timing=SenderTimeouts(poll=0.05, finish=0.5))
    until(lambda: proxy.requests)
    tracked.log(1, 40)
    tracked.finish()
    (line,) = warnings_in(capfd.readouterr().err)
    assert "the next start sends the rest" in line
    proxy.answers.set()
    tracked.tracker._sender._thread.join(300)  # The end of a process would end it at once.
    tracked.start(40).finish()
    assert tracked.losses() == steps(1, 40)


def test_a_run_that_someone_deletes(server: MlflowServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracked = Tracked(server.url, tmp_path, "deleted run").start()
    (tracked.folder / "log.txt").write_text("a line\n")
    tracked.log(1, 10)
    until(lambda: tracked.has_sent(10))
    deleted = tracked.run.info.run_id
    MlflowStore(server.url).client.delete_run(deleted)
    tracked.log(11, 20)
    tracked.finish()
    run = tracked.run
    assert run.info.run_id != deleted
    assert tracked.losses() == steps(1, 20)
    assert (run.info.status, run.data.params, run.data.tags["kind"]) == (
        "FINISHED",
        {"optimizer.lr": "0.1"},
        "pretrain",
    )
    files = MlflowStore(server.url).client.list_artifacts(run.info.run_id)
    assert "log.txt" in [file.path for file in files]
    (line,) = warnings_in(capfd.readouterr().err)
    assert f"has no run {deleted} (deleted?): all is sent to {run.info.run_id}" in line


def test_an_experiment_that_someone_deletes(
    server: MlflowServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracked = Tracked(server.url, tmp_path, "deleted experiment").start()
    tracked.log(1, 10)
    until(lambda: tracked.has_sent(10))
    client, run = MlflowStore(server.url).client, tracked.run
    client.delete_experiment(run.info.experiment_id)
    tracked.log(11, 20)
    tracked.tracker.finish("FINISHED", in_a_hurry=True)
    first, second = warnings_in(capfd.readouterr().err)
    assert f"(`mlflow experiments restore --experiment-id {run.info.experiment_id}` restores it" in first
    assert "the next start sends the rest" in second
    client.restore_experiment(run.info.experiment_id)
    tracked.start(20).finish()
    assert tracked.run.info.run_id == run.info.run_id
    assert tracked.losses() == steps(1, 20)


def test_a_server_whose_disk_is_full(server: MlflowServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No file of the server may grow beyond the size of its database, as on a disk without space."""
    tracked = Tracked(server.url, tmp_path, "full").start()
    tracked.log(1, 10)
    until(lambda: tracked.has_sent(10))
    size = (server.folder / "mlflow.db").stat().st_size
    many = {f"metric{number}": 1.0 for number in range(50)}
    for process in server.family():
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    tracked.log(11, 40, **many)
    heard: list[str] = []

    def refused() -> bool:
        heard.append(capfd.readouterr().err)
        return "cannot be reached" in "".join(heard)

    until(refused)
    for process in server.family():
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tracked.finish()
    refused()
    said = "".join(heard)
    assert said.count("warning: ") == 1
    assert "too many 50" in said  # 500 or 503
    assert "(sqlite3.OperationalError) d" in server.log.read_text()  # "disk I/O error", or "database or disk is full"
    assert tracked.losses() == steps(1, 40)


# ------------------------------------------------------------------------------------------ the cells of a sweep
def test_a_cell_takes_four_requests(proxy: Proxy, tmp_path: Path) -> None:
    tracked = Tracked(proxy.url, tmp_path, "sweep").start()
    tracked.finish()  # The parent's own requests are over.
    experiment = tracked.run.info.experiment_id
    sender = ChildSender(tracked.folder, proxy.url, {"kind": "cell"})
    data = DatasetFacts("dtd", "/data/dtd", "0123456789abcdef", "val200", 200, 47, "evaluation")
    sender.add(
        NestedRun(f"cell-{i}", f"cell {i}", "FINISHED", 1_000, 2_000, {"seed": i}, {"val_top1": 0.5}, {}, (data,))
        for i in range(3)
    )
    proxy.requests.clear()
    sender.begin()
    assert sender.end()
    requests = sum("/mlflow/runs/" in request for request in proxy.requests)
    assert requests == 2 + 3 * 4  # Two find the parent and its children.
    children = MlflowStore(proxy.url).client.search_runs([experiment], "tags.kind = 'cell'")
    assert len(children) == 3


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
