"""A study in MLflow: a parent with its cells below it; here without training, by the trackers of its runs alone."""

from pathlib import Path
from typing import Any

import pytest
from child_runs import instead_of_commands, leave_behind
from tiny import make_dataset
from tiny_study import write_run

from pipeline.experiment import study
from pipeline.experiment.spec import RunSpec
from pipeline.settings import schema
from pipeline.settings.commands.study import StudyConfig


@pytest.fixture
def config(tmp_path: Path) -> StudyConfig:
    make_dataset(tmp_path / "data", {"train": 60, "val": 12})
    run = write_run(tmp_path, tmp_path / "data", "{experiment: photos}")
    return schema.load(
        StudyConfig,
        None,
        [
            f"run={run}",
            "name=shapes",
            f"out={tmp_path / 'runs'}",
            "question=ablation",
            "tflops=1",
            "models=[{name: wide,settings: [model.width=32]},{name: slim},{name: odd,settings: [model.gelu=erf]}]",
        ],
    )


@pytest.mark.slow
def test_a_study_is_a_parent_run_with_its_cells_below_it(
    config: StudyConfig, database: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlflow.tracking import MlflowClient

    def start(run: RunSpec) -> int:
        top1 = {"wide": 0.75, "slim": 0.5, "odd": 0.25}[run.name.split("-")[0]]
        return leave_behind(run, "pretrain", top1, diverged=run.name.startswith("odd"))

    instead_of_commands(monkeypatch, start)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mlflow.db").write_bytes(database.read_bytes())
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")

    def runs() -> tuple[Any, dict[str, Any]]:
        found = client.search_runs([client.get_experiment_by_name("photos").experiment_id])
        (parent,) = [run for run in found if run.data.tags["kind"] == "study"]
        return parent, {run.info.run_name: run for run in found if run is not parent}

    results = study.run(config)
    assert results
    parent, children = runs()
    assert parent.info.status == "FINISHED"
    assert set(children) == {"wide-seed0", "slim-seed0", "odd-seed0"}
    for name, run in children.items():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert {cell.name: cell.run_id for cell in results.cells}[name] == run.info.run_id
    metrics = parent.data.metrics
    assert (metrics["runs_done"], metrics["runs_diverged"], metrics["runs_failed"]) == (2, 1, 0)
    assert parent.data.params["models"] == "['wide', 'slim', 'odd']"
    tags = parent.data.tags
    assert (tags["question"], tags["score"], tags["dataset"]) == ("ablation", "75.00 % top-1 data:val", "data")
    assert metrics["score"] == 75
    assert "| slim | 1 | 50.00" in tags["mlflow.note.content"], "the answer's table"
    artifacts = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"report.md", "report.html", "results.parquet"} <= artifacts


def test_a_study_that_is_not_tracked_has_no_page(config: StudyConfig) -> None:
    from dataclasses import replace

    assert study.Study(replace(config, mlflow="none")).page() is None
    assert study.Study(replace(config, settings=["track.enabled=false"])).page() is None
