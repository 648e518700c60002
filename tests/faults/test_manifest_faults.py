"""Files that describe a data set and are wrong although their checksums agree, or that are read from a cache of
these.
"""

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.data.dataset.manifest import (
    ROWS,
    SAMPLES_FILE,
    SHARDS_FILE,
    Dataset,
    Shard,
    open_dataset,
    write_dataset,
)
from pipeline.data.storage import checksum_cache

COUNT = 60
LABELS = [[row % 5] if row % 4 else [row % 5, 6] for row in range(COUNT)]
PER_SHARD = 20


def make(path: Path) -> Dataset:
    """A manifest of 3 shards of nothing."""
    path.mkdir()
    shards, tables = [], []
    for first in range(0, COUNT, PER_SHARD):
        rows = range(first, first + PER_SHARD)
        columns = {
            "key": [f"class/{row}" for row in rows],
            "offset": [512 + 2048 * row for row in rows],
            "size": [100 + row for row in rows],
            "ext": ["jpg"] * PER_SHARD,
            "labels": LABELS[first : first + PER_SHARD],
            "width": [9] * PER_SHARD,
            "height": [7] * PER_SHARD,
            "xxh128": [bytes([row + 1]) * 16 for row in rows],
        }
        tables.append(pa.Table.from_pydict(columns, ROWS))
        shards.append(Shard(f"train-{first // PER_SHARD:06d}.tar", "train", PER_SHARD, 1000, "ab" * 32))
        (path / shards[-1].name).write_bytes(b"x" * 1000)
    return write_dataset(path, shards, tables, list("abcdefg"), {"path": "/raw"}, {"seed": 0})


def content(path: Path) -> dict[str, object]:
    """All that training takes from a data set."""
    dataset = open_dataset(path)
    split = dataset.split("train")
    return {
        "classes": dataset.classes,
        "fingerprint": dataset.fingerprint,
        "format": dataset.info["format"],
        "samples": dataset.info["samples"],
        "shards": [(Path(name).name, size) for name, size in zip(split.shard_paths, split.shard_sizes, strict=True)],
        "columns": [
            np.asarray(split.index.__dict__[name]).tobytes() for name in ("offsets", "sizes", "labels", "hashes")
        ],
        "starts": split.index.label_starts.tolist(),
        "max_labels": split.max_labels,
        "keys": split.keys(range(len(split))),
        "index": {file.name: file.read_bytes() for file in path.glob("index/train-*/*")},
    }


def test_a_file_is_read_once_and_again_when_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    digest = checksum_cache.digest_of
    monkeypatch.setattr(checksum_cache, "digest_of", lambda path, kind: reads.append(path) or digest(path, kind))
    path = tmp_path / "file"
    path.write_bytes(b"a")
    expected = hashlib.sha256(b"a").hexdigest()
    for _ in range(2):  # Just written: it could be written again within the resolution of its time.
        assert checksum_cache.checksum_of(path, expected) == expected
    assert len(reads) == 2
    os.utime(path, ns=(10**18, 10**18))
    monkeypatch.chdir(tmp_path)
    for name in (path, path, Path("file"), path):  # By whatever path it is named.
        assert checksum_cache.checksum_of(name, expected) == expected
    assert len(reads) == 3
    path.write_bytes(b"b")
    os.utime(path, ns=(10**18, 10**18))  # The same size and time: what is left is when the inode changed.
    assert checksum_cache.checksum_of(path, expected) != expected
    assert checksum_cache.checksum_of(path, expected) != expected
    assert len(reads) == 5


def test_a_cache_folder_that_cannot_be_written_or_holds_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make(tmp_path / "data").path
    for file in [path / SAMPLES_FILE, path / SHARDS_FILE, *path.glob("index/*/*")]:
        os.utime(file, ns=(10**18, 10**18))
    expected = content(path)
    records = list(checksum_cache.cache_home().glob("proven/*"))
    assert len(records) == 9
    for record in records:
        record.write_text("{")
    assert content(path) == expected
    shutil.rmtree(checksum_cache.cache_home())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert content(path) == expected
