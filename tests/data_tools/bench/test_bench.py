"""Benchmarks: what is timed is what ran, in turns; what is missing or fails costs its own line only."""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import contestants
import measure_augmentation
import measure_loading
import measure_multi_crop
import numpy as np
import other_loaders
import pytest
import simplejpeg
import torch
from contestants import Contestant, Timing, race, report
from of_jpegs import read_raw
from PIL import Image

from data_tools.bench.record import BenchRecord
from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig

ROOT = Path(__file__).parents[3]


def test_the_first_third_does_not_count() -> None:
    assert contestants._rate([10] * 6, [5.0, 6.0, 6.5, 7.0, 7.5, 8.0]) == 40 / 2
    assert contestants._rate([10, 10], [5.0, 6.0]) == 10
    assert contestants._rate([10], [5.0]) == 2


def test_rates_leave_the_start_out_and_failures_stay_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]  # Inherited by the processes that are timed.
    monkeypatch.setattr(contestants, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slow() -> Iterator[int]:
        now[0] += 0.3  # Start-up, which is not part of the rate.
        for _ in range(5):
            yield 10
            now[0] += 0.02

    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("two\nlines")

    def killed() -> Iterator[int]:
        yield 1
        os._exit(3)

    named = {"slow": slow, "missing": slow, "broken": broken, "killed": killed}
    named_ones = [
        Contestant(name, ("uint8",), 1, work, "no_such_loader" if name == "missing" else "sys")
        for name, work in named.items()
    ]
    report(named_ones, 2, record := BenchRecord("data"), "loaders", ("output",))
    recorded = {row["name"]: row for row in record.rows}
    timing = recorded["slow"]
    assert timing["rate"] == pytest.approx(500)  # 40 images in 4 x 0.02 s
    assert timing["first"] == pytest.approx(0.3)
    assert timing["per_cpu"] > 100
    assert recorded["missing"]["failed"] == "no_such_loader is not installed"
    assert recorded["broken"]["failed"] == "ValueError: two lines"
    assert recorded["killed"]["failed"] == "its process died with exit code 3"
    told, _, shown = capsys.readouterr().out.partition("\n\n")
    assert [line.split(": ")[1] for line in told.splitlines()] == ["slow", "missing", "broken", "killed", "slow"]
    lines = shown.splitlines()[2:]
    assert len(lines) == 6
    assert "not measured: its process died with exit code 3" in lines[5]


def test_the_views_that_are_measured_are_dinos() -> None:
    config = schema.load(RunConfig, ROOT / "configs/pretrain/dino_vit_s16_imagenet1k.yaml", [])
    measured = measure_multi_crop.ours(224, "bicubic", True)
    for group, expected in zip(measured, objectives.kind("dino").views(config), strict=True):
        size = ImageSize.parse(group.size)
        assert (group.count, size, group.augment) == (expected.count, ImageSize.parse(expected.size), expected.augment)


@pytest.mark.slow
def test_processor_time_counts_worker_processes() -> None:
    def busy(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def work() -> Iterator[int]:
        child = os.fork()
        if not child:
            busy(0.1)
            os._exit(0)
        os.waitpid(child, 0)
        yield 30

    timing = race([Contestant("forks", (), 1, work, prepare=partial(busy, 0.5))], 1)["forks"]
    assert isinstance(timing, Timing)
    # 30 images in 0.1 s; in 0.6 s, if what comes before the clock starts were counted.
    assert 60 < timing.per_cpu <= 300


def test_views_of_other_loaders() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    data = simplejpeg.encode_jpeg(pixels)
    for view in (other_loaders.linear, other_loaders.antialias):
        found = view(data, 24)
        assert found.shape == (24, 24, 3)
        assert found.dtype == np.uint8
    found = other_loaders.pillow_float(data, 24)
    assert found.shape == (3, 24, 24)
    assert abs(float(found.mean())) < 1


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of three wide JPEGs."""
    source = tmp_path / "photos"
    source.mkdir()
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 300, 3), np.uint8)
        Image.fromarray(pixels).save(source / f"{i}.jpg")
    return source


def test_only_as_many_images_are_read_as_are_measured(source: Path) -> None:
    (source / "9.jpg").symlink_to(source / "missing.jpg")
    files = read_raw(source, 3)
    assert files == [path.read_bytes() for path in sorted(source.glob("[0-2].jpg"))]


@pytest.mark.parametrize("is_tar", [True, False])
def test_what_is_no_tar_or_cut_short_is_one_line(source: Path, tmp_path: Path, is_tar: bool) -> None:
    with tarfile.open(file := tmp_path / "photos.tar.gz", "w:gz") as tar:
        tar.add(source)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if is_tar else b"text")
    with pytest.raises(UserError, match="is neither a folder nor an intact tar"):
        read_raw(file, 9)


def test_cost_of_augmentation(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    given = argparse.Namespace(source=str(source), images=8, batch=4, image_size=32, rounds=1)
    measure_augmentation.run(given, record := BenchRecord("augment"), tmp_path)
    assert len(record.rows) == len(measure_augmentation.SETTINGS) + 6
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(measure_augmentation.SETTINGS) + 6
    # What others are compared with: decoding, and of mixing, which comes after two rows of several views.
    assert all(lines[row].endswith(" 1.00 x") for row in (0, len(measure_augmentation.SETTINGS) + 2))
    assert [line.split("  ")[0] for line in lines[len(measure_augmentation.SETTINGS) :][:2]] == [
        "2 views",
        "2 large views, 8 small ones",
    ]
    with pytest.raises(UserError, match="batch = 3 must be even"):
        measure_augmentation.run(argparse.Namespace(batch=3), record, tmp_path)
    with pytest.raises(UserError, match="images = 7 must be at least two batches of 4"):
        measure_loading.run(argparse.Namespace(images=7, batch=4), record, tmp_path)


@pytest.mark.slow
def test_sharding_is_measured(source: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, ROOT / "tests" / "measure" / "measure_sharding.py", str(source), "--images", "8"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--json", f"{tmp_path}/found.json"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        cwd="/",
        env={**os.environ, "TMPDIR": str(scratch)},
        preexec_fn=lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]),  # One core: half the lines.
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ours") or line.startswith("| ShardWriter")]
    assert len(rows) == 8
    assert "not measured" not in "".join(rows)
    assert not list(scratch.iterdir())
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"].startswith(f"python {ROOT}/tests/measure/measure_sharding.py {source}")
    assert found["machine"]["cores"] == 1
    with pytest.raises(UserError, match=r"^source = .*/none: no such file or folder\."):
        read_raw(tmp_path / "none", 8)
