"""Balanced epochs: each class's places are exact in expectation and within one of it, and its samples are used as
evenly as possible.
"""

import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_dataset as make_tiny_dataset

from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.random_numbers import Purpose
from pipeline.data.dataset.exclusion import EXCLUDED, write_list
from pipeline.data.dataset.manifest import Split, open_dataset
from pipeline.data.loading import balance as balance_module
from pipeline.data.loading.balance import ClassBalance, FirstLabels
from pipeline.data.loading.order import SampleOrder, order_of_split
from pipeline.data.mixture.run_data import run_splits
from pipeline.settings.quantities import Limit
from pipeline.settings.run import DataConfig


def exact_places(sizes: np.ndarray, power: float) -> np.ndarray:
    weights = sizes.astype(np.longdouble) ** power
    return (sizes.sum() * weights / weights.sum()).astype(float)


@st.composite
def balances(draw: st.DrawFn) -> tuple[ClassBalance, dict]:
    """A balance of classes of 1 to 40 samples, in shards of 0 to 30; and its arguments."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))
    labels = np.repeat(np.arange(-1, len(sizes) - 1), sizes)  # The first class is that of no label.
    np.random.default_rng(draw(st.integers(0, 99))).shuffle(labels)
    ends = sorted(draw(st.lists(st.integers(0, len(labels)), max_size=6)))
    power = draw(st.one_of(st.sampled_from([0.0, 0.5]), st.floats(0, 0.99)))
    given = {
        "labels": labels,
        "shard_starts": np.array([0, *ends, len(labels)]),
        "power": power,
        "seed": draw(st.integers(0, 2**63 - 1)),
    }
    return ClassBalance(**given), given


@settings(max_examples=60)
@given(made=balances(), epoch=st.integers(0, 50))
def test_places_of_a_class_are_within_one_of_their_expectation(made: tuple[ClassBalance, dict], epoch: int) -> None:
    balance, arguments = made
    places, exact = balance.places(epoch), exact_places(balance.sizes, arguments["power"])
    assert places.sum() == balance.num_samples == len(arguments["labels"])
    assert (np.abs(places - exact) < 1 + 1e-9).all()
    earlier = sum((balance.places(e) for e in range(epoch)), np.zeros(len(places), np.int64))
    assert balance.places_before(epoch).tolist() == earlier.tolist()
    # Not only each epoch: also the sum of all until then.
    assert (np.abs(earlier - epoch * exact) < 6).all()


@settings(max_examples=40)
@given(made=balances())
def test_places_are_exact_in_expectation(made: tuple[ClassBalance, dict]) -> None:
    """Over all 2**64 roundings, each as likely as the others: places change only where a fraction reaches 1."""
    balance, arguments = made
    steps = sorted({0, *(2**64 - int(fraction) for fraction in balance._fractions if fraction)})
    mean = [Fraction(0)] * len(balance.sizes)
    for first, end in zip(steps, [*steps[1:], 2**64], strict=True):
        balance._offset = np.uint64(first)
        mean = [sum_ + Fraction(end - first, 2**64) * int(n) for sum_, n in zip(mean, balance.places(0), strict=True)]
    np.testing.assert_allclose([float(m) for m in mean], exact_places(balance.sizes, arguments["power"]), rtol=1e-12)
    if arguments["power"] == 0:
        share = Fraction(balance.num_samples, len(mean))
        assert all(abs(m - share) <= Fraction(1, 2**63) for m in mean)


@settings(max_examples=60)
@given(made=balances(), epoch=st.integers(0, 12))
def test_samples_of_a_class_are_used_equally_often_or_once_more(made: tuple[ClassBalance, dict], epoch: int) -> None:
    """In each epoch, and from the start of training to the end of each epoch."""
    balance, arguments = made
    labels, total = arguments["labels"], np.zeros(balance.num_samples, np.int64)
    for e in range(epoch + 1):
        contents = balance.contents(e)
        assert contents.used(np.arange(balance.num_samples)).tolist() == total.tolist()
        times = np.bincount(contents.rows, minlength=balance.num_samples)
        total += times
        for label, places in zip(balance.classes, balance.places(e), strict=True):
            of_class = labels == label
            assert times[of_class].sum() == places
            assert np.ptp(times[of_class]) <= 1
            assert np.ptp(total[of_class]) <= 1
    # A block holds different samples of one shard.
    for first, end in zip(contents.starts, contents.starts[1:], strict=False):
        rows = contents.rows[first:end]
        assert (np.diff(rows) > 0).all()
        assert len(np.unique(np.searchsorted(arguments["shard_starts"], rows, side="right"))) == 1


@settings(max_examples=40)
@given(
    made=balances(),
    streams=st.integers(1, 4),
    per_round=st.integers(1, 6),
    window=st.integers(1, 30),
    step=st.integers(0, 9),
)
def test_any_ranks_and_any_restart_see_the_same(
    made: tuple[ClassBalance, dict], streams: int, per_round: int, window: int, step: int
) -> None:
    balance, arguments = made
    sizes, batch = np.diff(arguments["shard_starts"]), streams * per_round

    def fresh() -> SampleOrder:
        return SampleOrder(sizes, arguments["seed"], batch, streams, window, ClassBalance(**arguments))

    order = SampleOrder(sizes, arguments["seed"], batch, streams, window, balance)
    whole = [order.slice(s) for s in range(step + 2)]
    for world_size in (w for w in (1, 2, 3, 4) if batch % w == 0):
        parts = [fresh().slice(step, rank, world_size) for rank in range(world_size)]
        for i in (0, 1):
            np.testing.assert_array_equal(np.concatenate([part[i] for part in parts]), whole[step][i])
    # Every use of a sample is its first, second, ... over all of training: no two share their random numbers.
    n = order.num_samples
    epoch = step * batch // n
    rows, uses = order.rows(np.arange((epoch + 1) * n))
    assert sorted(zip(rows.tolist(), uses.tolist(), strict=True)) == [
        (row, use) for row, times in enumerate(np.bincount(rows, minlength=n).tolist()) for use in range(times)
    ]


def test_golden_balanced_order() -> None:
    """As computed on 2026-11-25 by this code: a resumed checkpoint must continue with the same samples."""
    labels = np.array([0, 0, 1, 0, 0, 2, 0, 0, 0, -1, 0, 2])
    balance = ClassBalance(labels, np.array([0, 5, 12]), 0.5, seed=42)
    order = SampleOrder(np.array([5, 7]), 42, 4, 2, 3, balance)
    rows, uses = order.rows(np.arange(24))
    assert rows.tolist() == [0, 1, 9, 6, 2, 3, 7, 11, 2, 5, 9, 10, 9, 8, 1, 0, 5, 10, 9, 2, 11, 2, 4, 11]
    assert uses.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 2, 0, 1, 1, 1, 1, 3, 2, 1, 3, 0, 2]


def test_batches_vary_no_more_than_those_of_a_random_order() -> None:
    """Although a window of a stream holds two shards, and further uses lie in blocks of rare classes alone."""
    labels = np.zeros(40_000, np.int64)
    labels[1:2000], labels[0] = 2, 1
    np.random.default_rng(0).shuffle(labels)
    sizes = np.full(40, 1000)
    order = SampleOrder(sizes, 0, 400, 4, 2000, ClassBalance(labels, np.concatenate([[0], np.cumsum(sizes)]), 0.25, 0))
    batches = labels[order.rows(np.arange(40_000))[0]].reshape(100, 400)
    for label, places in zip((0, 1, 2), order.balance.places(0), strict=True):
        share, found = places / 40_000, (batches == label).mean(1)
        assert found.mean() == pytest.approx(share)
        assert found.std() < 1.3 * (share * (1 - share) / 400) ** 0.5


def test_power_1_is_the_plain_order_and_excluded_samples_do_not_count(dataset: Path) -> None:
    opened = open_dataset(dataset)

    def order_of(**changes: object) -> tuple[SampleOrder, np.ndarray]:
        config = DataConfig(path=str(dataset), eval_split="", streams=2, **changes)
        split, _ = run_splits(opened, config, seed=3)
        return order_of_split(split, config, 3, 8), FirstLabels(split)[:]

    order, labels = order_of()
    assert order.balance is None
    np.testing.assert_array_equal(order.slice(5)[0], SampleOrder(order.shard_sizes, 3, 8, 2, 4096).slice(5)[0])
    order, few = order_of(limit=Limit.parse("61"), balance=0.0)
    assert len(few) == 61 < len(labels)
    rows, _ = order.rows(np.arange(61))
    assert sorted(np.bincount(few[rows])) == [15, 15, 15, 16]


def test_the_rows_of_an_epoch_go_before_those_of_the_next_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A billion samples have 8 GB of them, and TMPDIR may be in memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    there, write = [], ClassBalance._write_contents

    def look_and_write(balance: ClassBalance, epoch: int, *given: Any) -> None:
        there.append(len([*tmp_path.rglob("rows.*")]))
        write(balance, epoch, *given)

    monkeypatch.setattr(ClassBalance, "_write_contents", look_and_write)
    order = SampleOrder(np.array([5, 7]), 0, 4, 2, 3, ClassBalance(np.arange(12) % 5, np.array([0, 5, 12]), 0.5, 0))
    order.rows(np.arange(36))
    assert there == [0, 0, 0]


def plain_contents(labels: np.ndarray, balance: ClassBalance, epoch: int) -> tuple[list[int], list[int], list[int]]:
    """(rows in their order in an epoch, how often each was used before it, where blocks begin), sample by sample."""
    bits = 64 - int(labels.max() + 1).bit_length() - len(labels).bit_length()
    hashes = random_numbers.bits(balance.seed, Purpose.named("order within a class"), np.arange(len(labels)))
    by_class = np.lexsort((hashes >> np.uint64(64 - bits), labels))
    uses, used, first = np.zeros(len(labels), np.int64), np.zeros(len(labels), np.int64), 0
    for size, before, places in zip(balance.sizes, balance.places_before(epoch), balance.places(epoch), strict=True):
        of_class = by_class[first : first + size]
        for counts, begin, end in ((used, 0, before), (uses, before, before + places)):
            np.add.at(counts, of_class[np.arange(begin, end) % size], 1)
        first += size
    found = sorted((copy, row) for row, count in enumerate(uses.tolist()) for copy in range(count))
    shards = np.searchsorted(balance.shard_starts, [row for _, row in found], side="right").tolist()
    keys = [(copy, shard) for (copy, _), shard in zip(found, shards, strict=True)]
    starts = [at for at, key in enumerate(keys) if not at or key != keys[at - 1]]
    return [row for _, row in found], used.tolist(), [*starts, len(found)]


@settings(max_examples=60)
@given(made=balances(), epoch=st.integers(0, 60), sizes=st.sampled_from([(7, 5, 3), (30, 64, 4), (1000, 1000, 1000)]))
def test_any_blocks_give_what_the_plain_computation_gives(
    made: tuple[ClassBalance, dict], epoch: int, sizes: tuple[int, int, int]
) -> None:
    balance, arguments = made
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("_SORTED", "_SAMPLES", "_BLOCK"), sizes, strict=True):
            patch.setattr(balance_module, name, size)
        contents = balance.contents(epoch)
    rows, used, starts = plain_contents(arguments["labels"], balance, epoch)
    assert contents.rows.tolist() == rows
    assert contents.used(np.arange(len(used))).tolist() == used
    assert contents.starts.tolist() == starts


def test_it_is_the_first_label_that_counts_and_none_is_a_class(tmp_path: Path, make_dataset: Callable) -> None:
    def split_of(name: str, labels: list[list[int]], exclude: list[int]) -> Split:
        made = make_dataset(tmp_path / name, [b"x"] * len(labels), labels, 3)
        keys = [f"class/{row}" for row in exclude]
        columns = {"split": ["train"] * len(keys), "row": exclude, "key": keys, "reason": keys}
        write_list(made, "some", pa.table(columns, EXCLUDED))
        return made.split("train")

    split = split_of("several", [[1, 0], [2], [0], [], [2, 0]], [1])
    assert FirstLabels(split)[:].tolist() == [1, 0, -1, 2]
    assert FirstLabels(split)[1:3].tolist() == [0, -1]
    assert FirstLabels(split_of("one", [[0], [1], [2], [1], [0]], [0, 3]))[1:].tolist() == [2, 0]


def test_data_without_labels_is_refused_in_one_line(tmp_path: Path) -> None:
    bare = open_dataset(make_tiny_dataset(tmp_path / "bare", {"train": 5}, labelled=False))
    with pytest.raises(
        UserError, match=r"data\.balance = 0\.5 .* no sample of .*bare, split 'train', has a label\. Leave it at 1\.$"
    ):
        run_splits(bare, DataConfig(path="x", balance=0.5), seed=0)
