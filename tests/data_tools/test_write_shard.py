"""The tar of a shard is, to the byte, what Python's tarfile writes."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from data_tools.write_shard import _Tar

NAMES = ["a", "n01440764/n01440764_10026", "x" * 95, "x" * 96, "x" * 97, "y" * 3000, "ü/é", "\udcff"]


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
            label = str(size).encode()
            begins.append(ours.add(f"{name}.jpg", data, f"{name}.cls", label))
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
