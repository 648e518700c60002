"""The order of a mixture: exact shares at every position, the same for any ranks and restart point, each set in its own
epochs.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.errors import UserError
from pipeline.data.loading.order import SampleOrder
from pipeline.data.mixture.order import MixtureOrder, samples_a_round, seed_of_set
from pipeline.data.mixture.phases import MAX_PERIOD, Mixture, Phase, Shares, whole_numbers
from pipeline.settings.run import DataConfig

_WEIGHTS = st.lists(st.integers(1, 99), min_size=1, max_size=6)


def mixture(sizes: list[list[int]], phases: list[Phase], batch: int, seed: int = 5, streams: int = 2) -> MixtureOrder:
    """The order of sets with these shards, as a new process would build it."""
    first = Mixture((), phases[:1])
    data = DataConfig(path="", streams=streams)
    orders = [
        SampleOrder(np.array(shards), seed_of_set(seed, i), samples_a_round(first, i, data, batch), streams, window=7)
        for i, shards in enumerate(sizes)
    ]
    return MixtureOrder(orders, phases, batch)


@st.composite
def mixtures(draw: st.DrawFn) -> MixtureOrder:
    sizes = draw(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), min_size=1, max_size=5))
    weights = st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)).filter(any)
    first = draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    starts = sorted(draw(st.sets(st.integers(1, 20), max_size=2)))
    phases = [Phase(0, Shares(first)), *(Phase(start, Shares(draw(weights))) for start in starts)]
    return mixture(sizes, phases, draw(st.integers(1, 8)) * 2, draw(st.integers(0, 2**63 - 1)))


@settings(max_examples=100)
@given(weights=_WEIGHTS, start=st.integers(0, 10**13))
def test_the_first_samples_hold_each_share_rounded_up_or_down(weights: list[int], start: int) -> None:
    shares = Shares(weights)
    exact = np.array(weights) / sum(weights)
    sets, places = shares.locate(np.arange(start, start + 500))
    before = shares.first(start)
    counts = before + (sets[:, None] == np.arange(len(weights))).cumsum(0)
    # In whole numbers: 10^13 samples are beyond the precision of a product with a share.
    lag = (
        (counts - before)
        - np.arange(1, 501)[:, None] * exact
        + [float(int(n) * sum(weights) - start * w) / sum(weights) for n, w in zip(before, weights, strict=True)]
    )
    assert np.abs(lag).max() <= 1 - 1 / max(2 * len(weights) - 2, 2) + 1e-6
    assert (places == (counts - 1)[np.arange(500), sets]).all()


def test_five_sets_are_exact_in_every_window_of_a_million_samples() -> None:
    weights = [0.31, 0.27, 0.2, 0.12, 0.1]
    sets, _ = Shares(weights).locate(np.arange(1_000_000))
    for number, weight in enumerate(weights):
        before = np.concatenate([[0], np.cumsum(sets == number)])
        windows = before[10_000:] - before[:-10_000]  # Each of the 990,001, wherever it begins.
        assert (windows == round(10_000 * weight)).all()
    # Shares that no window of 10,000 can hold exactly: at most one from the exact number, rounded.
    weights = [3, 7, 11, 13, 19]
    sets, _ = Shares(weights).locate(np.arange(1_000_000))
    for number, weight in enumerate(weights):
        before = np.concatenate([[0], np.cumsum(sets == number)])
        assert np.abs(before[10_000:] - before[:-10_000] - round(10_000 * weight / 53)).max() <= 1


def test_weights_are_whole_numbers_or_the_nearest() -> None:
    assert whole_numbers([70, 30]).tolist() == whole_numbers([0.7, 0.3]).tolist() == [7, 3]
    assert whole_numbers([1e-4, 0.9999]).tolist() == [1, 9999]
    sizes = [14_197_122, 1_281_167]
    nearest = whole_numbers(sizes)
    assert nearest.sum() <= MAX_PERIOD
    np.testing.assert_allclose(nearest / nearest.sum(), np.array(sizes) / sum(sizes), atol=1e-9)
    with pytest.raises(UserError, match="below"):
        whole_numbers([1e-7, 1])


@settings(max_examples=25)
@given(order=mixtures(), data=st.data())
def test_any_ranks_and_restarts_see_the_same_batches_in_the_same_order(
    order: MixtureOrder, data: st.DataObject
) -> None:
    rows, epochs = order.rows(np.arange(30 * order.global_batch))
    for world_size in (w for w in (1, 2, 3, 4) if order.global_batch % w == 0):
        for first in data.draw(st.lists(st.integers(0, 29), min_size=3, max_size=3)):
            parts = [order.slice(first, rank, world_size) for rank in range(world_size)]
            batch = slice(first * order.global_batch, (first + 1) * order.global_batch)
            np.testing.assert_array_equal(np.concatenate([part for part, _ in parts]), rows[batch])
            np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), epochs[batch])


@settings(max_examples=25)
@given(order=mixtures())
def test_each_set_has_its_own_epochs(order: MixtureOrder) -> None:
    end = 25 * order.global_batch
    rows, _ = order.rows(np.arange(end))
    counts = order.first(end)
    for number, of_set in enumerate(order.orders):
        first, last = order.set_starts[number], order.set_starts[number + 1]
        mine = (rows >= first) & (rows < last)
        assert mine.sum() == counts[number]
        # In its own order, over the changes of the shares.
        np.testing.assert_array_equal(rows[mine] - first, of_set.rows(np.arange(counts[number]))[0])


def test_one_set_is_in_the_order_that_it_has_alone() -> None:
    shards = np.array([30, 25, 41])
    alone = SampleOrder(shards, 3, 16, 2, 7)
    mixed = mixture([shards.tolist(), [9]], [Phase(0, Shares([2.0, 0.0])), Phase(20, Shares([1.0, 1.0]))], 16, seed=3)
    for step in range(20):
        np.testing.assert_array_equal(mixed.slice(step, 1, 2), alone.slice(step, 1, 2))
