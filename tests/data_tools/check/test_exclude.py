"""launch/exclude.py: from a CSV to a list of excluded samples."""

from pathlib import Path

import pyarrow as pa
import pytest
from tiny import make_dataset

from data_tools.check import exclude
from pipeline.base.errors import UserError
from pipeline.data.dataset.exclusion import read_lists
from pipeline.data.dataset.manifest import ROWS, open_dataset, write_dataset
from pipeline.settings import schema
from pipeline.settings.commands.data import ExcludeConfig


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_dataset(tmp_path / "data", {"train": 12, "val": 6})


def listed(data: Path, name: str = "wrong_labels") -> list[tuple[str, int]]:
    table = read_lists(open_dataset(data), name)[name]
    return list(zip(table["split"].to_pylist(), table["row"].to_pylist(), strict=True))


def run(data: Path, lines: str, *more: str) -> int:
    file = data.parent / "samples.csv"
    file.write_text(lines, encoding="utf-8-sig")  # As a spreadsheet writes it.
    return exclude.run(schema.load(ExcludeConfig, None, [f"data={data}", f"samples={file}", *more]))


def test_samples_are_added_to_the_list(data: Path) -> None:
    train, val = (open_dataset(data).split(name).keys(range(6)) for name in ("train", "val"))
    assert run(data, f"key,split,label\n{train[4]},train,cat\n{val[2]},val,dog\n") == 2
    assert listed(data) == [("train", 4), ("val", 2)]
    assert run(data, f"split,key\ntrain,{train[4]}\ntrain,{train[1]}\n") == 1
    assert listed(data) == [("train", 1), ("train", 4), ("val", 2)]
    assert len(open_dataset(data).split("train")) == 10
    assert run(data, f"split,key\nval,{val[0]}\n", "name=mine") == 1
    assert listed(data, "mine") == [("val", 0)]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("split,key\ntrain,nothing\n", "nothing"),
        ("split,key\nnowhere,nothing\n", "nowhere"),
        ("key\nx\n", "split"),
        ("", "samples"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(data: Path, lines: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        run(data, lines)
    assert not (data / "exclude").exists()


def test_samples_of_one_key_are_told_apart_by_their_rows(data: Path) -> None:
    """Tars of others may repeat a key."""
    dataset = open_dataset(data)
    (shard,) = (shard for shard in dataset.shards() if shard.split == "train")
    (table,) = dataset.table("train").read(ROWS.names)
    table = table.set_column(table.schema.get_field_index("key"), "key", pa.array(["same"] * 12))
    write_dataset(data, [shard], [table], dataset.classes, {}, {})
    with pytest.raises(UserError, match="same"):
        run(data, "split,key\ntrain,same\n")
    assert run(data, "split,row,key\ntrain,3,same\ntrain,5,same\n") == 2
    assert listed(data) == [("train", 3), ("train", 5)]
