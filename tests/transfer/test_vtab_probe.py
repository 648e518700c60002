"""Sweeps by features alone: method=linear and method=knn."""

import shutil
from pathlib import Path

import pytest
from PIL import Image
from tiny import make_dataset
from tiny_vtab import prepare, run_here

from data_tools.sharding import shard
from pipeline.base.errors import UserError
from pipeline.settings import schema
from pipeline.settings.commands.data import ShardConfig
from pipeline.settings.commands.transfer import VtabConfig
from pipeline.transfer import vtab
from pipeline.transfer.score_table import columns
from pipeline.transfer.sweep import open_sweep


@pytest.mark.parametrize("method", ["linear", "knn"])
def test_a_probe_has_one_score_whatever_the_seeds(tmp_path: Path, method: str) -> None:
    settings = [*prepare(tmp_path), "protocol.lr=[0.1]", f"method={method}"]

    def sweep(seeds: str) -> list[dict]:
        results = vtab.run(schema.load(VtabConfig, None, [*settings, f"seeds={seeds}"]), tmp_path / "out", run_here)
        assert results is not None
        return results["scores"]

    scores = sweep("[0]")
    assert sweep("[1,2]") == scores
    # Two seeds would have an interval over seeds, of no width.
    interval = columns([tmp_path / "out"])[0].tasks["dtd"].interval
    assert interval is not None
    assert interval.over == "over test samples"


def test_a_data_set_of_another_origin_is_not_taken_for_a_task(tmp_path: Path) -> None:
    """Of launch/shard.py, or of another task in the folder of this one."""
    settings = [*prepare(tmp_path), "protocol.lr=[0.1]", "method=linear"]
    splits = {"train800": 16, "val200": 5, "train800val200": 21, "test": 12}
    make_dataset(tmp_path / "tasks" / "eurosat", splits)
    (tmp_path / "tasks" / "svhn").rename(tmp_path / "tasks" / "cifar100")
    sweep = open_sweep(schema.load(VtabConfig, None, settings), tmp_path / "out")
    assert sweep.unpublished == ["cifar100", "eurosat"]


def test_images_without_exactly_one_label_are_refused(tmp_path: Path, ray_cluster: None) -> None:
    settings = [*prepare(tmp_path), "protocol.lr=[0.1]", "method=linear"]
    listed = tmp_path / "listed"
    listed.mkdir()
    for split, count in {"train800": 6, "val200": 3, "train800val200": 9, "test": 4}.items():
        for i in range(count):
            Image.new("RGB", (8, 8), (20 * i, 0, 0)).save(listed / f"{split}{i}.png")
        rows = [f"{split}{i}.png,{'' if i == 0 else 'a;b' if i == 1 else 'ab'[i % 2]}" for i in range(count)]
        (listed / f"{split}.csv").write_text("path,label\n" + "\n".join(rows if split == "test" else rows[2:]) + "\n")
    splits = "splits={train800: train800.csv, val200: val200.csv, train800val200: train800val200.csv, test: test.csv}"
    overrides = [f"source={listed}", f"out={tmp_path / 'tasks' / 'dtd'}", "layout=list", splits]
    shutil.rmtree(tmp_path / "tasks" / "dtd")
    shard.run(schema.load(ShardConfig, None, overrides))
    with pytest.raises(
        UserError, match=r"/dtd: 2 of 4 images of test have no label, or several, but a task of VTAB-1k has one"
    ):
        open_sweep(schema.load(VtabConfig, None, settings), tmp_path / "out")
