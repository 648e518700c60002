"""How far the reading of a large file is: a bar on a terminal, lines in a file."""

import bz2
import gzip
import lzma
import os
import re
from pathlib import Path

import pytest

from data_tools import progress
from data_tools.sources.layouts import archive

PACK = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", PACK)
def test_lines_tell_how_much_is_unpacked(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = os.urandom(2**21)
    source = tmp_path / "images.tar.x"
    source.write_bytes(PACK[kind](content))
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 600.0)  # However slow the machine is.
    assert archive.unpack(source, kind, tmp_path / "fast").read_bytes() == content
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    plain = archive.unpack(source, kind, tmp_path / "slow")
    assert plain.read_bytes() == content
    lines = capsys.readouterr().err.splitlines()
    shown = [
        re.fullmatch(r"unpacked images\.tar\.x: (\S+) of 2\.1 MB \((\d+)%\), \S+ MB/s, \S+ (s|min|h) left", x)
        for x in lines
    ]
    shares = [int(match[2]) for match in shown if match]
    assert len(shares) == len(lines) > 2
    assert shares == sorted(shares)
    assert shares[0] < 20
    assert shares[-1] == 100
    # What is unpacked already is not read.
    assert archive.unpack(source, kind, tmp_path / "slow") == plain
    assert capsys.readouterr().err == ""
