"""Measurements of loading and sharding: what is timed is what ran; what is missing or fails costs its own line only."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import measure_augmentation
import numpy as np
import pytest
import simplejpeg
from measure_loading import Contestant, race, read_raw

MEASURE = Path(__file__).parents[2] / "measure"


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def forking() -> Iterator[int]:
    """Its child works for 0.1 s."""
    child = os.fork()
    if not child:
        busy(0.1)
        os._exit(0)
    os.waitpid(child, 0)
    yield 30


@pytest.mark.slow
def test_rates_leave_the_start_out_and_failures_stay_apart() -> None:
    def slow() -> Iterator[int]:
        time.sleep(1)  # Start-up, which is not part of the rate.
        for _ in range(5):
            yield 10
            time.sleep(0.02)

    def killed() -> Iterator[int]:
        yield 1
        os._exit(3)

    found = race(
        [
            Contestant("slow", slow, 1),
            Contestant("missing", slow, 1, "no_such_loader"),
            Contestant("killed", killed, 1),
            Contestant("forks", forking, 1, prepare=partial(busy, 0.5)),
        ],
        2,
    )
    rate, _ = found["slow"]
    assert isinstance(rate, float)
    assert 40 / 0.5 < rate <= 500, "40 images in 4 x 0.02 s"
    # 30 images in 0.1 s; in 0.6 s, if what comes before the clock starts were counted.
    assert 60 < float(found["forks"][1]) <= 300
    assert "no_such_loader" in str(found["missing"])
    assert "exit code 3" in str(found["killed"])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of three wide JPEGs."""
    source = tmp_path / "photos"
    source.mkdir()
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 300, 3), np.uint8)
        (source / f"{i}.jpg").write_bytes(simplejpeg.encode_jpeg(pixels))
    return source


@pytest.mark.slow
def test_sharding_and_augmentation_are_measured(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, MEASURE / "measure_loading.py", "sharding", source, "--images", "8", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith(("| ours", "| ShardWriter"))]
    assert rows
    assert all(len(row) == 3 for row in rows), rows
    measure_augmentation.measure(read_raw(source, 8), 32, 1)
    assert len(capsys.readouterr().out.splitlines()) == len(measure_augmentation.SETTINGS) + 2
