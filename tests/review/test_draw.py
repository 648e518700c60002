"""What a run draws at its evaluations, in a process that training never waits for."""

import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from forked import Forge, train
from PIL import Image
from polling import until
from ranks import settings
from review_runs import write_run

from pipeline import model as models
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.dataset.split import Split
from pipeline.evaluate import mistakes, score_report
from pipeline.evaluate.classify import Predictions, label_table
from pipeline.monitor import tracking
from pipeline.monitor.export import ExportTiming
from pipeline.monitor.mlflow.connection import connect
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.monitor.tracking import default_uri
from pipeline.review.draw import _of_weights, draw
from pipeline.review.record import LastPredictions
from pipeline.settings import schema
from pipeline.settings.commands.weights import ScoreConfig
from pipeline.train import bookkeeping
from pipeline.train.bookkeeping import DrawingProcess

OF_EVALUATION = {"confusion.png", "predictions.png"}


def images_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Name -> size of each figure, which must not be blank."""
    found = {}
    for file in (folder / "page" / "figures").iterdir():
        pixels = np.asarray(Image.open(file).convert("RGB"))
        assert pixels.std() > 5, file.name
        found[file.name] = pixels.shape[1::-1]
    return found


# ---------------------------------------------------------------------- a whole run
def train_without_haste(runs: list[list[str]]) -> None:
    """In a rank: `train`, whose end waits for MLflow and for the last figures longer than a user would, however slow
    the machine is.
    """
    tracking.ExportTiming = partial(ExportTiming, finish=300)  # type: ignore[misc, assignment]
    bookkeeping.DrawingProcess = partial(DrawingProcess, timeout=300)  # type: ignore[misc, assignment]
    train(runs)


@pytest.fixture(scope="module")
def trained(forge: Forge, dataset: Path, database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, tracked, with figures."""
    out = tmp_path_factory.mktemp("figures")
    shutil.copy(database, out / "mlflow.db")
    more = ["track.enabled=true", "track.figures=true", "evaluate.batch=5"]
    run = forge.start_work(2, "test_draw:train_without_haste", [settings(dataset, out, "small", *more)])
    assert run.wait(500) == [0, 0], run.said(0) + run.said(1)
    return out / "small"


def test_a_run_leaves_figures_and_mlflow_has_them(trained: Path) -> None:
    names = {"curves.png", "attention.png", "positions.png", *OF_EVALUATION}
    assert images_in(trained).keys() == names, (trained / "page" / "drawing.log").read_text()
    client = connect(default_uri(trained.parent))
    (run,) = client.search_runs(["1"])
    assert {file.path for file in client.list_artifacts(run.info.run_id, "page/figures")} == {
        f"page/figures/{name}" for name in names
    }
    found = {file.path for folder in ("", "page") for file in client.list_artifacts(run.info.run_id, folder)}
    assert {"config.yaml", "log.txt", "deepspeed.json", "metrics.jsonl"} <= found
    assert {"page/environment.txt", "page/predictions.npz"} <= found
    assert {"page/mistakes/report.html", "page/mistakes/mistakes.json"} <= {
        file.path for file in client.list_artifacts(run.info.run_id, "page/mistakes")
    }
    assert "page/drawing.log" not in found
    # The last checkpoint is a logged model that loads by its address.
    (output,) = run.outputs.model_outputs
    path = weights_path(f"models:/{output.model_id}", default_uri(trained.parent))
    assert Path(path).parent == trained / "checkpoints"


def test_mistakes_have_their_keys_the_least_probable_label_first(trained: Path, dataset: Path, tmp_path: Path) -> None:
    """With pictures in the page itself. The run makes none, so some predictions are changed."""
    of_run, _ = mistakes.Mistakes.read(trained / "page" / "mistakes") or pytest.fail("not written")
    assert (of_run.num_wrong, of_run.listed) == (0, [])
    folder = tmp_path / "small"
    shutil.copytree(trained, folder)
    arrays = dict(np.load(folder / "page" / "predictions.npz"))
    changed = {3: 0.3, 7: 0.1, 5: 0.2}
    for row, of_label in changed.items():
        arrays["predicted"][row] = (arrays["true"][row] + 1) % 4
        arrays["of_label"][row] = of_label
    np.savez(folder / "page" / "predictions.npz", **arrays)
    assert draw(folder, final=False) == []
    of_run, pictures = mistakes.Mistakes.read(folder / "page" / "mistakes") or pytest.fail("not written")
    assert (of_run.num_wrong, of_run.num_images) == (3, len(arrays["true"]))
    assert [one.key for one in of_run.listed] == open_dataset(dataset).split("val").keys([7, 5, 3])
    assert sum(pair.images for pair in of_run.confused) == 3
    html = (folder / "page" / "mistakes" / "report.html").read_text()
    assert html.count("data:image/png") == len(pictures) == 3


