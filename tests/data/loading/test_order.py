"""The order of samples: the same for any ranks and restart point, each sample once per epoch, and well mixed."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base import random_numbers
from pipeline.data.loading.loader import eval_requests, train_requests
from pipeline.data.loading.order import SampleOrder


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
    streams = draw(st.integers(1, 8))
    batch = streams * draw(st.integers(1, 8))
    return SampleOrder(np.array(sizes), draw(st.integers(0, 2**63 - 1)), batch, streams, draw(st.integers(1, 50)))


def fresh(order: SampleOrder, **changes: int) -> SampleOrder:
    """The same order as a new process would build it, with empty caches."""
    as_given = {"seed": order.seed, "global_batch": order.global_batch, "streams": len(order.bounds) - 1}
    return SampleOrder(order.shard_sizes, **{**as_given, "window": order.window, **changes})


@settings(max_examples=60)
@given(order=orders(), epoch=st.integers(0, 3))
def test_every_sample_once_an_epoch(order: SampleOrder, epoch: int) -> None:
    n = order.num_samples
    rows, epochs = order.rows(np.arange(epoch * n, (epoch + 1) * n))
    assert sorted(rows.tolist()) == list(range(n))
    assert set(epochs.tolist()) == {epoch}


@settings(max_examples=40)
@given(order=orders(), steps=st.integers(1, 12))
@pytest.mark.slow
def test_any_ranks_see_the_same_batches_in_the_same_order(order: SampleOrder, steps: int) -> None:
    whole = [order.slice(step) for step in range(steps)]
    everything = order.rows(np.arange(steps * order.global_batch))
    np.testing.assert_array_equal(np.concatenate([rows for rows, _ in whole]), everything[0])
    for world_size in (w for w in range(1, order.global_batch + 1) if order.global_batch % w == 0):
        # Every rank is a separate process.
        ranks = [fresh(order) for _ in range(world_size)]
        for step, (rows, epochs) in enumerate(whole):
            parts = [of_rank.slice(step, rank, world_size) for rank, of_rank in enumerate(ranks)]
            np.testing.assert_array_equal(np.concatenate([part for part, _ in parts]), rows)
            np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), epochs)


@settings(max_examples=40)
@given(order=orders(), step=st.integers(0, 40))
def test_a_restart_at_any_step_goes_on_with_the_same(order: SampleOrder, step: int) -> None:
    for earlier in range(step):
        order.slice(earlier)
    restarted = fresh(order)
    for later in range(step, step + 3):
        for ours, theirs in zip(order.slice(later), restarted.slice(later), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=30)
@given(order=orders(), micro_batch=st.integers(1, 9), world_size=st.sampled_from([1, 2, 3, 4]))
def test_micro_batches_are_the_slice_in_order(order: SampleOrder, micro_batch: int, world_size: int) -> None:
    if order.global_batch % world_size:
        return
    for rank in range(world_size):
        rows = [rows for rows, _ in train_requests(order, 2, 5, micro_batch, rank, world_size)]
        expected = [order.slice(step, rank, world_size)[0] for step in (2, 3, 4)]
        np.testing.assert_array_equal(np.concatenate(rows), np.concatenate(expected))
        assert max(map(len, rows)) <= micro_batch


def order_of(**changes: int) -> SampleOrder:
    as_usual = {"seed": 0, "global_batch": 64, "streams": 8, "window": 200}
    return SampleOrder(np.full(40, 100), **{**as_usual, **changes})


def test_epochs_and_seeds_differ() -> None:
    n = 4000
    rows, _ = order_of().rows(np.arange(3 * n))
    epochs = rows.reshape(3, n)
    other_seed, _ = order_of(seed=1).rows(np.arange(n))
    for a, b in ((epochs[0], epochs[1]), (epochs[1], epochs[2]), (epochs[0], other_seed)):
        # Two random orders of 4,000 agree at about one position.
        assert (a == b).sum() < 10


def test_a_window_is_mixed_and_is_a_window() -> None:
    order = order_of()
    per_round = order.global_batch // 8
    batches = np.stack([order.slice(step)[0] for step in range(200 // per_round)])
    first_stream = batches[:, :per_round].ravel()
    # The first 200 of a stream are two shards, shuffled.
    assert len(set(first_stream // 100)) == 2
    assert sorted(first_stream % 100) == sorted([*range(100)] * 2)
    within = first_stream[first_stream // 100 == first_stream[0] // 100] % 100
    assert abs(np.corrcoef(np.arange(len(within)), within)[0, 1]) < 0.3
    assert np.abs(np.diff(within)).mean() > 20  # 33 for random neighbours
    # Windows of one epoch are shuffled differently.
    second_stream = batches[:, per_round : 2 * per_round].ravel()
    assert (first_stream % 100 == second_stream % 100).sum() < 20


def large(num_shards: int, seed: int = 0) -> SampleOrder:
    """Shards of about 1,000 samples, at the settings of ImageNet-21k, which has 14,200 of them."""
    return SampleOrder(np.random.default_rng(0).integers(900, 1101, num_shards), seed, 4096, 16, 4096)


@pytest.mark.slow
@pytest.mark.parametrize(("num_shards", "powers"), [(14_200, range(1, 13)), (1_000_000, (12,))])
def test_4096_ranks_see_the_batches_of_one(num_shards: int, powers: Sequence[int]) -> None:
    """At steps far apart, including one across two epochs; each rank's order is built anew."""
    order = large(num_shards)
    straddling = order.num_samples // 4096
    for step in (0, straddling, 300_000):
        whole, epochs = order.slice(step)
        assert len(np.unique(whole + epochs * order.num_samples)) == 4096
        for world_size in (2**power for power in powers):
            share = 4096 // world_size
            other = fresh(order)
            for rank in {0, world_size // 2, world_size - 1}:
                rows, of_epoch = other.slice(step, rank, world_size)
                np.testing.assert_array_equal(rows, whole[rank * share : (rank + 1) * share])
                np.testing.assert_array_equal(of_epoch, epochs[rank * share : (rank + 1) * share])
                # A window of 4,096 lies in 6 shards of 900 or more. Later epochs do not begin with a batch, so that a
                # share may end in a stream more than it is long.
                if step != straddling:
                    streams = -(-share // order.per_round) + (step > 0)
                    assert len(np.unique(np.searchsorted(order.shard_starts, rows, side="right"))) <= 6 * streams


def test_a_use_by_name_has_random_numbers_of_its_own_which_stay() -> None:
    grayscale = random_numbers.Purpose.named("grayscale")
    assert grayscale == 28890449366717128
    assert grayscale is random_numbers.Purpose.named("grayscale")
    assert grayscale != random_numbers.Purpose.named("solarize")
    assert max(random_numbers.Purpose) < 2**20 < grayscale < 2**56
    assert random_numbers.draws(1, grayscale, 2)(3) == random_numbers.uniform(1, grayscale, 2, 3)


def test_random_bits_are_splitmix64() -> None:
    # First outputs of SplitMix64 for seeds 0 and 1234567 (Vigna's splitmix64.c; Rosetta Code, "Pseudo-random numbers").
    assert int(random_numbers.splitmix(0)) == 0xE220A8397B1DCDAF
    assert int(random_numbers.splitmix(1234567)) == 6457827717110365317
    np.testing.assert_array_equal(
        random_numbers.splitmix(np.array([0, 1234567])), [0xE220A8397B1DCDAF, 6457827717110365317]
    )


def test_golden_order() -> None:
    """As computed on 2026-11-21 by this code: a resumed checkpoint must continue with the same samples."""
    order = SampleOrder(np.array([5, 0, 7, 4, 6]), seed=42, global_batch=8, streams=4, window=3)
    assert random_numbers.permutation(10, 1, 2).tolist() == [1, 3, 7, 9, 2, 8, 6, 4, 5, 0]
    epochs = order.rows(np.arange(44))[0].reshape(2, 22)
    assert epochs[0].tolist() == [0, 1, 7, 5, 13, 12, 16, 18, 2, 3, 6, 9, 11, 14, 17, 19, 4, 10, 8, 15, 20, 21]
    assert epochs[1].tolist() == [18, 17, 6, 21, 10, 11, 12, 4, 16, 20, 5, 7, 0, 1, 3, 15, 19, 8, 9, 2, 13, 14]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [1, 4, 100])
@pytest.mark.parametrize("num_samples", [1, 5, 8, 29])
def test_evaluation_covers_every_row(num_samples: int, batch: int, world_size: int) -> None:
    of_rank = [list(eval_requests(num_samples, batch, rank, world_size)) for rank in range(world_size)]
    assert len({len(requests) for requests in of_rank}) == 1
    # Collectives of ZeRO stage 3 need the same number of batches; equal sizes balance the ranks.
    assert len({tuple(len(rows) for rows, _ in requests) for requests in of_rank}) == 1
    rows = np.concatenate([rows for requests in of_rank for rows, _ in requests])
    assert set(rows.tolist()) == set(range(num_samples))
    assert len(rows) < num_samples + world_size
    assert max(len(rows) for requests in of_rank for rows, _ in requests) <= batch


def test_single_draws_are_the_same_numbers() -> None:
    for parts in [(5, 1), (0, 3, 2, 12_345_678), (2**63 - 1, -1, 2**64 - 1)]:
        draw = random_numbers.draws(*parts)
        assert [draw(i) for i in range(50)] == random_numbers.uniform(*parts, np.arange(50)).tolist()
