"""The tar of a shard is, to the byte, what Python's tarfile writes, and lacks no image that could be read."""

import hashlib
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from raw_images import jpeg, write_folder

from data_tools.sharding import write_shard as write_shard_module
from data_tools.sharding.write_shard import Done, ShardingJob, _Tar, read_rows, write_shard
from data_tools.sources import list_source
from data_tools.sources.split_files import PARTS
from pipeline.cluster.ray_tasks import LostError
from pipeline.data.storage.checksums import digest_of
from pipeline.settings.commands.data import ShardConfig

NAMES = ["a", "n01440764/n01440764_10026", "x" * 95, "x" * 96, "x" * 97, "y" * 3000, "ü/é", "\udcff"]


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 4095, 4096, 10_240, 70_001])
def test_tars_are_those_of_tarfile(size: int, tmp_path: Path) -> None:
    theirs = io.BytesIO()
    begins = []
    with (
        open(tmp_path / "a.tar", "wb") as file,
        tarfile.open(fileobj=theirs, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        ours = _Tar(file)
        for name in NAMES:
            data = name.encode("utf-8", "surrogateescape")[:1] * size
            label = str(size).encode()
            begins.append(ours.add(f"{name}.jpg", data))
            ours.add(f"{name}.cls", label)
            for ext, content in (("jpg", data), ("cls", label)):
                info = tarfile.TarInfo(f"{name}.{ext}")
                info.size, info.mode = len(content), 0o644
                tar.addfile(info, io.BytesIO(content))
        ours.finish()
    written = (tmp_path / "a.tar").read_bytes()
    assert written == theirs.getvalue()
    for name, begin in zip(NAMES, begins, strict=True):
        assert written[begin : begin + size] == name.encode("utf-8", "surrogateescape")[:1] * size
    assert (ours.size, ours.sha256.digest()) == (len(written), hashlib.sha256(written).digest())


@pytest.fixture
def job(tmp_path: Path) -> ShardingJob:
    """A shard of three images, and the folder for it."""
    source = write_folder({f"cat/{i}.jpg": jpeg(i) for i in range(3)}, tmp_path / "raw")
    (tmp_path / "out" / PARTS).mkdir(parents=True)
    config = ShardConfig(source=str(source), out="unused")
    images = list_source(source, config, tmp_path).images(np.arange(3))
    return ShardingJob(str(source), str(tmp_path / "out"), "train-000000.tar", "train", images, config, None)


def test_images_that_were_skipped_are_tried_again(job: ShardingJob, tmp_path: Path) -> None:
    """A folder that was away, and an image that was repaired in place."""
    folder, away, broken = tmp_path / "raw/cat", tmp_path / "away", tmp_path / "raw/cat/1.jpg"
    whole = write_shard(job)
    expected = (tmp_path / "out" / job.name).read_bytes()
    for path in (tmp_path / "out" / job.name, tmp_path / "out" / PARTS / "train-000000.part"):
        path.unlink()

    broken.write_bytes(bytes(broken.stat().st_size))
    folder.rename(away)
    gone = write_shard(job)
    assert [(key, "No such file" in reason) for key, _, reason in gone.skipped] == [
        (f"cat/{i}", True) for i in range(3)
    ]
    again = write_shard(job)
    assert (again.made, again.skipped) == (False, gone.skipped)
    away.rename(folder)
    back = write_shard(job)
    assert (back.made, [key for key, *_ in back.skipped]) == (True, ["cat/1"])
    assert not write_shard(job).made
    broken.write_bytes(jpeg(1))
    assert replace(write_shard(job), state=whole.state) == whole
    assert (tmp_path / "out" / job.name).read_bytes() == expected
    assert not write_shard(job).made


def test_a_shard_is_hashed_again_only_if_it_was_written_since(job: ShardingJob, tmp_path: Path) -> None:
    made, path = write_shard(job), tmp_path / "out" / job.name

    def finds(num_hashed: int) -> Done:
        with patch.object(write_shard_module, "digest_of", wraps=digest_of) as hashing:
            done = write_shard(job)
        assert hashing.call_count == num_hashed
        return done

    assert not finds(0).made
    content, stat = path.read_bytes(), path.stat()
    path.write_bytes(content)
    assert not finds(1).made  # As after a copy of the folder.
    path.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert finds(1).made
    assert path.read_bytes() == content
    assert made.shard == write_shard(job).shard
    with patch.object(write_shard_module, "state_of", return_value=""):
        path.unlink()
        write_shard(job)
        finds(1)


def test_a_machine_that_fails_to_read_is_no_fault_of_the_image(job: ShardingJob, tmp_path: Path) -> None:
    # Whose first byte no process has mapped: EIO.
    job.images[1].files[0] = ("/proc/self/mem", *job.images[1].files[0][1:])
    with pytest.raises(LostError, match=r"^/proc/self/mem cannot be read: Input/output error\.$"):
        write_shard(job)
    assert [path.name for path in (tmp_path / "out").rglob("*")] == [PARTS]


def test_a_damaged_part_is_made_again(job: ShardingJob, tmp_path: Path) -> None:
    """Whatever bit of it is flipped: a label or a checksum that changed would enter the manifest unseen."""
    whole = write_shard(job)
    part = tmp_path / "out" / PARTS / "train-000000.part"
    data = part.read_bytes()
    rows = read_rows(part)
    places = np.random.default_rng(0).choice(len(data) * 8, 120, replace=False)
    assert not write_shard(job).made
    num_made = 0
    for place in places.tolist():
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        part.write_bytes(flipped)
        done = write_shard(job)
        assert done == replace(whole, made=done.made, state=done.state)
        assert read_rows(part) == rows  # As the manifest takes them.
        num_made += done.made
    assert num_made == 120
