"""Excluded samples are never addressed, by any method of the split; unusable lists are refused in one line."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.errors import UserError
from pipeline.data.dataset.exclusion import EXCLUDED, read_lists, write_list
from pipeline.data.dataset.manifest import Dataset, Split, open_dataset
from pipeline.data.loading.order import SampleOrder
from pipeline.data.loading.shard_reader import ShardReader

COUNT = 30
LABELS = [[row % 5] * (row % 4) for row in range(COUNT)]


@pytest.fixture
def dataset(tmp_path: Path, make_dataset: Callable[..., Dataset]) -> Dataset:
    """30 samples in shards of 7; the bytes of sample i are its number."""
    return make_dataset(tmp_path / "data", [str(row).encode() for row in range(COUNT)], LABELS, 7)


def listed(rows: list[int], split: str = "train") -> pa.Table:
    columns = {
        "split": [split] * len(rows),
        "row": rows,
        "key": [f"class/{row}" for row in rows],
        "reason": ["x"] * len(rows),
    }
    return pa.table(columns, EXCLUDED)


def contents(split: Split) -> list[str]:
    reader = ShardReader(split)
    found = [reader.read(row).decode() for row in range(len(split))]
    reader.close()
    return found


@settings(max_examples=25)
@given(lists=st.lists(st.sets(st.integers(0, COUNT - 1), max_size=20), max_size=3))
@pytest.mark.slow
def test_only_what_is_kept_has_an_address(tmp_path_factory, make_dataset, lists: list[set[int]]) -> None:
    together = set().union(*lists)
    files = [str(row).encode() for row in range(COUNT)]
    dataset = make_dataset(tmp_path_factory.mktemp("kept") / "data", files, LABELS, 7)
    for number, rows in enumerate(lists):
        write_list(dataset, f"list{number}", listed(list(rows)))
    if len(together) == COUNT:
        with pytest.raises(UserError, match=r"every sample .* is excluded"):
            dataset.split("train")
        return
    split = dataset.split("train")
    kept = [row for row in range(COUNT) if row not in together]
    rows = np.arange(len(kept))
    assert len(split) == len(kept)
    assert split.manifest_rows(rows).tolist() == kept
    assert contents(split) == [str(row) for row in kept]
    assert split.keys(rows) == [f"class/{row}" for row in kept]
    assert [split.labels_of(row).tolist() for row in rows] == [LABELS[row] for row in kept]
    assert split.shard_of(rows).tolist() == [row // 7 for row in kept]
    assert split.shard_sizes.tolist() == np.bincount([row // 7 for row in kept], minlength=5).tolist()
    assert split.label_values.tolist() == [label for row in kept for label in LABELS[row]]
    assert split.label_counts.tolist() == [len(LABELS[row]) for row in kept]
    assert [split.place_of(row)[1] for row in rows] == [len(str(row)) for row in kept]
    order = SampleOrder(split.shard_sizes, 0, 4, 2, 5)
    assert sorted(order.rows(np.arange(len(split)))[0].tolist()) == rows.tolist()
    assert split.excluded_by == {f"list{number}": len(rows) for number, rows in enumerate(lists)}
    assert (split.excluded == "none") == (not together)


def test_which_lists_are_honoured_is_a_choice(dataset: Dataset) -> None:
    write_list(dataset, "damaged", listed([1, 2]))
    write_list(dataset, "test_copies", listed([2, 9, 11]))
    lengths = {"all": 26, "none": 30, "damaged": 28, "test_copies": 27, "test_copies, damaged": 26}
    assert {choice: len(dataset.split("train", choice)) for choice in lengths} == lengths
    assert dataset.split("train").notes() == ["excluded from train: 4 of 30 samples (damaged 2, test_copies 3)"]
    assert dataset.split("train", "none").notes() == []
    write_list(dataset, "none_of_train", EXCLUDED.empty_table())
    assert dataset.split("train", "none_of_train").notes() == [], "nothing is excluded"
    (dataset.path / "exclude" / "none_of_train.parquet").unlink()
    with pytest.raises(UserError, match="'damage'"):
        dataset.split("train", "damage")


def test_what_is_left_out_has_a_name_of_its_own(dataset: Dataset) -> None:
    """The text depends on the excluded samples, not on the lists that exclude them."""
    write_list(dataset, "a", listed([1, 2]))
    first = dataset.split("train").excluded
    write_list(dataset, "b", listed([2]))
    assert dataset.split("train").excluded == first
    names = {first}
    for rows in ([3], [], [1, 2, 3, 4]):
        write_list(dataset, "a", listed(rows))
        names.add(dataset.split("train").excluded)
    assert len(names) == 4
    assert first.startswith("2 samples (")


def test_a_shard_that_is_gone_or_cut_does_not_stop_the_others(dataset: Dataset) -> None:
    (dataset.path / "train-000001.tar").unlink()
    with open(dataset.path / "train-000002.tar", "r+b") as file:
        file.truncate(3000)
    write_list(dataset, "damaged", listed([*range(7, 13), *range(17, 21)]))
    with pytest.raises(UserError, match=r"train-000001.tar is missing"):
        dataset.split("train")
    write_list(dataset, "damaged", listed([*range(7, 14), *range(17, 21)]))
    split = open_dataset(dataset.path).split("train")
    assert contents(split) == [str(row) for row in [*range(7), *range(14, 17), *range(21, 30)]]


def test_lists_that_do_not_fit_are_refused(dataset: Dataset, tmp_path: Path, make_dataset: Callable) -> None:
    with pytest.raises(AssertionError, match="not those of the manifest"):
        write_list(dataset, "shifted", listed([4]).set_column(2, "key", pa.array(["class/5"])))
    assert read_lists(dataset) == {}

    path = write_list(dataset, "a", listed([4]))
    other = make_dataset(tmp_path / "other", [b"other"] * 3, [[5]] * 3, 9)
    (other.path / "exclude").mkdir()
    (other.path / "exclude" / "a.parquet").write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"a\.parquet"):
        other.split("train")
    assert len(other.split("train", "none")) == 3

    table = pq.read_table(path)
    pq.write_table(table.set_column(1, "row", pa.array([5])), path)
    with pytest.raises(UserError, match=r"a\.parquet"):
        dataset.split("train")
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"a\.parquet"):
        dataset.split("train")
