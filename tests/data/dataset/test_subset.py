"""A limit keeps a random part of the samples that are not excluded; smaller parts are inside larger ones; the seed
decides.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.base.errors import UserError
from pipeline.data.dataset.exclusion import EXCLUDED, rows_beyond_limit, write_list
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.loading.order import SampleOrder
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.settings.quantities import Limit

NOTHING = np.empty(0, np.int64)


def part(limit: str, num_rows: int = 10_000, excluded: np.ndarray = NOTHING, seed: int = 0) -> set[int]:
    beyond = rows_beyond_limit(num_rows, excluded, Limit.parse(limit), seed)
    assert np.array_equal(beyond, np.unique(beyond))
    assert not np.isin(beyond, excluded).any()
    return set(range(num_rows)) - set(beyond.tolist()) - set(excluded.tolist())


def test_the_smaller_lies_in_the_larger() -> None:
    sizes = ["1", "100", "10%", "3000", "1e4"]
    parts = [part(size) for size in sizes]
    assert [len(rows) for rows in parts] == [1, 100, 1000, 3000, 10_000]
    assert all(small < large for small, large in pairwise(parts))
    excluded = np.arange(0, 10_000, 3)
    assert part("10%", excluded=excluded) < part("50%", excluded=excluded)
    assert len(part("10%", excluded=excluded)) == 667


def test_it_is_random_and_the_seeds() -> None:
    rows, other = part("20%"), part("20%", seed=1)
    assert part("20%") == rows
    assert 300 < len(rows & other) < 500, "of 2,000 each, 400 are in both by chance"
    halves = np.histogram(list(rows), bins=10, range=(0, 10_000))[0]
    assert (abs(halves - 200) < 60).all(), "from everywhere"


@pytest.fixture
def dataset(tmp_path: Path, make_dataset: Callable[..., Dataset]) -> Dataset:
    """30 samples in shards of 7; the bytes of sample i are its number."""
    files = [str(row).encode() for row in range(30)]
    return make_dataset(tmp_path / "data", files, [[row % 5] for row in range(30)], 7)


def test_a_limited_split_is_a_split(dataset: Dataset) -> None:
    listed = {"split": ["train"] * 2, "row": [4, 9], "key": ["class/4", "class/9"], "reason": ["x"] * 2}
    write_list(dataset, "bad", pa.table(listed, EXCLUDED))
    split = dataset.split("train", limit=Limit.parse("12"), seed=5)
    kept = sorted(part("12", 30, np.array([4, 9]), seed=5))
    assert split.manifest_rows(np.arange(len(split))).tolist() == kept
    reader = ShardReader(split)
    assert [reader.read(row).decode() for row in range(12)] == [str(row) for row in kept]
    reader.close()
    assert split.label_values.tolist() == [row % 5 for row in kept]
    rows, epochs = SampleOrder(split.shard_sizes, 0, 4, 2, 5).rows(np.arange(24))
    assert sorted(rows[epochs == 0].tolist()) == list(range(12)), "an epoch is the subset"
    assert split.notes() == ["excluded from train: 18 of 30 samples (bad 2, data.limit 16)"]
    assert split.excluded != dataset.split("train", limit=Limit.parse("12"), seed=6).excluded
    assert dataset.split("train", limit=Limit.parse("100%")).excluded == dataset.split("train").excluded


@pytest.mark.parametrize("limit", ["29", "0", "0.1%", "0.5"])
def test_a_limit_that_cannot_be(dataset: Dataset, limit: str) -> None:
    listed = {"split": ["train"] * 2, "row": [4, 9], "key": ["class/4", "class/9"], "reason": ["x"] * 2}
    write_list(dataset, "bad", pa.table(listed, EXCLUDED))
    with pytest.raises(UserError, match=rf"data.limit = {limit}"):
        dataset.split("train", limit=Limit.parse(limit))
