"""A sweep in MLflow: a parent and a child for each cell, in a real database and on a real server."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import make_dataset

from pipeline import model as models
from pipeline.settings import schema
from pipeline.settings.reports import VtabReportConfig
from pipeline.settings.transfer import VtabConfig
from pipeline.transfer import report, vtab
from pipeline.transfer.track.children import Pace
from pipeline.transfer.vtab_cell import Cell, Job

FAST = Pace(requests=1000, poll=0.05, retry=(0.05,), redraw=0.2, finish=1.0)
SPLITS = {"train800": 16, "val200": 5, "train800val200": 21, "test": 12}
TASKS = ("dtd", "pets", "svhn")
RATES = [10.0**-exponent for exponent in range(1, 6)]
TINY = [
    "protocol.name=tiny", "protocol.image_size=8", "protocol.batch=16", "protocol.length=[2 steps]",
    "protocol.schedule.decay=cosine", "protocol.schedule.warmup=0 steps", "protocol.augment.crop=resize_crop",
    "protocol.augment.eval_crop=resize", "threads=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings with tiny weights and three tasks."""
    folder = tmp_path_factory.mktemp("vtab")
    models.save(models.create("ViT-mu/4", 8, 7), folder / "weights.pt", {"fingerprint": "f" * 16})
    for seed, name in enumerate(TASKS):
        make_dataset(folder / "tasks" / name, SPLITS, seed=seed)
    return [f"weights={folder / 'weights.pt'}", f"data={folder / 'tasks'}", *TINY]


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


def made_up(cell: Cell) -> dict[str, Any]:
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


def in_turn(outcome: Callable[[Cell], dict[str, Any] | str]) -> vtab.RunCells:
    """Yields made-up outcomes; a text is the reason of a failure."""

    def run_cells(
        function: object, jobs: Sequence[Job], on_retry: object, on_failure: Callable[[int, str], None]
    ) -> Iterable[tuple[int, dict[str, Any]]]:
        for number, job in enumerate(jobs):
            found = outcome(job.cell)
            if isinstance(found, str):
                on_failure(number, found)
            else:
                yield number, found

    return run_cells


def run_here(
    function: Callable[[Job], dict], jobs: Sequence[Job], on_retry: object, on_failure: object
) -> Iterable[tuple[int, dict[str, Any]]]:
    for number, job in enumerate(jobs):
        yield number, function(job)


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
