"""A sweep in MLflow: its scores and table of cells, in a real database."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_vtab import in_turn, prepare, run_here

from pipeline.base.errors import UserError
from pipeline.experiment import vtab
from pipeline.experiment.vtab import tracking_uri
from pipeline.experiment.vtab_cell import VtabCell
from pipeline.monitor.export import run_of_weights
from pipeline.settings import schema
from pipeline.settings.commands.transfer import VtabConfig


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


def runs(uri: str) -> list[Any]:
    experiment = client(uri).get_experiment_by_name("vtab").experiment_id
    return list(client(uri).search_runs([experiment], order_by=["attributes.start_time ASC"]))


def cells_in(uri: str, run: Any, folder: Path) -> dict[str, dict[str, str]]:
    """The rows of the table of cells among the artifacts, by cell."""
    with open(client(uri).download_artifacts(run.info.run_id, "results.csv", str(folder))) as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def write_states(file: Path, **ids: str) -> None:
    file.write_text(json.dumps({uri: {"run_id": run_id} for uri, run_id in ids.items()}))


def made_up(cell: VtabCell) -> dict[str, Any]:
    """The outcome of a cell, which diverges at the highest rate."""
    if cell.setting.lr == 0.1:
        return {"accuracy": 0.0, "diverged": 1}
    return {"accuracy": 0.5 + cell.setting.lr, "loss": 1.5}


@pytest.mark.slow
def test_the_page_of_a_sweep_has_scores_and_a_row_for_each_cell(
    prepared: list[str], uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ["protocol.lr=[0.1,0.01]", "seeds=[4,5]", "tasks=[dtd,svhn]", f"out={tmp_path / 'out'}", f"mlflow={uri}"]
    results = vtab.run(schema.load(VtabConfig, None, [*prepared, *settings]), run_here)
    assert results is not None
    (run,) = runs(uri)
    assert (run.info.status, run.data.tags["outcome"]) == ("FINISHED", "finished")
    assert "| DTD |" in run.data.tags["mlflow.note.content"]
    assert run.data.metrics["cells_done"] == 8
    assert len(run.inputs.dataset_inputs) == 4
    cells = cells_in(uri, run, tmp_path)
    assert len(cells) == 8
    scores = {(row["task"], row["seed"]): row["accuracy"] for row in results["scores"]}
    for row in cells.values():
        assert float(row["loss"]) > 0
        if row["settings.stage"] == "final":
            assert float(row["scores.accuracy"]) == scores[row["group"], int(row["seed"])]
    assert "warning" not in capfd.readouterr().err


def test_cells_that_fail_or_diverge_are_counted_and_continued(prepared: list[str], uri: str, tmp_path: Path) -> None:
    settings = ["protocol.lr=[0.1,0.03]", "protocol.weight_decay=[0,0.1]", "tasks=[dtd,svhn]", f"mlflow={uri}"]
    config = schema.load(VtabConfig, None, [*prepared, *settings, f"out={tmp_path / 'out'}"])

    def first(cell: VtabCell) -> dict[str, Any] | str:
        return "the disk is full." if cell.task.name == "svhn" and cell.setting.weight_decay == 0.1 else made_up(cell)

    with pytest.raises(UserError, match="2 of 10 runs failed"):
        vtab.run(config, in_turn(first))
    (run,) = runs(uri)
    assert run.info.status == "FAILED"
    assert "the disk is full" in run.data.tags["outcome"]
    shown = [run.data.metrics[f"cells_{name}"] for name in ("done", "failed", "diverged")]
    assert shown == [7, 2, 3]
    assert sorted(row["reason"] for row in cells_in(uri, run, tmp_path).values()) == [""] * 7 + [
        "the disk is full."
    ] * 2 + ["waits for others"]

    vtab.run(config, in_turn(made_up))
    (again,) = runs(uri)
    assert (again.info.run_id, again.info.status) == (run.info.run_id, "FINISHED")
    assert again.data.metrics["cells_done"] == 10
    assert again.data.metrics["task_svhn"] == pytest.approx(0.53)


def test_where_a_sweep_is_sent(prepared: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = schema.load(VtabConfig, None, [*prepared, "protocol.lr=[0.1]", "mlflow="])
    assert tracking_uri(config) == f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    assert tracking_uri(replace(config, out="results/a")) == f"sqlite:///{tmp_path / 'results' / 'mlflow.db'}"
    assert tracking_uri(replace(config, mlflow="http://host:5000")) == "http://host:5000"
    assert tracking_uri(replace(config, mlflow="none")) == ""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other:5000")
    assert tracking_uri(config) == "http://other:5000"


def test_a_sweep_finds_the_run_that_keeps_its_checkpoints_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a checkpoint. The sweep named no run at all."""
    monkeypatch.chdir(tmp_path)
    run, checkpoint = Path("runs/vit"), Path("disk/vit/step-00000001")
    for folder in (run, checkpoint):
        folder.mkdir(parents=True)
    write_states(run / "mlflow.json", **{"http://team:5000": "abc"})
    identity = {"name": "vit", "out": "runs", "checkpoint.folder": "disk"}
    (checkpoint / "state.json").write_text(json.dumps({"identity": identity}))
    # A run of this name that keeps its checkpoints in another place is another run.
    for place, found in (("disk", "abc"), ("other", None)):
        (run / "run.json").write_text(json.dumps({"facts": {"name": "vit", "checkpoint_folder": place}}))
        assert run_of_weights(str(checkpoint)) == found
