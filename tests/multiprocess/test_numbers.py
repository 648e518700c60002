"""Numbers of images, from a CSV to reports: train, score, compare, predict and export."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import Forge
from PIL import Image
from ranks import settings
from scipy.stats import spearmanr
from sklearn.metrics import r2_score

from data_tools.sharding import shard
from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import Split, open_dataset
from pipeline.evaluate import export, predict, score_report
from pipeline.evaluate.loaded_model import load_model
from pipeline.evaluate.regression import predict_targets
from pipeline.review import compare, draw, report
from pipeline.settings import schema
from pipeline.settings.commands.data import ShardConfig
from pipeline.settings.commands.reports import CompareConfig, RunReportConfig
from pipeline.settings.commands.weights import ExportConfig, PredictConfig, ScoreConfig, WeightsConfig
from pipeline.train.bookkeeping import DrawingProcess

TARGETS = ["light [lux]", "red"]
_RUN = ["data.eval_split=dev", "train.loss=regression", "train.global_batch=48", "train.micro_batch=48"]
_RUN += ["train.length=100 steps", "evaluate.every=50 steps", "augment.crop=none", "augment.eval_crop=resize"]
_RUN += ["augment.flip=false", "checkpoint.every=100 steps", "train.log_every=50", "checkpoint.best=dev_r2"]


@pytest.fixture(scope="module")
def folder(ray_cluster: int, forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """raw/: images and lists of three splits; data/: the data set; runs/long and runs/short: runs that learn it."""
    folder = tmp_path_factory.mktemp("numbers")
    rng = np.random.default_rng(0)
    for split, count in (("train", 240), ("dev", 60), ("test", 60)):
        (folder / "raw" / split).mkdir(parents=True)
        rows = []
        for i in range(count):
            colour = rng.uniform(30, 220, 3)
            pixels = np.clip(colour + rng.normal(0, 8, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "raw" / split / f"{i}.png")
            light = "" if i % 10 == 3 else f"{1000 + 10 * colour.mean():.2f}"
            rows.append((f"{split}/{i}.png", light, f"{colour[0] / 255:.4f}", f"plate{i // 6}"))
        with (folder / "raw" / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("path", *TARGETS, "plate"), *rows])
    lists = [f"splits.{split}={split}.csv" for split in ("train", "dev", "test")]
    given = [f"source={folder / 'raw'}", "layout=list", f"out={folder / 'data'}", "group_column=plate", *lists]
    shard.run(schema.load(ShardConfig, None, [*given, f"target_columns={json.dumps(TARGETS)}"]))
    runs = {"long": [], "short": ["optimizer.lr=0.0005"]}
    forge.start(
        1, *(settings(folder / "data", folder / "runs", name, *_RUN, *more) for name, more in runs.items())
    ).finish()
    return folder


def of_images(folder: Path) -> list[str]:
    return [f"weights={folder / 'runs' / 'long'}", f"data={folder / 'data'}", "split=test", "device=cpu"]


def predicted(folder: Path, *more: str) -> pa.Table:
    return predict.run(schema.load(PredictConfig, None, [*of_images(folder), *more]))


def test_scores_and_pictures_of_a_report(folder: Path, tmp_path: Path) -> None:
    table = predicted(folder, f"out={tmp_path / 'table.parquet'}")
    assert table.equals(pq.read_table(tmp_path / "table.parquet"))
    assert table.column_names == ["image", *TARGETS, *(f"{name}_true" for name in TARGETS), "problem"]
    out = tmp_path / "out"
    scores = score_report.run(
        schema.load(ScoreConfig, None, [*of_images(folder), f"out={out}", f"mlflow={_uri(folder)}"])
    )
    for name, of in zip(TARGETS, scores["per_target"], strict=True):
        true, found = (table[column].to_numpy().astype(float) for column in (f"{name}_true", name))
        known = np.isfinite(true)
        assert of["num_values"] == known.sum() == (54 if name == TARGETS[0] else 60)
        assert of["r2"] == pytest.approx(r2_score(true[known], found[known]), abs=1e-6)
        assert of["spearman"] == pytest.approx(spearmanr(true[known], found[known]).statistic, abs=1e-6)
        assert of["rmse"] == pytest.approx(np.sqrt(np.square(true - found)[known].mean()), rel=1e-6)
        assert of["r2_low"] < of["r2"] < of["r2_high"]
        assert of["r2"] > 0.5, "the number is learned, in its own unit"
    assert scores["r2"] == pytest.approx(np.mean([of["r2"] for of in scores["per_target"]]))
    assert scores["num_groups"] == 10
    assert Image.open(out / "scatter.png").size[0] > 600
    page = (out / "report.html").read_text()
    assert page.count("data:image/png") == 1
    assert all(name in page for name in TARGETS)
    sent = json.loads((out / "run.json").read_text())["facts"]
    assert sent["score"] == "test_r2"


def _uri(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


def _keep_predictions(run: Path, split: Split) -> None:
    """As a run does that draws figures, which takes longer than these runs."""
    config = schema.load(WeightsConfig, None, [f"weights={run}", "device=cpu"])
    loaded = load_model(config)
    with loaded.reading(split, config) as reader:
        found = predict_targets(loaded.logits, reader)
    drawing = DrawingProcess(run, "this")
    drawing.begin(found, split)
    drawing.end(last=False)


def test_runs_are_reported_and_compared(folder: Path, tmp_path: Path) -> None:
    runs = [folder / "runs" / name for name in ("long", "short")]
    split = open_dataset(folder / "data").split("dev")
    for run in runs:
        _keep_predictions(run, split)
    assert draw.draw(runs[0], final=False) == []
    assert (runs[0] / "page" / "figures" / "scatter.png").exists()
    page = report.run(schema.load(RunReportConfig, None, [f"run={runs[0]}", f"out={tmp_path / 'report'}"])).read_text()
    assert page.count("data:image/png") > 1
    given = [f"runs=[{','.join(map(str, runs))}]", f"out={tmp_path / 'compare'}"]
    records = compare.run(schema.load(CompareConfig, None, given))
    best, worse = (records[name].last_score for name in ("long", "short"))
    assert best is not None
    assert worse is not None
    assert best.name == "dev R²"
    assert best.interval is not None
    assert best.interval.low < best.value < best.interval.high
    # The score of one target by itself has an interval, too.
    assert records["long"].score_at(-1, "dev_rmse_red").interval is not None


def test_files_of_other_programs_predict_in_the_unit_of_the_target(folder: Path, tmp_path: Path) -> None:
    import runpy

    weights = folder / "runs" / "long"
    said = list[str]()
    models.read_weights(weights, say=said.append)
    assert said == [], "the head has all that was learned"
    expected = {row["image"]: [row[name] for name in TARGETS] for row in predicted(folder).to_pylist()}
    for file in ("numbers.safetensors", "numbers.onnx"):
        export.run(schema.load(ExportConfig, None, [f"weights={weights}", f"out={tmp_path / file}"]))
    again = predict.run(
        schema.load(PredictConfig, None, [*of_images(folder)[1:], f"weights={tmp_path / 'numbers.safetensors'}"])
    )
    for row in again.to_pylist():
        assert [row[name] for name in TARGETS] == pytest.approx(expected[row["image"]], rel=1e-5)
    predictor = runpy.run_path(str(tmp_path / "numbers_predict.py"))["Predictor"](tmp_path / "numbers.onnx")
    for key, values in list(expected.items())[:5]:
        found = predictor.predict(folder / "raw" / f"{key}.png")
        assert [name for name, _ in found] == TARGETS
        assert [value for _, value in found] == pytest.approx(values, rel=1e-4)


def test_what_does_not_fit_is_refused(folder: Path, dataset: Path, tmp_path: Path) -> None:
    given = [f"weights={folder / 'runs' / 'long'}", f"data={dataset}", f"out={tmp_path / 'out'}", "device=cpu"]
    with pytest.raises(UserError, match="red"):
        score_report.run(schema.load(ScoreConfig, None, given))
    assert not (tmp_path / "out").exists()
