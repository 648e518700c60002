"""MLflow never delays a step, and receives every metric once: at once, or when it can be reached again."""

import json
import math
import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from polling import until
from tracked_steps import log_step

from pipeline.monitor.export import ExportTiming, run_id_of
from pipeline.monitor.page_folder import Start
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker, default_uri, send_report
from pipeline.settings.run import TrackConfig

FAST = ExportTiming(poll=0.05, retry=(0.05,), finish=300)
NOBODY = "http://127.0.0.1:1"  # A port that no other test is given meanwhile.
PARAMETERS = {f"section.field{i}": i for i in range(120)} | {"long": "x" * 9000, "nothing": None}


def start(
    out: Path,
    uri: str = "",
    enabled: bool = True,
    step: int | None = None,
    timing: ExportTiming = FAST,
    changed: str = "",
    **parameters: object,
) -> Tracker:
    facts = RunFacts(
        "run",
        "pretrain",
        {**PARAMETERS, **parameters},
        {"data": "abc"},
        steps=1000,
        artifacts=("config.yaml", "scores.json"),
    )
    track, began = TrackConfig(uri=uri, enabled=enabled), Start(0, step or 0, changed=changed)
    return Tracker(track, out, out / "run", facts, step, timing, began=began)


def live(out: Path, steps: range, value: float, step: int | None = None, **others: Any) -> list[str]:
    """One start of a run that continues from `step` and logs `steps`, with an evaluation every tenth; returns its
    notes.
    """
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
    return [
        (m.step, m.value)
        for m in client(out, uri).get_metric_history(run.info.run_id, RunFacts("", "").sent_name(name))
    ]


def arrived(out: Path) -> bool:
    """Whether the store has the run and a metric of it."""
    found = runs(out)
    return bool(found and found[0].data.metrics)


def written(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]


