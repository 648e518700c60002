"""Loss spikes and stragglers, and the lines that report them."""

import math

import numpy as np

from pipeline.monitor.health import Reports, SlowRanks, SpikeScore

NOISE = np.random.default_rng(0).normal(0, 0.1, 400)


def test_a_spike_stands_out_and_noise_does_not() -> None:
    scores = SpikeScore(window=64)
    falling = [5 - 0.005 * i + noise for i, noise in enumerate(NOISE)]
    assert max(scores.add(loss) for loss in falling) < 6
    assert scores.add(falling[-1] + 3) > 6
    assert scores.add(falling[-1]) < 1


def test_the_first_losses_are_never_a_spike() -> None:
    scores = SpikeScore(window=64)
    assert [scores.add(loss) for loss in [1.0] * 31 + [100.0]] == [0.0] * 32
    assert len(scores.recent) == 32


def test_a_loss_that_is_no_number_is_one_and_is_not_remembered() -> None:
    scores = SpikeScore(window=8, recent=[1.0] * 8)
    assert scores.add(math.nan) == math.inf
    assert scores.add(math.inf) == math.inf
    assert list(scores.recent) == [1.0] * 8


def test_a_loss_that_stands_still_may_wobble() -> None:
    assert SpikeScore(window=8, recent=[1.0] * 8).add(1.05) < 6
    assert SpikeScore(window=8, recent=[1.0] * 8).add(1.07) > 6


def test_a_lasting_change_of_level_stops_being_a_spike() -> None:
    scores = SpikeScore(window=16, recent=NOISE[:16] + 1)
    judged = [scores.add(loss) > 6 for loss in NOISE[:16] + 3]
    assert judged[0]
    assert not any(judged[2:])


def test_what_is_remembered_continues_the_scores() -> None:
    unbroken, losses = SpikeScore(window=16), NOISE[:60] + 2
    expected = [unbroken.add(loss) for loss in losses]
    first = SpikeScore(window=16)
    assert [first.add(loss) for loss in losses[:40]] == expected[:40]
    second = SpikeScore(window=16, recent=list(first.recent))
    assert [second.add(loss) for loss in losses[40:]] == expected[40:]


def test_a_rank_that_stays_slow_is_named_once_with_its_host() -> None:
    slow = SlowRanks(["a", "a", "b", "b"], ratio=1.5)
    assert slow.changed([1.0, 1.1, 1.0, 1.4]) == []
    assert slow.changed([1.0, 1.1, 2.0, 1.0]) == [], "once may be chance"
    (line,) = slow.changed([1.0, 1.8, 2.2, 1.0])
    assert line.startswith("slow: rank 2 on b")
    assert "2.2 times" in line
    assert slow.changed([1.0, 1.1, 1.0, 1.0]) == [], "so may this"
    assert slow.changed([1.0, 1.1, 2.3, 1.0]) == []
    assert slow.changed([1.0, 1.1, 1.0, 1.0]) == []
    assert slow.changed([1.0, 1.1, 1.0, 1.0]) == ["no longer slow: rank 2 on b"]
    assert SlowRanks(["a", "b"], ratio=0).changed([1.0, 9.0]) == []


def test_a_collapse_is_said_when_it_begins_and_when_it_is_over() -> None:
    collapses = Reports("collapse")
    assert collapses.changed("loss", 10, "") == []
    assert collapses.changed("loss", 20, "entropy 0.") == ["step 20: collapse: entropy 0."]
    assert collapses.changed("loss", 30, "entropy 0.1.") == [], "it goes on"
    assert collapses.changed("probe", 30, "RankMe 1.") == ["step 30: collapse: RankMe 1."], (
        "another source shows it too"
    )
    assert collapses.changed("loss", 40, "") == ["step 40: the loss shows no collapse any longer"]
    assert collapses.changed("loss", 50, "") == []
    assert collapses.first == "step 20: collapse: entropy 0."
