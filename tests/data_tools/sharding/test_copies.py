"""Exact copies are counted, and excluded by the commands that are printed."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
from raw_images import jpeg, settings, write_folder

from data_tools.check import stats
from data_tools.dedup import dedup
from data_tools.sharding import index, shard
from data_tools.sharding.copies import SplitCopies, exact_copies
from data_tools.sharding.write_shard import as_rows
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


def test_counts_of_copies(tmp_path: Path) -> None:
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
