"""The numbers are those of the files; the pictures show them; nothing but the contact sheet reads a shard."""

import csv
import io
import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from mlflow.tracking import MlflowClient
from PIL import Image
from ranks import ROOT
from raw_images import encoded, settings, write_folder
from tiny import make_dataset

from data_tools.check import figures, stats
from data_tools.sharding import shard
from pipeline.data.dataset.manifest import ROWS, Dataset, Shard, open_dataset, write_dataset
from pipeline.settings.commands.data import StatsConfig

FILES = [stats.STATS, stats.CLASSES, stats.HISTOGRAMS, stats.SHEET]


def run(data: Path, out: Path, **others: object) -> dict:
    return stats.run(StatsConfig(data=str(data), out=str(out), **others))


def synthetic(path: Path, labels: list[list[list[int]]], num_classes: int) -> Dataset:
    """A manifest of these labels, shard by shard, of which no tar exists; sample i is 100 + i wide and 200 high."""
    path.mkdir()
    shards, tables, first = [], [], 0
    for number, of_shard in enumerate(labels):
        n = len(of_shard)
        rows = {
            "key": [f"{first + i}" for i in range(n)],
            "offset": [0] * n,
            "size": [1000 * (1 + i % 3) for i in range(n)],
            "ext": ["png" if i == 0 else "jpg" for i in range(n)],
            "labels": of_shard,
            "width": [100 + first + i for i in range(n)],
            "height": [200] * n,
            "xxh128": [b"0" * 16] * n,
        }
        shards.append(Shard(f"train-{number:06d}.tar", "train", n, 5000 + number, ""))
        tables.append(pa.Table.from_pydict(rows, ROWS))
        first += n
    return write_dataset(path, shards, tables, [f"c{i}" for i in range(num_classes)], {}, {})


def test_numbers_of_a_manifest_without_tars(tmp_path: Path) -> None:
    synthetic(tmp_path / "data", [[[0], [0, 1], []], [[0], [2], [0, 1]]], 5)
    found = run(tmp_path / "data", tmp_path / "out", sheet=0)
    train = json.loads((tmp_path / "out" / "stats.json").read_text())["splits"]["train"]
    assert train == found["splits"]["train"]
    assert (train["samples"], train["bytes"]) == (6, 12000)
    assert train["images_of_a_class"] == {"none": 2, "min": 0, "p5": 0, "median": 1, "p95": 4, "max": 4}
    assert train["labels_per_sample"] == {"0": 1, "1": 3, "2": 2}
    assert train["formats"] == {"jpg": 4, "png": 2}
    assert train["short_side"] == {"min": 100, "p5": 100, "median": 102, "p95": 105, "max": 105}
    assert train["aspect_ratio"]["max"] == pytest.approx(105 / 200, rel=0.0004)
    assert train["bytes_per_image"]["median"] == pytest.approx(2000, rel=0.0004)
    assert train["shards"] == 2
    classes = list(csv.reader(io.StringIO((tmp_path / "out" / "classes.csv").read_text())))
    assert classes == [["class", "train"], ["c0", "4"], ["c1", "2"], ["c2", "1"], ["c3", "0"], ["c4", "0"]]
    assert not (tmp_path / "out" / "contact_sheet.png").exists()


def test_a_data_set_without_labels(tmp_path: Path) -> None:
    """As shard.py makes of a list whose labels are all empty."""
    data = synthetic(tmp_path / "data", [[[], [], []], [[], []]], 0)
    found = run(data.path, tmp_path / "out", sheet=4)
    assert (found["num_classes"], found["splits"]["train"]["samples"]) == (0, 5)
    assert found["splits"]["train"]["images_of_a_class"] == {"none": 0}
    assert found["splits"]["train"]["labels_per_sample"] == {"0": 5}
    with Image.open(tmp_path / "out" / "contact_sheet.png") as sheet, Image.open(tmp_path / "out/histograms.png"):
        assert sheet.width > 4 * 168
    assert len(figures._choose(data, np.empty(0, np.int64), 4)) == 4
    # A class list whose classes no sample has.
    found = run(synthetic(tmp_path / "other", [[[], []]], 2).path, tmp_path / "other-out", sheet=2)
    assert found["splits"]["train"]["images_of_a_class"]["none"] == 2


