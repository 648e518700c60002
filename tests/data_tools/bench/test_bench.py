"""Measurements of loading and sharding: what is timed is what ran; what is missing or fails costs its own line only."""

import subprocess
import sys
from pathlib import Path

import measure_augmentation
import numpy as np
import pytest
import simplejpeg
from measure_loading import read_raw

MEASURE = Path(__file__).parents[2] / "measure"


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