def test_everything_arrives_in_one_run_over_two_lives(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = start(out)
    for step in range(1, 701):  # more than a batch
        tracker.log(step, {"loss": 1 / step, "lr": step * 1e-6})
    (out / "run" / "config.yaml").write_text("{}")  # There are no scores yet.
    tracker.finish("FAILED")
    (run,) = runs(out)
    assert (run.info.status, run.data.params["section.field7"], len(run.data.params)) == (
        "FAILED",
        "7",
        len(PARAMETERS),
    )
    assert (run.data.tags["data"], run.data.tags["kind"]) == ("abc", "pretrain")
    # Beside the database, and not in whatever folder the command was started in; a run folder with the same names.
    (artifacts,) = (out / "mlartifacts").glob("*/artifacts")
    found = sorted(str(path.relative_to(artifacts)) for path in artifacts.rglob("*") if path.is_file())
    assert found == ["config.yaml", "metrics.jsonl", "run.json"]

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


def test_an_absent_server_delays_nothing_and_loses_nothing(
    out: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = start(out, uri=NOBODY)
    for step in range(100):
        log_step(tracker, step, {"loss": float(step)})
    tracker.finish("FINISHED")
    assert not tracker._exports[0].thread.is_alive(), "it gave up by itself, and not because its time was over"
    assert capfd.readouterr().err.count("cannot be reached") == 1
    assert len(written(out)) == 100

    # The server is back under the same name: here, a store that the client takes for it.
    from mlflow import tracking

    real = tracking.MlflowClient
    monkeypatch.setattr(tracking, "MlflowClient", lambda tracking_uri: real(default_uri(out)))
    monkeypatch.chdir(out)  # A server chooses where artifacts go, and this store takes the current folder.
    tracker = start(out, uri=NOBODY)
    tracker.log(100, {"loss": 100.0})
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(step, float(step)) for step in range(101)]


def test_a_server_that_answers_slowly_does_not_hold_up_the_end(
    out: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, over = threading.Event(), threading.Event()
    tracker = start(out, timing=ExportTiming(poll=0.05, finish=0.3))
    monkeypatch.setattr(tracker._exports[0].exporter, "log", lambda *_: (asked.set(), over.wait()))
    tracker.log(1, {"loss": 1.0})
    assert asked.wait(300)
    tracker.finish("FINISHED")  # Returns, although there is no answer.
    over.set()
    assert "has not received all of" in capfd.readouterr().err
    assert len(written(out)) == 1


def test_an_outage_that_begins_at_the_end_of_a_run_is_waited_for(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = start(out, timing=ExportTiming(poll=300, retry=(0.05,) * 3, finish=300))
    until(lambda: tracker._exports[0]._next_look)  # The store has answered, and the thread waits.
    exporter, failures = tracker._exports[0].exporter, [ConnectionError("busy"), ConnectionError("busy")]
    send = exporter.log

    def log(records: Any) -> None:
        if failures:
            raise failures.pop()
        send(records)

    monkeypatch.setattr(exporter, "log", log)
    tracker.log(1, {"loss": 1.0})
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(1, 1.0)]
    assert runs(out)[0].info.status == "FINISHED"


def test_a_page_that_cannot_be_written_does_not_keep_mlflow_from_the_end(out: Path) -> None:
    """A run that failed on a full disk went on for ever in MLflow, and the error of its page hid that of its
    metrics.
    """
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
    (out / "run/.run.json.tmp").mkdir()  # Where it is written before it is renamed.
    with pytest.raises(IsADirectoryError) as error:
        tracker.finish("FAILED")
    assert error.value.filename == str(out / "run/run.json")
    assert [run.info.status for run in runs(out)] == ["FAILED"]


def test_each_tracking_uri_has_its_own_state(out: Path, database: Path) -> None:
    shutil.copy(database, out / "other.db")
    other = f"sqlite:///{out / 'other.db'}?password=secret"
    for step, uri in enumerate(["", other, "", other]):
        tracker = start(out, uri=uri)
        tracker.log(step, {"loss": float(step)})
        tracker.finish("FINISHED")
    # One run in each store; each has what was logged until it was last used.
    assert history(out, "loss") == [(step, float(step)) for step in range(3)]
    assert history(out, "loss", other) == [(step, float(step)) for step in range(4)]
    assert "secret" not in (out / "run" / "mlflow.json").read_text()


def test_a_run_that_is_deleted_is_made_again_with_everything(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = start(out)
    tracker.log(1, {"loss": 1.0})
    until(lambda: arrived(out))
    client(out).delete_run(runs(out)[0].info.run_id)
    tracker.log(2, {"loss": 2.0})
    tracker.finish("FINISHED")
    assert history(out, "loss") == [(1, 1.0), (2, 2.0)]
    (run,) = runs(out)
    assert (run.info.status, run.data.params["section.field7"]) == ("FINISHED", "7")
    assert "(deleted?)" in capfd.readouterr().err


def test_nan_and_inf(out: Path) -> None:
    tracker = start(out)
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    tracker.finish("FINISHED")
    found = {name: float(value) for name, value in written(out)[0]["metrics"].items()}
    assert math.isnan(found.pop("a"))
    assert found == {"b": math.inf, "c": -math.inf, "d": 1}
    assert math.isnan(history(out, "a")[0][1])
    # MLflow stores infinity as the largest double.
    assert history(out, "b") == [(1, 1.7976931348623157e308)]
    assert history(out, "d") == [(1, 1.0)]


def test_disabled_tracking_writes_the_file_only(out: Path) -> None:
    before = (out / "mlflow.db").read_bytes()
    tracker = start(out, enabled=False)
    tracker.log(1, {"loss": 1.0})
    tracker.finish("FINISHED")
    assert [line["metrics"] for line in written(out)] == [{"loss": 1.0}]
    # The page is for launch/track_sync.py, which can send the run later.
    assert {path.name for path in (out / "run").iterdir()} == {"metrics.jsonl", "page", "run.json"}
    assert (out / "mlflow.db").read_bytes() == before


def test_a_report_made_twice_is_one_run(out: Path) -> None:
    uri, report = default_uri(out), out / "report"
    report.mkdir()
    (report / "stats.json").write_text("{}")
    facts = RunFacts("stats x", "data", tags={"tag": "value"})
    for value in (1.0, 2.0):
        send_report(uri, report, facts, {"train.samples": value}, [report / "stats.json"])
    (sent,) = runs(out)
    assert (sent.info.run_name, sent.info.status) == ("stats x", "FINISHED")
    assert (sent.data.metrics["train.samples"], sent.data.tags["tag"]) == (2.0, "value")


# -------------------------------------------------------------------- steps that run again
def test_steps_that_run_again_after_a_kill_are_not_sent_again(out: Path) -> None:
    assert live(out, range(1, 38), 1.0, step=0) == []
    sent = client(out).get_metric_history(runs(out)[0].info.run_id, "train/loss")
    (note,) = live(out, range(21, 51), 1.0, step=20)
    assert "removed 18 lines, damaged or after step 20" in note
    found = client(out).get_metric_history(runs(out)[0].info.run_id, "train/loss")
    assert [(m.step, m.value) for m in found] == [(step, step + 1.0) for step in range(1, 51)]
    assert found[:37] == sent
    assert history(out, "val_top1") == [(step, 1.0) for step in (10, 20, 30, 40, 50)]
    assert [line["step"] for line in written(out) if "loss" in line["metrics"]] == list(range(1, 51))
    (run,) = runs(out)
    assert "rollbacks" not in run.data.tags


def test_points_that_were_sent_before_the_state_was_saved_are_one_point(out: Path) -> None:
    """After a kill between sending points and saving mlflow.json, which then says that fewer points were sent."""
    live(out, range(1, 11), 1.0, step=0)
    before = (out / "run" / "mlflow.json").read_text()
    live(out, range(11, 21), 1.0, step=10)
    (out / "run" / "mlflow.json").write_text(before)
    live(out, range(21, 22), 1.0, step=20)
    assert history(out, "loss") == [(step, step + 1.0) for step in range(1, 22)]


def test_after_a_rollback_the_new_points_follow_and_a_tag_says_so(out: Path) -> None:
    tracker = start(out, step=0)
    for step in range(1, 31):
        tracker.log(step, {"loss": float(step)})
    until(lambda: arrived(out) and runs(out)[0].data.metrics.get("train/loss") == 30.0)
    assert len(tracker.go_back(20)) == 1
    for step in range(21, 31):
        tracker.log(step, {"loss": 100.0 + step})
    tracker.go_back(25)  # Before the thread has looked, or after.
    for step in range(26, 41):
        tracker.log(step, {"loss": 200.0 + step})
    tracker.finish("FINISHED")
    found = history(out, "loss")
    assert sorted(found)[:20] == [(step, float(step)) for step in range(1, 21)]
    assert {(step, float(step)) for step in range(21, 31)} < set(found)
    expected = [(step, 100.0 + step) for step in range(21, 26)] + [(step, 200.0 + step) for step in range(26, 41)]
    assert set(expected) < set(found)
    assert [line["step"] for line in written(out)] == list(range(1, 41))
    (run,) = runs(out)
    assert run.data.tags["rollbacks"].startswith("went back to step 20")
    assert run.data.metrics["train/loss"] == 240.0


def test_steps_that_run_again_with_other_settings_follow_too(out: Path) -> None:
    live(out, range(1, 31), 1.0, step=0)
    live(out, range(21, 32), 5.0, step=20, changed="optimizer.lr was 1, is 2")
    found = history(out, "loss")
    assert {(25, 26.0), (25, 30.0), (31, 36.0)} < set(found)
    assert len(found) == 41
    assert "20" in runs(out)[0].data.tags["rollbacks"]
    # Begun anew in the same folder: with the same settings as before, then with others.
    live(out, range(1, 3), 1.0, step=0)
    assert len(history(out, "loss")) == 41
    live(out, range(1, 3), 7.0, step=0, seed=3)
    assert {(1, 8.0), (2, 9.0)} < set(history(out, "loss"))


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
    found = history(out, "loss")
    assert {step for step, value in found if value == 1.0} >= set(range(1, 6))
    assert [(step, value) for step, value in sorted(found) if value == 2.0] == [(step, 2.0) for step in range(6, 11)]


def test_an_evaluation_that_is_done_again_is_recorded_once(out: Path) -> None:
    live(out, range(1, 11), 1.0, step=0)
    tracker = start(out, step=10)
    tracker.log(10, {"val_top1": 1.0, "pets_5shot": 0.5})
    tracker.log(11, {"loss": 12.0})
    tracker.finish("FINISHED")
    assert history(out, "val_top1") == [(10, 1.0)]
    assert history(out, "pets_5shot") == [(10, 0.5)]
    assert sum("val_top1" in line["metrics"] for line in written(out)) == 1


# -------------------------------------------------------------------- kills, and several processes
def test_the_run_of_a_killed_start_is_used_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill came after the run was created, and before mlflow.json had its ID."""
    live(out, range(1, 3), 1.0, step=0)
    first, file = run_id_of(out / "run"), out / "run" / "mlflow.json"
    file.write_text(file.read_text().replace(str(first), ""))
    live(out, range(3, 5), 1.0, step=2)
    assert run_id_of(out / "run") == first
    assert history(out, "loss") == [(step, step + 1.0) for step in range(1, 5)]


def test_a_damaged_state_sends_everything_to_a_new_run(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    live(out, range(1, 3), 1.0, step=0)
    first = run_id_of(out / "run")
    (out / "run" / "mlflow.json").write_text("{")
    live(out, range(3, 5), 1.0, step=2)
    assert "mlflow.json" in capfd.readouterr().err
    assert len(runs(out)) == 2
    second = run_id_of(out / "run")
    assert second != first
    assert [m.step for m in client(out).get_metric_history(second, "train/loss")] == [1, 2, 3, 4]


# -------------------------------------------------------------------- another tracker
def test_tensorboard_receives_each_point_once_over_a_kill(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = TrackConfig(enabled=False, tensorboard=True)
    for first, last in ((1, 15), (11, 20)):
        facts = RunFacts("run", "pretrain", {"lr": 0.1}, description="What it is.", steps=20)
        tracker = Tracker(config, tmp_path, tmp_path / "run", facts, first - 1, FAST)
        for step in range(first, last + 1):
            tracker.log(step, {"loss": float(step)})
        tracker.finish("FINISHED")
    events = loader.EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"scalars": 0})
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [
        (s, float(s)) for s in range(1, 21)
    ]
    assert {"description/text_summary", "parameters/text_summary"} <= set(events.Tags()["tensors"])
    assert not (tmp_path / "mlflow.db").exists()