def colours(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).reshape(-1, 3)


def test_the_contact_sheet_shows_every_class_and_survives_damage(tmp_path: Path, ray_cluster: int) -> None:
    shades = {"red": (250, 0, 0), "green": (0, 250, 0), "blue": (0, 0, 250)}
    files = {}
    for name, colour in shades.items():
        for number in range(9):
            files[f"{name}/{number}.png"] = encoded(Image.new("RGB", (40, 20 + number), colour), "PNG")
    dataset = shard.run(settings(write_folder(files, tmp_path / "raw"), tmp_path / "data", samples_per_shard=40))
    sheet = figures.draw_sheet(dataset, 12, np.array([9, 9, 9]))
    assert sheet == figures.draw_sheet(dataset, 12, np.array([9, 9, 9]))
    for colour in shades.values():
        # Four tiles, at least half as high as they are wide.
        assert (colours(sheet) == colour).all(1).sum() > 4 * 168 * 80
    (dataset.path / "train-000000.tar").unlink()
    damaged = figures.draw_sheet(dataset, 12, np.array([9, 9, 9]))
    assert not (colours(damaged) == shades["red"]).all(1).any()
    widths = {Image.open(io.BytesIO(png)).width for png in (sheet, damaged)}
    assert len(widths) == 1, "as many tiles in a row"


def test_the_command_sends_all_of_it_to_mlflow(
    dataset: Dataset,
    database: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Twice: the same data set, counted again, is the same run."""
    uri, out = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "out"
    shutil.copy(database, tmp_path / "mlflow.db")
    arguments = [f"data={dataset.path}", f"out={out}", "sheet=6", f"mlflow={uri}"]
    monkeypatch.setattr(sys, "argv", ["launch/stats.py", *arguments])
    for _ in range(2):
        runpy.run_path(str(ROOT / "launch/stats.py"), run_name="__main__")
    assert "warning" not in capfd.readouterr().err
    client = MlflowClient(tracking_uri=uri)
    (run_,) = client.search_runs([client.get_experiment_by_name("vit").experiment_id])
    found = json.loads((out / "stats.json").read_text())
    assert run_.info.status == "FINISHED"
    assert run_.info.run_name == f"stats {dataset.path.name}"
    assert run_.data.tags["data_fingerprint"] == dataset.fingerprint
    assert run_.data.metrics == stats.metrics(found)
    assert sorted(file.path for file in client.list_artifacts(run_.info.run_id)) == sorted(
        [*FILES, "metrics.jsonl", "run.json"]
    )
    for name in FILES:
        sent = Path(client.download_artifacts(run_.info.run_id, name, str(tmp_path)))
        assert sent.read_bytes() == (out / name).read_bytes()


def test_numbers_to_predict_are_described(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", {"train": 30, "val": 9}, labelled=False, targets=["red", "dose (mg/l)"])
    found = run(data, tmp_path / "out", sheet=0)
    values = open_dataset(data).split("train").target_values
    train = found["splits"]["train"]["targets"]
    assert train["red"]["missing"] == 0
    assert train["red"]["median"] == pytest.approx(np.sort(values[:, 0])[14], rel=1e-4)
    assert train["dose (mg/l)"]["missing"] == 10
    assert train["dose (mg/l)"]["max"] == pytest.approx(np.nanmax(values[:, 1]), rel=1e-4)
    assert "train.targets.dose__mg_l_.median" in stats.metrics(found)
    plain = run(make_dataset(tmp_path / "plain", {"train": 9}, labelled=False), tmp_path / "plain-out", sheet=0)
    assert plain["splits"]["train"]["targets"] == {}
