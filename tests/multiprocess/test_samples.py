"""Samples left out of a run, and the answer to which samples were in it: both of a real run on two ranks."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from ranks import ROOT, finish, settings, start

from pipeline import schema
from pipeline.checkpoint import read_state
from pipeline.config import RunConfig
from pipeline.data.exclude import EXCLUDED, write_list
from pipeline.data.loader import Loader, train_requests, train_view
from pipeline.data.manifest import Dataset, open_dataset
from pipeline.data.order import SampleOrder

LEFT_OUT = [3, 40, 41, 149]


def leave_out(dataset: Dataset, split: str, rows: list[int]) -> None:
    keys = dataset.table(split).keys(rows)
    columns = {"split": [split] * len(rows), "row": rows, "key": keys, "reason": ["a copy"] * len(rows)}
    write_list(dataset, f"copies_{split}", pa.table(columns, EXCLUDED))


def samples(run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch/samples.py", f"run={run}", *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def table(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    assert done.returncode == 0, done.stderr
    names, *rows = [line.split() for line in done.stdout.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def data(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """150 training and 37 validation samples, of which 146 and 35 stay."""
    copy = open_dataset(shutil.copytree(dataset, tmp_path_factory.mktemp("excluded") / "data"))
    leave_out(copy, "train", LEFT_OUT)
    leave_out(copy, "val", [0, 36])
    return copy


@pytest.fixture(scope="module")
def overrides(data: Dataset) -> list[str]:
    return settings(data.path, data.path.parent, "run", "train.length=8 steps")


@pytest.fixture(scope="module")
def run(overrides: list[str], data: Dataset) -> Path:
    said = finish(start(2, [overrides]))[0]
    assert said.count("left out of train: 4 of 150 samples (copies_train 4, copies_val 0)") == 1
    assert said.count("left out of val: 2 of 37 samples (copies_train 0, copies_val 2)") == 1
    assert "on 35 images" in said
    return data.path.parent / "run"


def test_a_step_names_what_each_rank_read(run: Path, overrides: list[str], data: Dataset, tmp_path: Path) -> None:
    config, split = schema.load(RunConfig, None, overrides), data.split("train")
    order = SampleOrder(split.shard_sizes, config.seed, 24, 4, 16)
    seen: set[str] = set()
    for step in range(1, 9):
        whole = table(samples(run, f"step={step}")) if step in (1, 7) else None
        keys = []
        for rank in range(2):
            requests = list(train_requests(order, step - 1, step, 6, rank, 2))
            keys += [key for rows, _ in requests for key in split.keys(rows)]
        seen |= set(keys)
        if whole:
            assert [row["key"] for row in whole] == keys
            assert {row["epoch"] for row in whole} == ({"0"} if step == 1 else {"0", "1"})
    assert seen == set(data.table("train").keys(np.setdiff1d(np.arange(150), LEFT_OUT)))

    csv_file, sheet = tmp_path / "part.csv", tmp_path / "part.png"
    done = samples(run, "step=2", "ranks=2", "rank=1", f"csv={csv_file}", f"sheet={sheet}")
    assert done.returncode == 0, done.stderr
    assert "step 2 of 8, rank 1 of 2: 12 samples, trained" in done.stderr
    part = list(csv.DictReader(csv_file.open()))
    assert part == table(samples(run, "step=2"))[12:]
    for row in part:
        assert row["key"] == f"train{int(row['row']):05d}"
        assert row["shard"] == f"train-{int(row['row']) // 40:06d}.tar"
        assert row["class"] == f"class{row['label']}"

    # The sheet is what the model saw: 4 x 3 pictures of 16 pixels.
    rows, epochs = order.slice(1, 1, 2)
    with Loader(split, train_view(config.augment, config.seed), 16, 1, 1, 0.0) as loader:
        images = next(loader.batches([(rows, epochs)])).images.numpy()
    pixels = np.asarray(Image.open(sheet))
    assert pixels.shape == (48, 64, 3)
    for i, image in enumerate(images):
        y, x = 16 * (i // 4), 16 * (i % 4)
        assert np.array_equal(pixels[y : y + 16, x : x + 16], image)


def test_a_sample_is_found_where_the_steps_have_it(run: Path, data: Dataset) -> None:
    key = data.table("train").keys([70])[0]
    times = table(samples(run, f"sample={key}", "ranks=2"))
    assert [row["epoch"] for row in times] in (["0"], ["0", "1"])
    for row in times:
        assert row["trained"] == "yes"
        found = table(samples(run, f"step={row['step']}"))[int(row["place"])]
        assert (found["key"], found["row"], found["epoch"]) == (key, "70", row["epoch"])
        assert int(row["rank"]) == int(row["place"]) // 12


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["step=9"], "step = 9, but .* has 8 steps"),
        (["step=1", "ranks=7"], "ranks = 7 does not divide the batch of .*, 24"),
        (["sample=train00040"], "sample 'train00040' of split 'train' is left out"),
        (["step=1", "sample=x"], "set step=... to list"),
    ],
)
def test_mistakes_are_told_in_one_line(run: Path, asked: list[str], said: str) -> None:
    done = samples(run, *asked)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert re.search(said, done.stderr)


def test_a_run_is_not_continued_on_other_samples(run: Path, overrides: list[str], data: Dataset) -> None:
    identity = read_state(run / "checkpoints" / "step-00000008")["identity"]
    assert identity["excluded"] == data.split("train").excluded
    assert identity["left_out.train.copies_train"] == 4
    more = start(1, [[*overrides, "data.exclude=none"]])
    output = more[0].communicate(timeout=120)[0]
    assert more[0].returncode == 2, output
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert f"excluded was {identity['excluded']}, is none" in errors[0]
    assert "Traceback" not in output

    leave_out(data, "train", [*LEFT_OUT, 5])
    done = samples(run, "step=1")
    leave_out(data, "train", LEFT_OUT)
    assert done.returncode == 2
    assert "is not what the run was trained on: excluded was 4 samples" in done.stderr
