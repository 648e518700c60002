"""Loss spikes, stragglers and hangs, and the lines that report them."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.monitor.health import SlowRanks, SpikeScore, diagnosis, stragglers

ROOT = Path(__file__).resolve().parents[2]
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
    assert slow.changed([1.0, 1.8, 2.2, 1.0]) == [
        "rank 2 on b is slow: its data and forward passes take 2.2 times the median rank's"
    ]
    assert slow.changed([1.0, 1.1, 1.0, 1.0]) == [], "so may this"
    assert slow.changed([1.0, 1.1, 2.3, 1.0]) == []
    assert slow.changed([1.0, 1.1, 1.0, 1.0]) == []
    assert slow.changed([1.0, 1.1, 1.0, 1.0]) == ["rank 2 on b is no longer slow"]
    assert SlowRanks(["a", "b"], ratio=0).changed([1.0, 9.0]) == []


def test_stragglers_of_two_and_of_nothing() -> None:
    assert stragglers([1.0, 2.0], 1.5) == {1: 2.0}
    assert stragglers([0.0, 0.0], 1.5) == {}


def test_who_is_waited_for() -> None:
    folder = Path("hang")
    waits, reads = "step of step 7 for 60 s, a, process 1", "data of step 7 for 60 s, b, process 2"
    of_reader = diagnosis({0: waits, 1: reads}, ["a", "b"], folder)
    assert of_reader[0] == f"hang: rank 1 on b has been in {reads}; stack in {folder / 'rank-00001.txt'}"
    assert "in a step: 1 rank;" in of_reader[1]
    assert "rank 1 on b does not respond" in diagnosis({0: waits}, ["a", "b"], folder)[0]
    assert len(diagnosis({0: waits, 1: waits}, ["a", "b"], folder)) == 2


RANK = """
    import sys, time
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from pipeline.monitor.health import Watchdog
    rank = int(sys.argv[3])
    watchdog = Watchdog(Path(sys.argv[2]), rank, ["a", "b", "c"], minutes=1.5 / 60)
    def read_from_a_dead_disk():
        time.sleep(30)
    watchdog.at(12, "step")
    print("started", flush=True)
    if rank == 1:
        watchdog.at(13, "data")
        read_from_a_dead_disk()
    for _ in range(15):
        time.sleep(0.1)
        watchdog.at(13, "step")
    time.sleep(30)
"""


@pytest.fixture
def ranks(tmp_path: Path) -> list[subprocess.Popen[str]]:
    """Three ranks: rank 1 hangs while it reads data, the others in a step."""
    program = textwrap.dedent(RANK)
    arguments = [sys.executable, "-c", program, str(ROOT), str(tmp_path / "hang")]
    started = [
        subprocess.Popen([*arguments, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
    return started


@pytest.mark.slow
def test_a_hang_names_rank_host_and_line(tmp_path: Path, ranks: list[subprocess.Popen[str]]) -> None:
    begin = time.monotonic()
    errors = [process.communicate(timeout=30)[1] for process in ranks]
    assert time.monotonic() - begin < 20, "within the configured time, not at the end of the sleep"
    assert [process.returncode for process in ranks] == [1, 1, 1]
    told = "".join(errors)
    assert "rank 1 on b has been in data of step 13" in told
    assert "rank 0 on a has been in" not in told
    assert "read_from_a_dead_disk" in (tmp_path / "hang" / "rank-00001.txt").read_text()


@pytest.mark.slow
def test_a_rank_that_stands_still_entirely_is_named(tmp_path: Path, ranks: list[subprocess.Popen[str]]) -> None:
    os.kill(ranks[0].pid, signal.SIGSTOP)
    try:
        errors = [process.communicate(timeout=30)[1] for process in ranks[1:]]
    finally:
        ranks[0].kill()
        ranks[0].communicate()
    assert "rank 0 on a does not respond" in "".join(errors)
