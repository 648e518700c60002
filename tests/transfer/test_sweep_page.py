"""A sweep in MLflow: a parent and a child for each cell, in a real database."""

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_vtab import prepare, run_here

from pipeline.base.errors import UserError
from pipeline.monitor.mlflow import store as mlflow_store
from pipeline.monitor.mlflow.state import SyncState, run_id_of, run_of_weights, write_states
from pipeline.monitor.run_page import DatasetFacts, RunFacts
from pipeline.monitor.tracking import Tracker
from pipeline.ray_tasks import RunJobs
from pipeline.settings import schema
from pipeline.settings.commands.reports import VtabReportConfig
from pipeline.settings.commands.transfer import VtabConfig
from pipeline.settings.run import TrackConfig
from pipeline.transfer import report, vtab
from pipeline.transfer.sweep import open_sweep
from pipeline.transfer.track import sweep_page
from pipeline.transfer.track.children import ChildSender, NestedRun, Pace
from pipeline.transfer.track.sweep_page import tracking_uri
from pipeline.transfer.vtab_cell import SweepJob, VtabCell

FAST = Pace(poll=0.05, retry=(0.05,), redraw=0.2, finish=300.0)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings with tiny weights and three tasks."""
    return prepare(tmp_path_factory.mktemp("vtab"))


@pytest.fixture
def uri(database: Path, tmp_path: Path) -> str:
    shutil.copy(database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def parent_and_children(uri: str) -> tuple[Any, dict[str, Any]]:
    """The only sweep of a store, and its cells by their key; fails if there are doubles, or runs outside of the sweep."""
    experiment = client(uri).get_experiment_by_name("vtab").experiment_id
    runs = list(client(uri).search_runs([experiment], max_results=5000))
    (parent,) = [run for run in runs if run.data.tags["kind"] == "vtab"]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == len(runs) - 1
    by_key = {run.data.tags["cell"]: run for run in children}
    assert len(by_key) == len(children)
    return parent, by_key


def made_up(cell: VtabCell) -> dict[str, Any]:
    """The outcome of a cell, which diverges at the highest rate."""
    assert cell.setting is not None
    outcome = {
        "steps": 2,
        "num_images": 12,
        "seconds": 3.0,
        "device": "cpu",
        "accuracy": 0.5 + cell.setting.lr,
        "loss": 1.5,
    }
    return {**outcome, "accuracy": 0.0, "diverged": 1} if cell.setting.lr == 0.1 else outcome


def in_turn(outcome: Callable[[VtabCell], dict[str, Any] | str]) -> RunJobs:
    """Yields made-up outcomes; a text is the reason of a failure."""

    def run_cells(
        function: object, jobs: Sequence[SweepJob], on_retry: object, on_failure: Callable[[int, str], None]
    ) -> Iterable[tuple[int, dict[str, Any]]]:
        for number, job in enumerate(jobs):
            found = outcome(job.cell)
            if isinstance(found, str):
                on_failure(number, found)
            else:
                yield number, found

    return run_cells


@pytest.mark.slow
def test_real_cells_are_runs_below_the_sweep(
    prepared: list[str], uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = schema.load(VtabConfig, None, [*prepared, "protocol.lr=[0.1,0.01]", "seeds=[4,5]", "tasks=[dtd,svhn]"])
    results = vtab.run(config, tmp_path / "out", run_here, uri, FAST)
    assert results is not None
    parent, children = parent_and_children(uri)
    assert (parent.info.status, parent.data.tags["outcome"]) == ("FINISHED", "finished")
    assert parent.data.tags["contamination"] == "not searched"
    assert "| DTD |" in parent.data.tags["mlflow.note.content"]
    assert parent.data.metrics["cells_done"] == 8
    assert len(parent.inputs.dataset_inputs) == 4
    assert len(children) == 8
    scores = {(row["task"], row["seed"]): row["accuracy"] for row in results["scores"]}
    for run in children.values():
        assert run.info.status == "FINISHED"
        assert run.info.end_time >= run.info.start_time
        assert run.data.metrics["train/loss"] > 0
        if run.data.params["stage"] == "final":
            assert run.data.metrics["eval/test_top1"] == scores[run.data.params["task"], int(run.data.params["seed"])]
        (training, evaluation) = run.inputs.dataset_inputs
        assert training.dataset.digest == evaluation.dataset.digest == results["data"][run.data.params["task"]]
    final = next(run for key, run in children.items() if key.startswith("dtd-final"))
    assert [found.dataset.name for found in final.inputs.dataset_inputs] == ["dtd:train800val200", "dtd:test"]
    figures = {file.path for file in client(uri).list_artifacts(parent.info.run_id, "figures")}
    assert figures == {"figures/accuracy_by_learning_rate.png", "figures/accuracy_by_task.png"}
    assert "warning" not in capfd.readouterr().err

    # The report is added to the same run.
    report.run(VtabReportConfig(sweeps=[str(tmp_path / "out")], mlflow=uri))
    parent, again = parent_and_children(uri)
    assert len(again) == 8
    assert parent.data.metrics["task_dtd"] == pytest.approx(
        sum(v for (task, _), v in scores.items() if task == "dtd") / 2
    )
    assert "report/report.md" in {file.path for file in client(uri).list_artifacts(parent.info.run_id, "report")}


@pytest.mark.slow
def test_more_cells_than_one_answer_lists_of_which_some_fail_or_diverge(
    prepared: list[str], uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.transfer.track.children._MAX_RUNS", 5)
    settings = [*prepared, "protocol.lr=[0.1,0.03]", "protocol.weight_decay=[0,0.1]", "tasks=[dtd,pets,svhn]"]
    config = schema.load(VtabConfig, None, settings)

    def first(cell: VtabCell) -> dict[str, Any] | str:
        return "the disk is full." if cell.task.name == "svhn" and cell.setting.weight_decay == 0.1 else made_up(cell)

    with pytest.raises(UserError, match="2 of 15 cells failed"):
        vtab.run(config, tmp_path / "out", in_turn(first), uri, FAST)
    parent, children = parent_and_children(uri)
    assert parent.info.status == "FAILED"
    assert "2 of 15 cells, such as the disk is full" in parent.data.tags["outcome"]
    assert (parent.data.metrics["cells_done"], parent.data.metrics["cells_failed"]) == (12, 2)
    assert len(children) == 14  # Without the final cell of svhn, whose search is not complete.
    outcomes = Counter((run.info.status, run.data.tags["outcome"]) for run in children.values())
    assert outcomes == {
        ("FINISHED", "finished"): 7, ("FAILED", "diverged by step 1"): 5, ("FAILED", "failed: the disk is full."): 2,
    }  # fmt: skip
    diverged = next(run for run in children.values() if run.data.tags["outcome"].startswith("diverged"))
    assert "eval/val_top1" not in diverged.data.metrics

    # The same command again: cells that failed are sent again, into the same runs; the others are left alone.
    ended = {key: run.info.end_time for key, run in children.items() if run.info.status == "FINISHED"}
    vtab.run(config, tmp_path / "out", in_turn(made_up), uri, FAST)
    parent, again = parent_and_children(uri)
    assert (parent.info.status, len(again)) == ("FINISHED", 15)
    assert {key: again[key].info.run_id for key in children} == {key: run.info.run_id for key, run in children.items()}
    assert {key: again[key].info.end_time for key in ended} == ended
    assert Counter(run.info.status for run in again.values()) == {"FINISHED": 9, "FAILED": 6}
    assert parent.data.metrics["task_svhn"] == pytest.approx(0.53)
    assert "warning" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("method", "tried"), [("finetune", "3 of 19 tasks, 2 settings."), ("linear", "3 of 19 tasks.")]
)
def test_only_fine_tuning_is_said_to_try_settings(prepared: list[str], tmp_path: Path, method: str, tried: str) -> None:
    config = schema.load(VtabConfig, None, [*prepared, f"method={method}", "protocol.lr=[0.1,0.01]"])
    sweep = open_sweep(config, tmp_path)
    assert tried in sweep_page._facts(sweep, vtab._header(sweep, {}, {}), 6, "").description


def cell_of(number: int, accuracy: float = 0.5) -> NestedRun:
    return NestedRun(
        f"cell-{number}", f"cell {number}", "FINISHED", 1_000_000, 2_000_000, {"lr": 0.1, "seed": number},
        {"val_top1": accuracy}, {"outcome": "finished"},
        (DatasetFacts("dtd", "/data/dtd", "0123456789abcdef", "val200", 200, 47, "evaluation"),),
    )  # fmt: skip


REQUESTS = ("get_run", "search_runs", "create_run", "log_batch", "log_inputs", "set_terminated")


def killed_before(patch: pytest.MonkeyPatch, request: int) -> None:
    """Kill a sender of children before its request of this number."""
    from mlflow import MlflowClient

    left = iter(range(request - 1, -1, -1))

    def counted(send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread().name == "mlflow children" and not next(left):
                raise SystemExit  # Ends the thread.
            return send(*arguments, **named)

        return sent

    for name in REQUESTS:
        patch.setattr(MlflowClient, name, counted(getattr(MlflowClient, name)))


def begin_parent(uri: str, folder: Path) -> Tracker:
    tracker = Tracker(TrackConfig(uri=uri, experiment="vtab"), folder, folder / "sweep", RunFacts("sweep", "vtab"))
    while not run_id_of(folder / "sweep"):
        time.sleep(0.05)
    return tracker


@pytest.mark.slow
def test_a_sender_killed_between_any_two_requests_leaves_neither_doubles_nor_gaps(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = begin_parent(uri, tmp_path)
    for request in range(1, 12):
        sender = ChildSender(tmp_path / "sweep", uri, {"kind": "cell"}, pace=FAST)
        sender.add([cell_of(number, request / 100) for number in range(3)])
        with monkeypatch.context() as patch:
            killed_before(patch, request)
            sender.begin()
            sender._thread.join(300)
        assert not sender._thread.is_alive()
        assert sender._queue
    # Two requests find the parent's children; three cells take twelve.
    sender = ChildSender(tmp_path / "sweep", uri, {"kind": "cell"}, pace=FAST)
    sender.add([cell_of(number) for number in range(3)])
    sender.begin()
    assert sender.end()
    tracker.finish("FINISHED")
    _, children = parent_and_children(uri)
    assert sorted(children) == ["cell-0", "cell-1", "cell-2"]
    for run in children.values():
        assert run.info.status == "FINISHED"
        assert (run.info.start_time, run.info.end_time) == (1_000_000, 2_000_000)
        assert run.data.metrics["eval/val_top1"] == 0.5
        assert len(run.inputs.dataset_inputs) == 1


@pytest.mark.slow
def test_a_store_that_is_away_delays_nothing_and_gets_all_at_the_next_start(
    prepared: list[str], uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = schema.load(VtabConfig, None, [*prepared, "protocol.lr=[0.01]"])
    away = f"sqlite:///{tmp_path / 'away' / 'mlflow.db'}"
    (tmp_path / "away").touch()  # A file where the database's folder should be.
    # Whoever asks for the store waits until the last cell.
    is_last, create, left = threading.Event(), mlflow_store._create_database, [1, 2, 3]
    monkeypatch.setattr(mlflow_store, "_create_database", lambda path: (is_last.wait(), create(path)))

    def counted(cell: VtabCell) -> dict[str, Any]:
        left.pop()
        if not left:
            is_last.set()
        return made_up(cell)

    results = vtab.run(config, tmp_path / "out", in_turn(counted), away, replace(FAST, finish=1.0))
    assert not left
    said = capfd.readouterr().err
    assert said.count("cells are sent later") <= 1
    assert f"MLflow at {away} has not received 3 cells of {tmp_path / 'out'}: the same command sends them" in said
    (tmp_path / "away").unlink()
    (tmp_path / "away").mkdir()
    shutil.copy(tmp_path / "mlflow.db", tmp_path / "away" / "mlflow.db")
    assert vtab.run(config, tmp_path / "out", in_turn(made_up), away, FAST) == results
    assert len(parent_and_children(away)[1]) == 3
    # Another store gets all of it.
    vtab.run(config, tmp_path / "out", in_turn(made_up), uri, FAST)
    assert len(parent_and_children(uri)[1]) == 3


def test_where_a_sweep_is_sent(prepared: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = schema.load(VtabConfig, None, [*prepared, "protocol.lr=[0.1]"])
    assert tracking_uri(config) == f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    assert tracking_uri(replace(config, out="results/a")) == f"sqlite:///{tmp_path / 'results' / 'mlflow.db'}"
    assert tracking_uri(replace(config, mlflow="http://host:5000")) == "http://host:5000"
    assert tracking_uri(replace(config, mlflow="none")) == ""
    run = tmp_path / "runs" / "vit"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    write_states(run / "mlflow.json", {"http://team:5000": SyncState("abc")})
    for weights in (run, run / "checkpoints" / "step-00000001" / "model.safetensors"):
        assert tracking_uri(replace(config, weights=str(weights))) == "http://team:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other:5000")
    assert tracking_uri(replace(config, weights=str(run))) == "http://other:5000"


@pytest.mark.parametrize("place", ["disk", "s3://bucket/all"])
def test_a_sweep_finds_the_run_that_keeps_its_checkpoints_elsewhere(
    prepared: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Also by a checkpoint, which for a bucket is a copy on a disk. The sweep named no run at all."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run, checkpoint = Path("runs/vit"), Path("disk/vit/step-00000001")
    for folder in (run, checkpoint):
        folder.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"name": "vit", "checkpoint": {"folder": place}}))
    write_states(run / "mlflow.json", {"http://team:5000": SyncState("abc")})
    identity = {"name": "vit", "out": "runs", "checkpoint.folder": place}
    (checkpoint / "state.json").write_text(json.dumps({"identity": identity}))
    shutil.copy(prepared[0].removeprefix("weights="), checkpoint / "model.pt")
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    config = schema.load(VtabConfig, None, [*prepared, "protocol.lr=[0.01]", "tasks=[dtd]"])
    names = [checkpoint, checkpoint / "model.pt", *([run] if place == "disk" else [])]
    for number, weights in enumerate(names):
        named = replace(config, weights=str(weights))
        assert tracking_uri(named) == "http://team:5000"
        results = vtab.run(named, tmp_path / f"out-{number}", in_turn(made_up))
        assert results is not None
        assert results["checkpoint"]["run_id"] == "abc"
    # A run of this name that keeps its checkpoints in another place is another run.
    (run / "config.json").write_text(json.dumps({"name": "vit", "checkpoint": {"folder": f"{place}/2"}}))
    assert run_of_weights(str(checkpoint)) is None


def test_a_sweep_is_below_the_run_of_its_weights_in_the_same_store(
    prepared: list[str], uri: str, tmp_path: Path
) -> None:
    """The run was sent to another store later, where it has another ID."""
    run = tmp_path / "runs" / "vit"
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    shutil.copy(prepared[0].removeprefix("weights="), checkpoint / "model.pt")
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    write_states(run / "mlflow.json", {uri: SyncState("here"), "http://team:5000": SyncState("there")})
    config = schema.load(VtabConfig, None, [*prepared, f"weights={run}", "protocol.lr=[0.01]", "tasks=[dtd]"])
    vtab.run(config, tmp_path / "out", in_turn(made_up), uri, FAST)
    parent, _ = parent_and_children(uri)
    assert parent.data.tags["mlflow.parentRunId"] == "here"
