"""Parquet with odd columns, drawn from a seed: each file is read as it says, or refused in one line.

Odd are two columns of one name, types that are no labels or no images, nulls at any level, dictionaries, nested types,
huge numbers, no rows, and files of one data set whose types differ. A failure is repeated by `make(number, ...)`.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from raw_images import jpeg

from data_tools.sources import list_source
from pipeline.base.errors import UserError
from pipeline.settings.commands.data import ShardConfig

NUM_TABLES = 500
SEED = 27
IMAGES = [jpeg(i) for i in range(3)]

NUMBERS = [0, 1, 2, 7, -1, 2**31, 2**63 - 1, 2**64 - 1, None]
TEXTS = ["cat", "dog", " dog ", "2", "²", "-1", "9" * 5000, "", "\0", "a/b", None]
NUMBER_TYPES = [pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.dictionary(pa.int8(), pa.int64())]
TEXT_TYPES = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
NO_LABELS = [
    pa.array([1.5, float("nan"), None]),
    pa.array([True, False, None]),
    pa.nulls(3),
    pa.array([b"cat", b"\xff", None]),
    pa.array([{"name": "cat"}, {"name": None}, None]),
    pa.array([[[1]], [[]], None]),
    pa.array([[{"a": 1}], [], None]),
    pa.array([1, 2, 3], pa.timestamp("ms")),
    pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
    pa.array([[1, 2], [3, 4], None], pa.list_(pa.int64(), 2)),
]
NO_IMAGES = [
    pa.array(["text", None, ""]),
    pa.array([1, 2, None]),
    pa.nulls(3),
    pa.array([[b"1"], [], None]),
    pa.array([{"bytes": "text"}] * 3),
    pa.array([{"data": b"1"}] * 3),
    pa.array([{"bytes": {"bytes": b"1"}}] * 3),
]


def chosen(rng: np.random.Generator, values: list) -> Any:
    return values[int(rng.integers(len(values)))]


def labels(rng: np.random.Generator) -> pa.Array:
    """Three labels, mostly of a type that can hold some."""
    if rng.random() < 0.25:
        return chosen(rng, NO_LABELS)
    kind, values = chosen(rng, [(kind, NUMBERS) for kind in NUMBER_TYPES] + [(kind, TEXTS) for kind in TEXT_TYPES])
    # Half of the tables have ordinary values only, so that enough of them are read.
    values = values[:3] if rng.random() < 0.5 else values
    rows: list[Any] = [chosen(rng, values) for _ in range(3)]
    if rng.random() < 0.5:
        kind = chosen(rng, [pa.list_, pa.large_list])(kind)
        rows = [chosen(rng, [[], None, [row], [row], [row, chosen(rng, values)]]) for row in rows]
    try:
        return pa.array(rows, kind)
    except (pa.ArrowException, OverflowError):  # A number that this type does not hold.
        return pa.array([0, 1, 0])


def images(rng: np.random.Generator) -> pa.Array:
    data: list[bytes | None] = [image if rng.random() < 0.9 else chosen(rng, [None, b"", b"text"]) for image in IMAGES]
    match int(rng.integers(7)):
        case 0:
            return chosen(rng, NO_IMAGES)
        case 1:
            return pa.array(data, pa.large_binary())
        case 2:
            return pa.array([{"bytes": image, "path": chosen(rng, ["1.jpg", None])} for image in data])
        case 3:
            return pa.array([{"path": "a", "bytes": image} if image else None for image in data])
        case 4:
            return pa.array(data, pa.binary()).dictionary_encode()
        case _:
            return pa.array(data, pa.binary())


def paths(rng: np.random.Generator) -> pa.Array:
    values = ["1.jpg", "a/2.jpg", "../3.jpg"] + ["", None, "\0", "/x/4.jpg", "5", "a/2.png"] * (rng.random() < 0.3)
    kind = chosen(rng, [pa.string(), pa.string(), pa.large_string(), *TEXT_TYPES, pa.binary()])
    return pa.array([values[int(i)] for i in rng.permutation(len(values))[:3]]).cast(kind)


def make(number: int, folder: Path) -> tuple[ShardConfig, list[pa.Table]]:
    """Write the files of table `number`. Returns the settings that read them, and their content."""
    rng = np.random.default_rng([SEED, number])
    is_list = rng.random() < 0.3
    tables = []
    for _ in range(1 if is_list or rng.random() < 0.7 else 2):
        columns = [("path", paths(rng)) if is_list else ("image", images(rng)), ("label", labels(rng))]
        for name in ("label", "image", "path", "label.x", "LABEL", ""):
            if rng.random() < 0.06:
                columns.append((name, labels(rng)))
        columns = [columns[int(i)] for i in rng.permutation(len(columns))]
        table = pa.table([column for _, column in columns], [name for name, _ in columns])
        tables.append(table if rng.random() < 0.9 else table.slice(0, int(rng.integers(2))))
        with open(folder / f"{len(tables)}.parquet", "wb") as file:
            pq.write_table(tables[-1], file, row_group_size=2)
    layout = "list" if is_list else chosen(np.random.default_rng(number), ["parquet", "auto"])
    source = folder / "1.parquet" if is_list or len(tables) == 1 else folder
    return ShardConfig(source=str(source), out="unused", layout=layout), tables


def as_written(value: Any) -> list[str]:
    """The names of the labels of one row."""
    values = value if isinstance(value, list) else [value]
    return sorted({str(label).strip() for label in values if label is not None and str(label).strip()})


def outcome(number: int, work: Path) -> str:
    config, tables = make(number, work)
    said = ""
    try:
        listing = list_source(Path(config.source), config, work.parent / f"{work.name} staging")
    except UserError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1000, said
    if said:
        return "refused"
    found = [sorted(listing.classes[label] for label in row) for row in listing.table["labels"].to_pylist()]
    expected = [as_written(value) for table in tables for value in table["label"].to_pylist()]
    if listing.skipped:
        assert len(found) + len(listing.skipped) == len(expected)
        return "skipped"
    if config.layout == "list":  # Sorted by key.
        found, expected = sorted(found), sorted(expected)
    assert found == expected
    assert not any(None in value for table in tables for value in table["label"].to_pylist() if isinstance(value, list))
    return "read"


def test_every_odd_table_is_read_as_it_says_or_refused(tmp_path: Path) -> None:
    found = {"read": 0, "skipped": 0, "refused": 0}
    failed = []
    for number in range(NUM_TABLES):
        work = tmp_path / str(number)
        work.mkdir()
        try:
            found[outcome(number, work)] += 1
        except Exception as error:
            failed.append(f"{number}: {error!r}"[:500])
        shutil.rmtree(work)
    assert not failed, f"{len(failed)} failed:\n" + "\n".join(failed)
    assert found["read"] > NUM_TABLES // 10, found
    assert found["refused"] > NUM_TABLES // 10, found
    assert found["skipped"], found
