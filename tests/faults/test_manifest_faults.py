"""Damaged files that describe a data set are found when what is damaged is first used, and by verify."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.base.errors import OneRankCrashError, UserError
from pipeline.data.dataset import manifest, mapped_index
from pipeline.data.dataset.manifest import (
    CHUNKS_FILE,
    ROWS,
    SAMPLES_FILE,
    Dataset,
    Shard,
    open_dataset,
    targets_field,
    write_dataset,
)
from pipeline.data.dataset.split import Split

COUNT = 3000
WHERE = [0, 1000, 2999]


def make(path: Path, count: int) -> Dataset:
    """A manifest of 3 shards of nothing: samples with several labels and two numbers."""
    path.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    columns = {
        "key": [f"class/{row}" for row in range(count)],
        "offset": [512 + 2048 * row for row in range(count)],
        "size": random.integers(1, 2**20, count),
        "ext": ["jpg"] * count,
        "labels": [[row % 5] if row % 4 else [row % 5, 6] for row in range(count)],
        "width": [9] * count,
        "height": [7] * count,
        "xxh128": [random.bytes(16) for _ in range(count)],
        "targets": random.standard_normal((count, 2)).tolist(),
    }
    table, part = pa.Table.from_pydict(columns, ROWS.append(targets_field(2))), count // 3
    shards = [Shard(f"train-00000{n}.tar", "train", part, 1000, "ab" * 32) for n in range(3)]
    for shard in shards:
        (path / shard.name).write_bytes(b"x" * 1000)
    tables = [table.slice(n * part, part) for n in range(3)]
    return write_dataset(path, shards, tables, list("abcdefg"), {}, {}, targets=["age", "dose"])


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
            getattr(split.index, name)[:].tobytes() for name in ("offsets", "sizes", "labels", "hashes", "targets")
        ],
        "starts": split.index.label_starts[:].tolist(),
        "max_labels": split.max_labels,
        "keys": split.keys(range(len(split))),
        "index": {file.name: file.read_bytes() for file in path.glob("index/train-*/*")},
    }


def content_after_a_restart(path: Path) -> dict[str, object]:
    """The same, by a command that is started again if it found a damaged index."""
    try:
        return content(path)
    except OneRankCrashError:
        return content(path)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """In chunks of 128 rows and 512 bytes."""
    monkeypatch.setattr(mapped_index, "ROWS", 128)
    monkeypatch.setattr("pipeline.data.storage.checksums.CHUNK_BYTES", 512)
    monkeypatch.setattr(manifest, "_ROWS_PER_GROUP", 1000)
    return make(tmp_path, COUNT)


def flip(file: Path, share: float) -> None:
    """Flip one bit at this share of a file."""
    content = bytearray(file.read_bytes())
    content[min(int(share * len(content)), len(content) - 1)] ^= 4
    file.write_bytes(content)


USES: dict[str, Callable[[Split, int], object]] = {
    "offsets": Split.place_of,
    "sizes": Split.place_of,
    "label_starts": Split.labels_of,
    "labels": Split.labels_of,
    "hashes": Split.hash_of,
    "targets": Split.targets_of,
}


@pytest.mark.parametrize("column", [*USES])
@pytest.mark.parametrize("place", WHERE)
def test_a_flipped_bit_of_the_index_is_found_at_its_first_use_and_mended_by_a_restart(
    column: str, place: int, data: Dataset
) -> None:
    whole, use = data.split("train"), USES[column]
    expected = [np.array(use(whole, row)) for row in WHERE]  # Copies: others are views of the file.
    (folder,) = data.index_folders("train")[0].parent.glob("train-*")
    flip(folder / column, place / COUNT)
    split = open_dataset(data.path).split("train")
    assert not mapped_index.is_intact(folder)
    for row, right in zip(WHERE, expected, strict=True):
        if row != place:  # In other chunks.
            assert np.array_equal(use(split, row), right)
    for _ in range(2):
        with pytest.raises(OneRankCrashError, match=column):
            use(split, place)
    split = open_dataset(data.path).split("train")
    assert all(np.array_equal(use(split, row), right) for row, right in zip(WHERE, expected, strict=True))
    assert mapped_index.is_intact(folder)


@pytest.mark.parametrize("whole", ["label_values", "label_counts", "target_values"])
def test_a_flipped_bit_is_found_where_a_column_is_read_as_a_whole(whole: str, data: Dataset) -> None:
    (folder,) = data.index_folders("train")[0].parent.glob("train-*")
    column = {"label_values": "labels", "label_counts": "label_starts", "target_values": "targets"}[whole]
    flip(folder / column, 0.7)
    split = open_dataset(data.path).split("train")
    with pytest.raises(OneRankCrashError, match=column):
        getattr(split, whole)


@pytest.mark.parametrize("file", ["chunks", "index.json"])
@pytest.mark.parametrize("share", [0, 0.3, 0.6, 0.999])
def test_flipped_bits_of_the_description_of_an_index_are_found_at_opening(
    file: str, share: float, data: Dataset
) -> None:
    (folder,) = data.index_folders("train")[0].parent.glob("train-*")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    flip(folder / file, share)
    assert not mapped_index.is_intact(folder)
    open_dataset(data.path).split("train")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "made again"


def test_a_flipped_bit_of_the_table_is_found_where_it_is_read_and_by_verify(data: Dataset) -> None:
    table, keys = data.path / SAMPLES_FILE, open_dataset(data.path).split("train").keys(WHERE)
    whole = table.read_bytes()
    missed = 0
    for share in np.linspace(0, 1, 40).tolist():
        flip(table, share)
        dataset = open_dataset(data.path)
        assert dataset.damaged_tables() == [SAMPLES_FILE]
        split = dataset.split("train")  # Training does not read the table.
        with contextlib.suppress(UserError):
            assert split.keys(WHERE) == keys
            missed += 1
        with pytest.raises(UserError, match=SAMPLES_FILE):
            list(dataset.table("train").read(dataset.table("train").open()[0].schema_arrow.names))
        table.write_bytes(whole)
    assert 3 < missed < 37, "only what is read is compared"
    flip(data.path / CHUNKS_FILE, 0.5)
    assert open_dataset(data.path).damaged_tables() == [CHUNKS_FILE]
    with pytest.raises(UserError, match=CHUNKS_FILE):
        open_dataset(data.path).split("train").keys([0])
