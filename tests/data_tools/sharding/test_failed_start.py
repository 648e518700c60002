"""A job that failed before it made anything does not bind the next one with its output folder."""

import os
from pathlib import Path

import pytest
from raw_images import contents, jpeg, settings, write_folder

from data_tools.sharding import shard
from pipeline.base.errors import UserError

GOOD = {f"cat/{i:02}.jpg": jpeg(i) for i in range(12)}
# Names that are not UTF-8 are skipped when they are listed.
OLD_NAMES = {os.fsdecode(b"dog/%d\xff.jpg" % i): b"?" for i in range(3)}


def test_a_start_that_made_no_shard_does_not_bind_the_next(ray_cluster: int, tmp_path: Path) -> None:
    """The next command was refused with another val_share, and with the images converted, as for a data set that is
    there.
    """
    source, out = write_folder({**GOOD, **OLD_NAMES, "dog/3.jpg": jpeg(20)}, tmp_path / "raw"), tmp_path / "out"
    with pytest.raises(UserError, match="3 of the 3 images read so far are bad, more than 1 of 16"):
        shard.run(settings(source, out))
    for name in OLD_NAMES:
        (source / name).rename(source / f"{name[:5]}.jpg")
    # Another source, whose images are found to be bad when they are sharded: its only shard is empty.
    only_bad = write_folder({"cat/1.jpg": b"x", "cat/2.jpg": b"y", "dog/1.jpg": b"z"}, tmp_path / "bad")
    with pytest.raises(UserError, match="of the 3 images read so far are bad"):
        shard.run(settings(only_bad, out, samples_per_shard=16))
    write_folder({f"dog/{i}.jpg": jpeg(30 + i) for i in range(3)}, source)
    dataset = shard.run(settings(source, out, val_share=0.25))
    assert sum(dataset.info["samples"].values()) == 16
    fresh = shard.run(settings(source, tmp_path / "fresh", val_share=0.25))
    assert contents(out) == contents(fresh.path)
    with pytest.raises(UserError, match=r"was made with val_share = 0\.25, not 0\.5"):
        shard.run(settings(source, out, val_share=0.5))


def test_a_start_that_made_a_shard_binds_the_next(ray_cluster: int, tmp_path: Path) -> None:
    bad = {f"dog/{i}.jpg": b"x" for i in range(3)}
    source, out = write_folder({**GOOD, **bad}, tmp_path / "raw"), tmp_path / "out"
    with pytest.raises(UserError, match="read so far are bad"):
        shard.run(settings(source, out, samples_per_shard=16))
    before = contents(out)
    with pytest.raises(UserError, match=r"was made with val_share = 0\.0, not 0\.25"):
        shard.run(settings(source, out, samples_per_shard=16, val_share=0.25))
    (source / "cat/00.jpg").unlink()
    with pytest.raises(UserError, match=r"1 went \(train/cat/00 "):
        shard.run(settings(source, out, samples_per_shard=16))
    assert contents(out) == before