def test_kept_predictions_are_those_of_the_weights(trained: Path, dataset: Path, tmp_path: Path) -> None:
    found = LastPredictions.read(trained)
    overrides = [f"weights={trained}", f"data={dataset}", "shots=0", f"out={tmp_path}", "device=cpu"]
    scores = score_report.run(schema.load(ScoreConfig, None, overrides))
    assert len(found.rows) == scores["num_samples"]
    assert float((found.true == found.predicted).mean()) == scores["top1"]
    assert np.array_equal(found.true, label_table(open_dataset(dataset).split("val"))[:, 0])
    recalls = {row["class"]: row["recall"] for row in scores["per_class"]}
    for number, name in enumerate(recalls):
        of_class = found.true == number
        assert float((found.predicted[of_class] == number).mean()) == pytest.approx(recalls[name])


def test_damaged_inputs_cost_one_line_each(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    shutil.copytree(trained, folder)
    shutil.rmtree(folder / "page" / "figures")
    content = (folder / "page" / "predictions.npz").read_bytes()
    (folder / "page" / "predictions.npz").write_bytes(content[: len(content) // 2])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "ti')
    (line,) = draw(folder, final=False)
    assert line.startswith("confusion, predictions, scatter, mistakes not drawn: ")
    assert "predictions.npz" in line
    assert images_in(folder).keys() == {"curves.png"}
    (folder / "config.yaml").write_text("{")
    assert [line.partition(" not drawn")[0] for line in draw(folder, final=True)] == [
        "curves",
        "confusion, predictions, scatter, mistakes",
        "reconstruction",
        "attention, positions, components",
    ]


# ---------------------------------------------------------------------- single figures
def test_a_drawing_that_the_model_does_not_have_costs_a_line_and_not_the_others(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", f"data.path={dataset}", "data.eval_split=val")
    models.save(models.create("ViT-mu/4", 16, 4, positions="none"), run / "model.safetensors")
    attention, positions = _of_weights(run, "attention", "positions")
    assert attention is not None
    assert positions is None
    assert "not drawn: positions (positions = none adds nothing to the tokens)" in capsys.readouterr().out


# ---------------------------------------------------------------------- the process
def predictions_of(split: Split) -> Predictions:
    num = len(split)
    top = np.zeros((num, 1), np.int64)
    return Predictions(top, np.full((num, 1), 0.5, np.float32), np.ones(num), np.ones(num, bool), {}, np.full(num, 0.5))


def test_predictions_are_kept_with_the_groups_of_their_images(dataset: Path, tmp_path: Path) -> None:
    split = open_dataset(dataset).split("val")
    vars(split)["groups"] = np.arange(len(split)) // 3  # As of a data set that has some.
    drawing = DrawingProcess(tmp_path, "not_used")
    drawing.begin(predictions_of(split), split)
    drawing.end(last=False)
    found = LastPredictions.read(tmp_path)
    assert found.groups.tolist() == [row // 3 for row in range(len(split))]


def test_a_drawing_that_hangs_is_ended_and_training_does_not_wait(dataset: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        f"import os, sys, time; open({str(started)!r}, 'a').write(' '.join([str(os.nice(0)), *sys.argv[2:]]) + '.');"
        " time.sleep(600)"
    )
    drawing = DrawingProcess(tmp_path, "not_used", timeout=0.5)
    drawing.command = (sys.executable, "-c", code, str(tmp_path))
    split = open_dataset(dataset).split("val")
    for _ in range(3):  # Each returns, although the drawing never ends.
        drawing.begin(predictions_of(split), split)
    first = drawing._process
    assert first is not None
    until(lambda: started.exists() and started.read_text())
    assert started.read_text() == "19."  # One at a time, with what training leaves of the processors.
    drawing.end(last=True)
    assert first.poll() is not None
    assert drawing._process.poll() is not None
    assert drawing._process.args == (*drawing.command, "--final"), "not of low priority: the run waits for it"


def test_it_works_in_the_folder_of_the_run_with_this_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths in the settings, as data.path, were looked for in the folder of the code."""
    (tmp_path / "platform.py").write_text(
        "print('not of the library')"
    )  # Of the working folder, which may be another checkout.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page").mkdir()
    drawing = DrawingProcess(tmp_path, "platform")
    drawing.command = (*drawing.command[:2], "-c", "import os, platform; print(os.getcwd(), platform.__file__)")
    drawing.end(last=True)
    folder, file = (tmp_path / "page" / "drawing.log").read_text().split()
    assert folder == str(tmp_path)
    assert not file.startswith(folder)


def test_a_full_disk_does_not_end_training(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "page").write_text("not a folder")
    split = open_dataset(dataset).split("val")
    drawing = DrawingProcess(tmp_path, "platform")
    drawing.begin(predictions_of(split), split)
    drawing.end(last=True)
