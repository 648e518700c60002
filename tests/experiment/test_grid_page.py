"""A fine-tuning grid in MLflow: its runs send themselves below it; here without training, by their trackers alone."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from child_runs import instead_of_commands, leave_behind
from tiny import make_dataset

from pipeline.base.errors import UserError
from pipeline.cluster.status_files import RESUME
from pipeline.experiment import grid
from pipeline.experiment.engine import uri_of_runs
from pipeline.experiment.spec import RunSpec
from pipeline.settings import schema
from pipeline.settings.commands.reports import GridConfig
from pipeline.settings.run import TrackConfig

RUN = """
name: x
data: {path: DATA, streams: 4}
train: {length: 12 steps, global_batch: 24, micro_batch: 24}
track: {experiment: pets}
"""


@pytest.fixture
def config(tmp_path: Path) -> GridConfig:
    make_dataset(tmp_path / "data", {"train": 30, "val": 12})
    (tmp_path / "run.yaml").write_text(RUN.replace("DATA", str(tmp_path / "data")))
    return schema.load(
        GridConfig,
        None,
        [
            f"run={tmp_path / 'run.yaml'}",
            "name=tiny",
            f"out={tmp_path / 'runs'}",
            "settings=[init.weights=x]",
            "lr=[0.1,0.01,10]",
            "seeds=[3,4]",
            "dev_share=0.2",
        ],
    )


def start(run: RunSpec) -> int:
    """The highest rate diverges."""
    lr = run.config.optimizer.lr
    return leave_behind(run, "finetune", 0.9 + lr / 10 + run.config.seed / 1000, diverged=lr == 10)


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def parent_and_children(uri: str) -> tuple[Any, dict[str, Any]]:
    runs = client(uri).search_runs([client(uri).get_experiment_by_name("pets").experiment_id])
    (parent,) = [run for run in runs if run.data.tags["kind"] == "grid"]
    children = {run.info.run_name: run for run in runs if run is not parent}
    assert len(children) == len(runs) - 1
    assert all(run.data.tags.get("mlflow.parentRunId") == parent.info.run_id for run in children.values())
    return parent, children


@pytest.mark.slow
def test_a_grid_and_its_runs_find_each_other(
    config: GridConfig,
    database: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    assert uri_of_runs(config.mlflow, TrackConfig(), config.out) == uri
    (tmp_path / "runs").mkdir()
    shutil.copy(database, tmp_path / "runs" / "mlflow.db")

    def stop_at_the_second(run: RunSpec) -> int:
        return RESUME if run.name == "lr-0.01" else start(run)

    instead_of_commands(monkeypatch, stop_at_the_second)
    with pytest.raises(SystemExit):
        grid.run(config)
    parent, children = parent_and_children(uri)
    assert (parent.info.status, set(children)) == ("KILLED", {"lr-0.1"})
    instead_of_commands(monkeypatch, start)
    result = grid.run(config)
    assert result
    again, children = parent_and_children(uri)
    assert (again.info.run_id, again.info.status) == (parent.info.run_id, "FINISHED")
    assert set(children) == {"lr-0.1", "lr-0.01", "lr-10", "final-seed-3", "final-seed-4"}
    for run in children.values():
        assert run.data.tags["group_run_id"] == parent.info.run_id
    assert again.data.metrics["top1"] == result["top1"] == pytest.approx(0.9135)
    assert (again.data.metrics["best_lr"], again.data.metrics["runs_done"]) == (0.1, 5)
    assert [used.dataset.name for used in again.inputs.dataset_inputs] == ["data:train", "data:val"]
    assert {"report.md", "results.json"} <= {file.path for file in client(uri).list_artifacts(parent.info.run_id)}
    assert "warning" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_grid_that_fails_or_sends_nothing(
    config: GridConfig, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: RunSpec) -> int:
        return 1

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    shutil.copy(database, tmp_path / "mlflow.db")
    instead_of_commands(monkeypatch, fails)
    with pytest.raises(UserError, match=r"lr-0\.1 failed \(exit code 1\)"):
        grid.run(replace(config, mlflow=uri))
    parent, _ = parent_and_children(uri)
    assert parent.info.status == "FAILED"
    assert "lr-0.1 failed (exit code 1)" in parent.data.tags["outcome"]
    elsewhere = ["track.enabled=false", "track.uri=postgresql://ann:secret@host/db"]
    silent = replace(config, name="silent", settings=[*config.settings, *elsewhere])
    instead_of_commands(monkeypatch, start)
    grid.run(silent)
    for name in ("results.json", "report.md"):
        assert "track.uri=postgresql://ann:***@host/db" in (tmp_path / "runs" / "silent" / name).read_text()
    assert not (tmp_path / "runs" / "mlflow.db").exists()
    assert not (tmp_path / "runs" / "silent" / "mlflow.json").exists()
    assert uri_of_runs("none", TrackConfig(), config.out) == ""
