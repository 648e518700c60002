"""A fine-tuning grid in MLflow: its runs send themselves below it; here without training, by their trackers alone."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from child_runs import leave_behind
from tiny import make_dataset

from pipeline.base.errors import UserError
from pipeline.lifecycle.run_folder import RESUME
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker
from pipeline.settings import schema
from pipeline.settings.commands.reports import GridConfig
from pipeline.settings.run import TrackConfig
from pipeline.transfer import grid
from pipeline.transfer.child_run import ChildRun
from pipeline.transfer.track import figures
from pipeline.transfer.track.grid_page import _facts
from pipeline.transfer.track.parent_page import ParentPage, uri_of_runs
from pipeline.transfer.vtab_tasks import TASKS

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
        GridConfig, None,
        [f"run={tmp_path / 'run.yaml'}", "name=tiny", f"out={tmp_path / 'runs'}", "settings=[init.weights=x]",
         "lr=[0.1,0.01,10]", "seeds=[3,4]", "dev_share=0.2"],
    )  # fmt: skip


def start(run: ChildRun, config: GridConfig) -> int:
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
    monkeypatch.setattr(figures, "png", lambda figure: b"drawn")  # The last test of this file renders all figures.
    uri = f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    assert uri_of_runs(config.mlflow, TrackConfig(), config.out) == uri
    (tmp_path / "runs").mkdir()
    shutil.copy(database, tmp_path / "runs" / "mlflow.db")

    def stop_at_the_second(run: ChildRun, config: GridConfig) -> int:
        return RESUME if run.name == "lr-0.01" else start(run, config)

    with pytest.raises(SystemExit):
        grid.run(config, stop_at_the_second)
    parent, children = parent_and_children(uri)
    assert (parent.info.status, set(children)) == ("KILLED", {"lr-0.1"})
    result = grid.run(config, start)
    again, children = parent_and_children(uri)
    assert (again.info.run_id, again.info.status) == (parent.info.run_id, "FINISHED")
    assert set(children) == {"lr-0.1", "lr-0.01", "lr-10", "final-seed-3", "final-seed-4"}
    for run in children.values():
        assert run.data.tags["group_run_id"] == parent.info.run_id
    assert again.data.metrics["top1"] == result["top1"] == pytest.approx(0.9135)
    assert (again.data.metrics["best_lr"], again.data.metrics["runs_done"]) == (0.1, 5)
    assert [used.dataset.name for used in again.inputs.dataset_inputs] == ["data:train", "data:val"]
    found = {file.path for file in client(uri).list_artifacts(parent.info.run_id, "page/figures")}
    assert found == {"page/figures/accuracy_by_learning_rate.png", "page/figures/final_accuracy.png"}
    assert {"report.md", "results.json"} <= {file.path for file in client(uri).list_artifacts(parent.info.run_id)}
    assert "warning" not in capfd.readouterr().err

    # In another store, to which its runs were sent before the grid was: they are linked at the end.
    shutil.copy(database, tmp_path / "other.db")
    other = replace(config, mlflow=f"sqlite:///{tmp_path / 'other.db'}")
    for name in children:
        facts = RunFacts(name, "finetune")
        track = TrackConfig(uri=other.mlflow, experiment="pets")
        Tracker(track, tmp_path, tmp_path / "runs" / "tiny" / name, facts).finish("FINISHED")
    grid.run(other, lambda *_: pytest.fail("a finished run is started again"))
    assert len(parent_and_children(other.mlflow)[1]) == 5


@pytest.mark.slow
def test_a_grid_of_a_part_of_the_images_tells_their_number(config: GridConfig, tmp_path: Path) -> None:
    limited = replace(config, mlflow="none", settings=[*config.settings, "data.limit=20"])
    trial = grid.make_run(limited, "lr-0.1", 0.1, 3, 0.2)
    dataset, num_train, _ = grid._check_data(trial, limited)
    facts = _facts(limited, trial.config, dataset, num_train, 5)
    assert [(used.context, used.num_samples) for used in facts.datasets] == [("training", 20), ("evaluation", 12)]
    assert "tried on 20 % of 20 images of `train`, held out" in facts.description
    grid.run(limited, start)
    report = (tmp_path / "runs" / "tiny" / "report.md").read_text()
    assert (
        "of the 20 training images, held out at random (dev_share = 0.2); the final runs then train on all of them"
        in report
    )


@pytest.mark.slow
def test_a_grid_that_fails_or_sends_nothing(config: GridConfig, database: Path, tmp_path: Path) -> None:
    def fails(run: ChildRun, config: GridConfig) -> int:
        return 1

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    shutil.copy(database, tmp_path / "mlflow.db")
    with pytest.raises(UserError, match=r"lr-0\.1 failed \(exit code 1\)"):
        grid.run(replace(config, mlflow=uri), fails)
    parent, _ = parent_and_children(uri)
    assert parent.info.status == "FAILED"
    assert "lr-0.1 failed (exit code 1)" in parent.data.tags["outcome"]
    elsewhere = ["track.enabled=false", "track.uri=postgresql://ann:secret@host/db"]
    silent = replace(config, name="silent", settings=[*config.settings, *elsewhere])
    grid.run(silent, start)
    for name in ("results.json", "report.md"):
        assert "track.uri=postgresql://ann:***@host/db" in (tmp_path / "runs" / "silent" / name).read_text()
    assert not (tmp_path / "runs" / "mlflow.db").exists()
    assert not (tmp_path / "runs" / "silent" / "mlflow.json").exists()
    assert uri_of_runs("none", TrackConfig(), config.out) == ""


@pytest.mark.slow
def test_a_parent_in_a_store_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """For a minute nothing said why no run began."""
    monkeypatch.setattr("pipeline.process.waits.NOTICE_SECONDS", 0.1)
    monkeypatch.setattr("pipeline.transfer.track.parent_page._WAIT", 2.0)
    page = ParentPage(RunFacts("tiny", "grid"), tmp_path / "tiny", tmp_path, "http://127.0.0.1:1", "vit")
    assert page.parent_run() == ""
    said = capfd.readouterr().err
    assert f"waiting for MLflow at http://127.0.0.1:1 to have the run of {tmp_path / 'tiny'}, at most 2 s" in said
    assert "has not answered: the runs of" in said
    page.__exit__(None, None, None)


@pytest.mark.slow
def test_figures_are_drawn_of_whatever_has_ended(tmp_path: Path) -> None:
    whole = {task.name: {rate: (0.5, 2, int(rate == 1)) for rate in (0.1, 1.0)} for task in TASKS}
    without_diverged = {**whole, "dtd": {0.1: (0.5, 1, 0), 1.0: (0.4, 1, 0)}}
    trials = [{"lr": 0.1, "top1": 0.9}, {"lr": 1.0, "diverged": "the loss is nan."}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Matplotlib says by a warning that labels are cut off.
        drawn = [
            *(figures.draw_rates_of_groups(tried) for tried in (whole, without_diverged, {"dtd": {0.1: (0.0, 1, 1)}})),
            *(figures.draw_rates_of_grid(tried, 0.1) for tried in (trials, trials[:1], trials[1:])),
            *(figures.draw_finals([{"seed": seed, "top1": 0.9} for seed in range(num)], "val") for num in (1, 3)),
        ]
    assert all(picture.startswith(b"\x89PNG") for picture in drawn)
