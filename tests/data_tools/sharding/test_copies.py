"""Exact copies become one sample with the labels of all; what is tested on is not trained on."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset
from raw_images import contents, jpeg, settings, write_folder, write_tar

from data_tools.check import stats
from data_tools.dedup import dedup
from data_tools.sharding import copies, index, shard
from data_tools.sharding.copies import SplitCopies, exact_copies, merge_copies
from data_tools.sharding.write_shard import as_rows
from data_tools.sources import list_source
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import Shard, write_dataset
from pipeline.settings import schema
from pipeline.settings.commands.data import DedupConfig, IndexConfig, StatsConfig

TWIN, TRIPLET, LEAK = jpeg(1), jpeg(2), jpeg(3)
FILES = {
    "train/cat/a.jpg": TWIN,
    "train/dog/b.jpg": TWIN,
    "train/cat/c.jpg": TRIPLET,
    "train/cat/d.jpg": TRIPLET,
    "train/elk/e.jpg": TRIPLET,
    "train/dog/leak.jpg": LEAK,
    "train/elk/leak.jpg": LEAK,
    "test/cat/leak.jpg": LEAK,
    "train/dog/alone.jpg": jpeg(4),
    "test/elk/alone.jpg": jpeg(5),
    # As long as another, and other bytes.
    "train/elk/same_size.jpg": jpeg(4)[:-3] + bytes([jpeg(4)[-3] ^ 1]) + jpeg(4)[-2:],
    "train/dog/empty.jpg": b"",
    "train/elk/empty.jpg": b"",
}
SPLITS = {"train": "train", "test": "test"}
LEFT = {
    ("train", "cat/a"): [0, 1],
    ("train", "cat/c"): [0, 2],
    ("train", "dog/alone"): [1],
    # Labels of a test image stay what they were.
    ("test", "cat/leak"): [0],
    ("test", "elk/alone"): [2],
}


def test_copies_are_merged_and_the_shards_say_so(ray_cluster: int, tmp_path: Path, capfd) -> None:
    files = {name: data for name, data in FILES.items() if "same_size" not in name}
    source = write_folder(files, tmp_path / "raw")
    config = settings(source, tmp_path / "out", merge_copies=True, splits=SPLITS, max_bad_share=0.5)
    dataset = shard.run(config)
    said = capfd.readouterr().out
    assert "merged 3 exact copies into others of their split; left out 2 train images" in said
    assert (dataset.info["source"]["copies"], dataset.info["source"]["copies_of_other_splits"]) == (5, 2)
    rows = pq.read_table(dataset.path / "samples.parquet").to_pylist()
    assert {(row["split"], row["key"]): row["labels"] for row in rows} == LEFT
    assert sorted((dataset.path / "copies.csv").read_text().splitlines()) == [
        "cat/d,train,cat/c,train",
        "dog/b,train,cat/a,train",
        "dog/leak,train,cat/leak,test",
        "elk/e,train,cat/c,train",
        "elk/leak,train,cat/leak,test",
        "key,split,copy_of,in_split",
    ]
    # Plain webdataset reads one label as .cls and several as .json.
    found = {}
    for sample in webdataset.WebDataset(dataset.split("train").shard_paths, shardshuffle=False):
        found[sample["__key__"]] = json.loads(sample["json"])["labels"] if "json" in sample else [int(sample["cls"])]
    assert found == {key: labels for (split, key), labels in LEFT.items() if split == "train"}
    # As a tar, and with the finished data set checked again.
    tar = write_tar(files, tmp_path / "raw.tar")
    other = settings(tar, tmp_path / "tar", merge_copies=True, splits=SPLITS, max_bad_share=0.5)
    assert shard.run(other).fingerprint == dataset.fingerprint
    before = contents(dataset.path)
    shard.run(config)
    assert contents(dataset.path) == before


def test_copies_of_other_classes_and_splits_are_counted_and_excluded_by_the_commands_that_are_named(
    ray_cluster: int, tmp_path: Path, capfd
) -> None:
    source = write_folder(FILES, tmp_path / "raw")
    dataset = shard.run(settings(source, tmp_path / "out", splits=SPLITS, max_bad_share=0.5))
    assert exact_copies(dataset, "none") == {"train": SplitCopies(7, {"test": 2}), "test": SplitCopies(0, {})}
    commands = [line.partition("launch/dedup.py ")[2] for line in capfd.readouterr().out.splitlines()]
    for command in filter(None, commands):
        dedup.run(schema.load(DedupConfig, None, command.split()))
    numbers = stats.run(StatsConfig(data=str(dataset.path), out=str(tmp_path / "stats"), sheet=0))
    found = [of["exact_copies"] for of in numbers["splits"].values()]
    assert found == [{"other_labels": 0, "in_splits": {}}] * 2
    assert "launch/dedup.py" not in capfd.readouterr().out
    for tar in dataset.path.glob("*.tar"):
        (tmp_path / "tars").mkdir(exist_ok=True)
        shutil.copy(tar, tmp_path / "tars")
    splits = {"train": "train-", "test": "test-"}
    indexed = index.run(IndexConfig(source=str(tmp_path / "tars"), splits=splits))
    assert exact_copies(indexed, "all") == exact_copies(dataset, "none")
    assert capfd.readouterr().out.count("launch/dedup.py") == 2


def test_hashes_of_an_earlier_run_are_taken(ray_cluster: int, tmp_path: Path) -> None:
    source = write_folder(FILES, tmp_path / "raw")
    config = settings(source, tmp_path / "out", splits=SPLITS)
    listing = list_source(source, config, tmp_path / "staging")
    first, merged = merge_copies(listing, tmp_path / "hashes", 1, tmp_path)
    assert (len(first), len(merged.rows), merged.of_test) == (8, 5, 2)
    for path in source.rglob("*.jpg"):
        path.unlink()
    again, _ = merge_copies(listing, tmp_path / "hashes", 1, tmp_path)
    assert again.table.equals(first.table)


def test_hashes_of_a_source_that_was_packed_in_another_order_are_not_taken(ray_cluster: int, tmp_path: Path) -> None:
    keys = []
    for files in (FILES, dict(reversed(FILES.items()))):
        tar = write_tar(files, tmp_path / "raw.tar")
        listing = list_source(tar, settings(tar, tmp_path / "out", splits=SPLITS), tmp_path / "staging")
        merged, _ = merge_copies(listing, tmp_path / "hashes", 1, tmp_path)
        keys.append(merged.table["key"].to_pylist())
    assert keys[1] == keys[0]


# With the one seed the bad image has the first shard of its split, and another takes its place; with the other it has
# the last, which is not needed any more.
@pytest.mark.parametrize("seed", [0, 2])
def test_a_copy_that_could_not_be_read_at_first_is_merged(seed: int, ray_cluster: int, tmp_path: Path) -> None:
    files = {"train/cat/1.jpg": jpeg(1), "train/dog/leak.jpg": LEAK, "test/cat/leak.jpg": LEAK}
    source = write_folder({**files, "train/dog/leak.jpg": bytes(len(LEAK))}, tmp_path / "raw")
    how = {"merge_copies": True, "splits": SPLITS, "samples_per_shard": 1, "max_bad_share": 0.0}
    config = settings(source, tmp_path / "out", num_tasks=1, seed=seed, **how)
    with pytest.raises(UserError, match=r"bad, .*: train/dog/leak\.jpg"):
        shard.run(config)
    assert seed == 0 or (tmp_path / "out/train-000001.tar").exists()
    write_folder(files, source)
    dataset = shard.run(config)
    rows = pq.read_table(dataset.path / "samples.parquet").to_pylist()
    assert [(row["split"], row["key"]) for row in rows] == [("train", "cat/1"), ("test", "cat/leak")]
    assert sorted(path.name for path in dataset.path.glob("*.tar")) == ["test-000000.tar", "train-000000.tar"]


def test_an_image_held_out_for_val_takes_its_copies_out_of_train(ray_cluster: int, tmp_path: Path) -> None:
    files = {f"{name}/{i}.jpg": jpeg(i) for name in ("cat", "dog") for i in range(8)}
    source = write_folder(files, tmp_path / "raw")
    dataset = shard.run(settings(source, tmp_path / "out", merge_copies=True, val_share=0.3))
    rows = pq.read_table(dataset.path / "samples.parquet").to_pylist()
    assert len({row["xxh128"] for row in rows}) == len(rows) == 8
    assert np.sum([row["split"] == "val" for row in rows]) > 0
    assert all(row["labels"] == [0, 1] for row in rows if row["split"] == "train")


@pytest.mark.parametrize("compared", [2**24, 40, 3])
def test_copies_are_counted_the_same_in_parts(compared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a count of all hashes at once."""
    monkeypatch.setattr(copies, "_COMPARED", compared)
    monkeypatch.setattr(copies, "_READ", 7)
    draw = np.random.default_rng(0)
    numbers = {"test": draw.integers(0, 90, 30), "train": draw.integers(0, 90, 100)}
    labels = {split: draw.integers(0, 2, len(of_split)) for split, of_split in numbers.items()}
    shards, tables = [], []
    for split, of_split in numbers.items():
        shards.append(Shard(f"{split}-000000.tar", split, len(of_split), 100, "0" * 64))
        hashes = [hashlib.md5(str(number).encode()).digest() for number in of_split.tolist()]
        rows = [
            (f"{row}", 512 * row, 1, "jpg", [label], 4, 4, digest)
            for row, (label, digest) in enumerate(zip(labels[split].tolist(), hashes, strict=True))
        ]
        tables.append(as_rows(rows))
    dataset = write_dataset(tmp_path, shards, tables, ["a", "b"], {}, {})
    expected = {}
    for split, of_split in numbers.items():
        kinds = {number: set(labels[split][of_split == number].tolist()) for number in of_split.tolist()}
        expected[split] = SplitCopies(sum(len(kinds[number]) > 1 for number in of_split.tolist()), {})
    expected["train"].in_splits["test"] = int(np.isin(numbers["train"], numbers["test"]).sum())
    assert expected["train"].other_labels
    assert exact_copies(dataset, "none") == expected
