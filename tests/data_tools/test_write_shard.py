"""The tar of a shard is, to the byte, what Python's tarfile writes."""

import hashlib
import io
import tarfile

import pytest

from data_tools.write_shard import _Tar

NAMES = ["a.jpg", "n01440764/n01440764_10026.jpg", "x" * 99, "x" * 100, "x" * 101, "y" * 3000, "ü/é.jpg", "\udcff.jpg"]


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 10_240, 70_001])
def test_tars_are_those_of_tarfile(size: int) -> None:
    ours, theirs = io.BytesIO(), io.BytesIO()
    tar = _Tar(ours)
    with tarfile.open(fileobj=theirs, mode="w", format=tarfile.GNU_FORMAT) as reference:
        for name in NAMES:
            data = name.encode("utf-8", "surrogateescape")[:1] * size
            begin = tar.add(name, data)
            info = tarfile.TarInfo(name)
            info.size, info.mode = size, 0o644
            reference.addfile(info, io.BytesIO(data))
            assert ours.getvalue()[begin : begin + size] == data
    tar.finish()
    assert ours.getvalue() == theirs.getvalue()
    assert (tar.size, tar.sha256.digest()) == (len(ours.getvalue()), hashlib.sha256(ours.getvalue()).digest())
