"""MLflow never delays a step, and receives every metric once: at once, or when it can be reached again."""

import contextlib
import json
import math
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from polling import until
from tracked_steps import log_step, warnings_in

from pipeline.monitor.mlflow import sender as mlflow_sender
from pipeline.monitor.mlflow.sender import SenderTimeouts
from pipeline.monitor.mlflow.state import run_id_of
from pipeline.monitor.mlflow.store import MlflowStore
from pipeline.monitor.run_page import RunFacts, metric_name
from pipeline.monitor.tracking import Tracker, default_uri, send_report
from pipeline.process import waits
from pipeline.settings.run import TrackConfig

FAST = SenderTimeouts(poll=0.05, retry=(0.05,), finish=300)
NOBODY = "http://127.0.0.1:1"  # A port that no other test is given meanwhile.
PARAMETERS = {f"section.field{i}": i for i in range(120)} | {"long": "x" * 9000, "nothing": None}


@pytest.fixture
def out(database: Path, tmp_path: Path) -> Path:
    """A folder of runs with a database in it."""
    shutil.copy(database, tmp_path / "mlflow.db")
    return tmp_path


def start(
    out: Path,
    uri: str = "",
    enabled: bool = True,
    step: int | None = None,
    folder: str = "run",
    timing: SenderTimeouts = FAST,
    **parameters: object,
) -> Tracker:
    config = TrackConfig(uri=uri, enabled=enabled)
    artifacts = ("config.json", "scores.json")
    facts = RunFacts("run", "pretrain", {**PARAMETERS, **parameters}, {"data": "abc"}, artifacts=artifacts)
    return Tracker(config, out, out / folder, facts, step, timing)


def live(out: Path, steps: range, value: float, step: int | None = None, **others: Any) -> list[str]:
    """One start of a run that continues from `step` and logs `steps`, with an evaluation every tenth; returns its notes."""
    tracker = start(out, step=step, **others)
    for number in steps:
        tracker.log(number, {"loss": value + number, "speed": value})
        if number % 10 == 0:
            tracker.log(number, {"val_top1": value})
    tracker.finish("FAILED")
    return tracker.notes


def client(out: Path, uri: str = ""):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri or default_uri(out))


def runs(out: Path, uri: str = "") -> list:
    found = client(out, uri)
    experiment = found.get_experiment_by_name("vit")
    return found.search_runs([experiment.experiment_id]) if experiment else []


def history(out: Path, name: str, uri: str = "") -> list[tuple[int, float]]:
    (run,) = runs(out, uri)
    return [(m.step, m.value) for m in client(out, uri).get_metric_history(run.info.run_id, metric_name(name))]


def arrived(out: Path) -> bool:
    """Whether the store has the run and a metric of it."""
    found = runs(out)
    return bool(found and found[0].data.metrics)


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
    (out / "run" / "config.json").write_text("{}")  # There are no scores yet.
    tracker.finish("FAILED")
    (run,) = runs(out)
    assert run.info.status == "FAILED"
    assert run.data.params["section.field7"] == "7"
    assert len(run.data.params) == len(PARAMETERS)
    assert run.data.params["long"] == "x" * 6000
    assert run.data.tags["data"] == "abc"
    assert len(run.data.tags["mlflow.source.git.commit"]) >= 7
    assert run.data.tags["kind"] == "pretrain"
    assert run.data.tags["mlflow.user"]
    # Beside the database, and not in whatever folder the command was started in.
    assert sorted(path.name for path in (out / "mlartifacts").rglob("*.json")) == ["config.json", "facts.json"]

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
    until(lambda: arrived(out))
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
            time.sleep(0.01)  # The thread sends some of them meanwhile, or later.
        tracker.finish("FINISHED")
    assert sent == [("train/loss", step) for step in range(30)]


