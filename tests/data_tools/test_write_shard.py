"""The tar of a shard is, to the byte, what Python's tarfile writes."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from data_tools.write_shard import _Tar

NAMES = ["a.jpg", "n01440764/n01440764_10026.jpg", "x" * 99, "x" * 100, "x" * 101, "y" * 3000, "ü/é.jpg", "\udcff.jpg"]


# 3,000,000: the disk is told to begin on the way.
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 4095, 4096, 10_240, 70_001, 3_000_000])
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
            begins.append(ours.add(name, data))
            info = tarfile.TarInfo(name)
            info.size, info.mode = size, 0o644
            tar.addfile(info, io.BytesIO(data))
        ours.finish()
    written = (tmp_path / "a.tar").read_bytes()
    assert written == theirs.getvalue()
    for name, begin in zip(NAMES, begins, strict=True):
        assert written[begin : begin + size] == name.encode("utf-8", "surrogateescape")[:1] * size
    assert (ours.size, ours.sha256.digest()) == (len(written), hashlib.sha256(written).digest())