def test_an_absent_server_delays_nothing_and_loses_nothing(
    out: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = NOBODY
    tracker = start(out, uri=uri)
    for step in range(100):
        log_step(tracker, step, {"loss": float(step)})
    tracker.finish("FINISHED")
    assert not tracker._sender._thread.is_alive(), "it gave up by itself, and not because its time was over"
    said = capfd.readouterr().err
    assert said.count("cannot be reached") == 1
    assert "the next start sends the rest" in said
    assert len(written(out)) == 100

    # The server is back under the same name: here, a store that the client takes for it.
    from mlflow import tracking

    real = tracking.MlflowClient
    monkeypatch.setattr(tracking, "MlflowClient", lambda tracking_uri: real(default_uri(out)))
    monkeypatch.chdir(out)  # A server chooses where artifacts go, and this store takes the current folder.
    tracker = start(out, uri=uri)
    tracker.log(100, {"loss": 100.0})
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(step, float(step)) for step in range(101)]


def test_a_server_that_answers_slowly_does_not_hold_up_the_end(
    out: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, over = threading.Event(), threading.Event()
    monkeypatch.setattr(MlflowStore, "log_metrics", lambda *_: (asked.set(), over.wait()))
    tracker = start(out, timing=SenderTimeouts(poll=0.05, finish=0.3))
    tracker.log(1, {"loss": 1.0})
    assert asked.wait(300)
    tracker.finish("FINISHED")  # Returns, although there is no answer.
    over.set()
    assert "has not received all of" in capfd.readouterr().err
    assert len(written(out)) == 1


def test_an_outage_that_begins_at_the_end_of_a_run_is_waited_for(
    out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The end gave up at the first failure, and the last score stayed away although the server was back a second later."""
    tracker = start(out, timing=SenderTimeouts(poll=300, retry=(0.05,) * 3, finish=300))
    until(lambda: tracker._sender._mirror._next_models)  # The store has answered, and the thread waits.
    send, failures = MlflowStore.log_metrics, [ConnectionError("busy"), ConnectionError("busy")]

    def log_metrics(*args: Any, **others: Any) -> None:
        if failures:
            raise failures.pop()
        send(*args, **others)

    monkeypatch.setattr(MlflowStore, "log_metrics", log_metrics)
    tracker.log(1, {"loss": 1.0})
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(1, 1.0)]
    assert runs(out)[0].info.status == "FINISHED"
    (line,) = warnings_in(capfd.readouterr().err)
    assert "cannot be reached (busy)" in line


def test_the_wait_for_the_last_metrics_is_announced(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def late(*_: object) -> None:
        until(waits.in_progress)
        seen.extend(map(str, waits.in_progress()))

    monkeypatch.setattr(MlflowStore, "log_metrics", late)
    tracker = start(out, timing=SenderTimeouts(poll=0.05, finish=300))
    tracker.log(1, {"loss": 1.0})
    tracker.finish("FINISHED")
    assert f"MLflow at {default_uri(out)} to receive the rest of the run, at most 5 min" in seen


def test_a_store_on_a_full_disk_gets_the_rest_when_there_is_room(
    out: Path, database: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Uses a real small file system, which only root can mount."""
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
        for step in range(1, 40):
            log_step(tracker, step, {f"metric{i}": float(step) for i in range(50)} | {"loss": float(step)})
        tracker.finish("FINISHED")
        assert "disk is full" in capfd.readouterr().err
        assert len(written(out)) == 40
        (disk / "filler").unlink()
        tracker = start(out, uri=uri)
        tracker.finish("FINISHED")
        assert history(out, "loss", uri) == [(step, float(step)) for step in range(40)]
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_page_that_cannot_be_written_does_not_keep_mlflow_from_the_end(out: Path) -> None:
    """A run that failed on a full disk went on for ever in MLflow, and the error of its page hid that of its metrics."""
    tracker = start(out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        size = (out / "run/metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
        with pytest.raises(OSError, match="too large") as error:
            tracker.log(1, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == str(out / "run/metrics.jsonl")
    (out / "run/page/end.json").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        tracker.finish("FAILED")
    assert error.value.filename == str(out / "run/page/end.json")
    assert [run.info.status for run in runs(out)] == ["FAILED"]


def test_each_tracking_uri_has_its_own_state(out: Path, database: Path) -> None:
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


@pytest.mark.slow
def test_a_run_that_is_deleted_under_us_is_made_again(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = start(out)
    tracker.log(1, {"loss": 1.0})
    until(lambda: arrived(out))
    first = runs(out)[0].info.run_id
    client(out).delete_run(first)
    tracker.log(2, {"loss": 2.0})
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(1, 1.0), (2, 2.0)]
    (run,) = runs(out)
    assert (run.info.status, run.data.params["section.field7"]) == ("FINISHED", "7")
    (line,) = warnings_in(capfd.readouterr().err)
    assert (
        line
        == f"warning: MLflow at {default_uri(out)} has no run {first} (deleted?): all is sent to {run.info.run_id}."
    )


@pytest.mark.slow
def test_a_deleted_experiment_is_named_and_continued_when_it_is_restored(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = start(out)
    tracker.log(1, {"loss": 1.0})
    until(lambda: arrived(out))
    (run,) = runs(out)
    client(out).delete_experiment(run.info.experiment_id)
    tracker.log(2, {"loss": 2.0})
    said: list[str] = []

    def refused() -> bool:
        said.append(capfd.readouterr().err)
        return bool(warnings_in("".join(said)))

    until(refused)
    client(out).restore_experiment(run.info.experiment_id)
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(1, 1.0), (2, 2.0)]
    assert runs(out)[0].info.run_id == run.info.run_id
    refused()
    (line,) = warnings_in("".join(said))
    assert (
        f"has deleted experiment 'vit' (`mlflow experiments restore --experiment-id {run.info.experiment_id}`" in line
    )


@pytest.mark.slow
def test_the_password_of_a_tracking_uri_is_not_written_and_may_change(out: Path) -> None:
    """Through SQLite, which ignores the parameter; tests/monitor/test_servers.py uses PostgreSQL."""
    for step, password in enumerate(("first", "second")):
        uri = f"{default_uri(out)}?password={password}"
        tracker = start(out, uri=uri)
        tracker.log(step, {"loss": float(step)})
        tracker.finish("FINISHED")
        assert password not in (out / "run" / "mlflow.json").read_text()
    assert history(out, "loss") == [(0, 0.0), (1, 1.0)]


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
    until(lambda: runs(out) and history(out, "loss"))
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
    # The page is for launch/track_sync.py, which can send the run later.
    assert {path.name for path in (out / "run").iterdir()} == {"metrics.jsonl", "page"}
    assert (out / "mlflow.db").read_bytes() == before


def test_a_report_made_twice_is_one_run(out: Path) -> None:
    uri, report = default_uri(out), out / "report"
    report.mkdir()
    (report / "stats.json").write_text("{}")
    for value in (1.0, 2.0):
        send_report(
            uri,
            report,
            RunFacts("stats x", "data", tags={"tag": "value"}),
            {"train.samples": value},
            [report / "stats.json"],
        )
    experiment = client(out).get_experiment_by_name("vit")
    (sent,) = client(out).search_runs([experiment.experiment_id])
    assert (sent.info.run_name, sent.info.status) == ("stats x", "FINISHED")
    assert (sent.data.metrics["train.samples"], sent.data.tags["tag"]) == (2.0, "value")
    listed = [file.path for file in client(out).list_artifacts(sent.info.run_id)]
    assert listed == ["facts.json", "stats.json"]


def test_a_locked_store_is_waited_for(out: Path) -> None:
    """Another process locks the database for a while: the metrics arrive after it."""
    lock = sqlite3.connect(out / "mlflow.db")
    lock.execute("BEGIN EXCLUSIVE")
    tracker = start(out)
    tracker.log(1, {"loss": 1.0})
    until(lambda: "/sqlalchemy/" in str(traceback.extract_stack(sys._current_frames()[tracker._sender._thread.ident])))
    lock.rollback()
    lock.close()
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(1, 1.0)]


# -------------------------------------------------------------------- steps that run again
@pytest.fixture(params=["database", "server"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database, and a store that cannot delete points, like a server."""
    if request.param == "server":
        monkeypatch.setattr(MlflowStore, "delete_points_after", lambda self, run_id, step: False)
    return request.param


def test_steps_that_run_again_have_one_point_the_last(out: Path, store: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert live(out, range(1, 38), 1.0, step=0) == []
    (first,) = runs(out)
    notes = live(out, range(21, 51), 2.0, step=20)
    assert notes == [f"{out / 'run' / 'metrics.jsonl'}: removed 18 records after step 20, from which the run continues"]
    expected = [(step, step + (1.0 if step <= 20 else 2.0)) for step in range(1, 51)]
    assert history(out, "loss") == expected
    assert history(out, "val_top1") == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0), (50, 2.0)]
    (second,) = runs(out)
    assert second.data.metrics == {"train/loss": 52.0, "speed": 2.0, "eval/val_top1": 2.0}
    assert second.data.params == first.data.params
    assert second.data.tags["data"] == "abc"
    assert [line["step"] for line in written(out) if "loss" in line["metrics"]] == list(range(1, 51))
    # A database keeps the run; a server gets another one for it, and says so in one line.
    said = warnings_in(capfd.readouterr().err)
    if store == "database":
        assert (second.info.run_id, said) == (first.info.run_id, [])
    else:
        assert second.info.run_id != first.info.run_id
        assert len(said) == 1
        assert f"run {second.info.run_id} replaces {first.info.run_id}, which is deleted" in said[0]

    # A life that goes on behind all that was sent changes nothing.
    assert live(out, range(51, 53), 3.0, step=50) == []
    assert history(out, "loss") == [*expected, (51, 54.0), (52, 55.0)]
    assert runs(out)[0].info.run_id == second.info.run_id


def test_the_last_value_of_a_run_that_went_back_is_of_its_last_step(out: Path) -> None:
    live(out, range(1, 31), 1.0, step=0)
    live(out, range(0), 0.0, step=15)
    (run,) = runs(out)
    assert run.data.metrics == {"train/loss": 16.0, "speed": 1.0, "eval/val_top1": 1.0}
    assert [step for step, _ in history(out, "val_top1")] == [10]
    live(out, range(0), 0.0, step=0)
    assert runs(out)[0].data.metrics == {}


def test_going_back_behind_a_spike_while_the_run_goes_on(out: Path, store: str) -> None:
    tracker = start(out, step=0)
    for step in range(1, 31):
        tracker.log(step, {"loss": float(step)})
    until(lambda: arrived(out) and runs(out)[0].data.metrics.get("train/loss") == 30.0)
    assert len(history(out, "loss")) == 30
    assert len(tracker.go_back(20)) == 1
    for step in range(21, 31):
        tracker.log(step, {"loss": 100.0 + step})
    tracker.go_back(25)  # Before the thread has looked, or after.
    for step in range(26, 41):
        tracker.log(step, {"loss": 200.0 + step})
    tracker.finish("FINISHED")
    values = [0.0] * 20 + [100.0] * 5 + [200.0] * 15
    assert history(out, "loss") == [(step, value + step) for step, value in enumerate(values, 1)]
    assert [line["step"] for line in written(out)] == list(range(1, 41))
    assert runs(out)[0].info.status == "FINISHED"


def test_going_back_while_a_slow_store_takes_points(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    log_batch, sending, is_back = MlflowClient.log_batch, threading.Event(), threading.Event()
    in_time: list[bool] = []

    def after_going_back(self, run_id, metrics=(), **others):
        if metrics:
            sending.set()
            in_time.append(is_back.wait(300))
        return log_batch(self, run_id, metrics=metrics, **others)

    monkeypatch.setattr(MlflowClient, "log_batch", after_going_back)
    tracker = start(out, step=0)
    for step in range(1, 11):
        tracker.log(step, {"loss": 1.0})
    assert sending.wait(300)
    tracker.go_back(5)
    is_back.set()
    for step in range(6, 11):
        tracker.log(step, {"loss": 2.0})
    tracker.finish("FINISHED")
    assert all(in_time), "it waited for the store"
    assert history(out, "loss") == [(step, 1.0 if step <= 5 else 2.0) for step in range(1, 11)]


def test_points_that_were_sent_before_the_state_was_saved_are_deleted(
    out: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill between sending points and saving mlflow.json, which then says that fewer points were sent."""
    live(out, range(1, 11), 1.0, step=0)
    before = (out / "run" / "mlflow.json").read_text()
    live(out, range(11, 21), 1.0, step=10)
    (out / "run" / "mlflow.json").write_text(before)
    live(out, range(13, 21), 2.0, step=12)
    assert history(out, "loss") == [(step, step + (1.0 if step <= 12 else 2.0)) for step in range(1, 21)]


def test_points_in_another_store_are_deleted_when_it_is_used_again(out: Path, database: Path) -> None:
    shutil.copy(database, out / "other.db")
    other = f"sqlite:///{out / 'other.db'}"
    live(out, range(1, 21), 1.0, step=0, uri=other)
    live(out, range(11, 31), 2.0, step=10)
    live(out, range(31, 33), 3.0, step=30, uri=other)
    assert [step for step, _ in history(out, "loss", other)] == list(range(1, 33))
    assert dict(history(out, "loss", other))[20] == 22.0


def test_a_file_of_an_earlier_version_with_steps_twice_is_repaired(out: Path) -> None:
    live(out, range(1, 21), 1.0)
    live(out, range(11, 31), 2.0)
    assert len(history(out, "loss")) == 40
    with open(out / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 31, "ti')
    notes = live(out, range(31, 41), 3.0, step=30)
    assert [note.partition("removed ")[2] for note in notes] == [
        "11 records of steps that were recorded again",
        "1 damaged lines",
    ]
    expected = [(s, s + (1.0 if s <= 10 else 2.0 if s <= 30 else 3.0)) for s in range(1, 41)]
    assert history(out, "loss") == expected
    assert [(line["step"], line["metrics"]["loss"]) for line in written(out) if "loss" in line["metrics"]] == expected


def test_an_evaluation_that_is_done_again_is_recorded_once(out: Path) -> None:
    live(out, range(1, 11), 1.0, step=0)
    tracker = start(out, step=10)
    tracker.log(10, {"val_top1": 1.0, "pets_5shot": 0.5})
    tracker.log(11, {"loss": 12.0})
    tracker.finish("FINISHED")
    assert history(out, "val_top1") == [(10, 1.0)]
    assert history(out, "pets_5shot") == [(10, 0.5)]
    assert sum("val_top1" in line["metrics"] for line in written(out)) == 1


# -------------------------------------------------------------------- mlflow.json damaged
DAMAGED = {
    "cut": lambda text: text[:40],
    "empty": lambda text: "",
    "list": lambda text: "[1, 2]",
    "type": lambda text: text.replace('"sent_bytes": ', '"sent_bytes": "x", "was": '),
    "no id": lambda text: text.replace('"run_id": "', '"run_id": "../'),
}


@pytest.mark.slow
def test_a_copy_of_a_run_folder_leaves_the_run_of_the_original_alone(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its mlflow.json names that run: the copy, begun from an earlier step, deleted the original's points and sent its own."""

    def tracker(name: str, step: int) -> Tracker:
        facts = RunFacts(name, "pretrain", tags={"run_folder_path": str((out / name).resolve())})
        return Tracker(TrackConfig(), out, out / name, facts, step, FAST)

    original = tracker("first", 0)
    for step in range(1, 5):
        original.log(step, {"loss": 1.0})
    original.finish("FINISHED")
    shutil.copytree(out / "first", out / "second")
    copy = tracker("second", 2)
    copy.log(3, {"loss": 2.0})
    copy.finish("KILLED")
    losses = {
        run.info.run_name: [point.value for point in client(out).get_metric_history(run.info.run_id, "train/loss")]
        for run in runs(out)
    }
    assert losses == {"first": [1.0] * 4, "second": [1.0, 1.0, 2.0]}
    assert f"{out / 'second'} is a copy of {out / 'first'}" in capfd.readouterr().err
    # A folder that was moved keeps its run, and so does one whose original is gone.
    (out / "second").rename(out / "third")
    shutil.rmtree(out / "first")
    (out / "third").rename(out / "first")
    tracker("first", 3).finish("FINISHED")
    assert len(runs(out)) == 2
    assert not capfd.readouterr().err


def test_the_mlflow_run_is_found_again_when_its_file_is_damaged(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    live(out, range(1, 11), 1.0, step=0)
    live(out, range(1, 11), 9.0, step=0, folder="other")  # Another run of the same name.
    first, file = run_id_of(out / "run"), out / "run" / "mlflow.json"
    for value, (name, damage) in enumerate(DAMAGED.items(), 2):
        file.write_text(damage(file.read_text()))
        live(out, range(6, 16), value, step=5)
        assert run_id_of(out / "run") == first, name
        found = [(m.step, m.value) for m in client(out).get_metric_history(first, "train/loss")]
        assert found == [(step, step + (1.0 if step <= 5 else value)) for step in range(1, 16)], name
        said = warnings_in(capfd.readouterr().err)
        if name != "no id":
            (line,) = said
            assert "mlflow.json, which names the MLflow run, was damaged (" in line
            assert line.endswith(f"continuing run {first}, which has this folder's tag.")
        assert len(runs(out)) == 2, name


def test_a_damaged_file_is_said_when_the_store_answers_first_at_a_later_start(
    out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The start that did not reach the store replaced the file, and nobody heard of it."""
    live(out, range(1, 3), 1.0, step=0)
    (out / "run" / "mlflow.json").write_text("{")
    with monkeypatch.context() as away:
        away.setattr(mlflow_sender, "ModelStore", lambda uri: 1 / 0)
        live(out, range(3, 5), 1.0, step=2)
    assert "was damaged" not in capfd.readouterr().err
    live(out, range(5, 7), 1.0, step=4)
    (line,) = warnings_in(capfd.readouterr().err)
    assert "mlflow.json, which names the MLflow run, was damaged (" in line
    assert history(out, "loss") == [(step, step + 1.0) for step in range(1, 7)]


def test_a_new_mlflow_run_begins_when_none_carries_the_tag(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    live(out, range(1, 11), 1.0, step=0)
    client(out).delete_run(runs(out)[0].info.run_id)
    (out / "run" / "mlflow.json").write_text("{")
    live(out, range(11, 13), 1.0, step=10)
    assert history(out, "loss") == [(step, step + 1.0) for step in range(1, 13)]
    (line,) = warnings_in(capfd.readouterr().err)
    assert line.endswith(f"so everything is sent to a new one, {runs(out)[0].info.run_id}.")


def test_a_fresh_folder_does_not_take_the_mlflow_run_of_a_removed_one(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_sender, "folder_id", lambda folder: "the same path and inode")
    live(out, range(1, 11), 1.0, step=0)
    shutil.rmtree(out / "run")
    live(out, range(1, 6), 2.0, step=0)
    assert sorted(len(client(out).get_metric_history(run.info.run_id, "train/loss")) for run in runs(out)) == [5, 10]
