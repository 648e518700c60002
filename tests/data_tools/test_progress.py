"""How far the reading of a large file is: a bar on a terminal, lines in a file."""

import bz2
import contextlib
import gzip
import lzma
import os
import pty
import re
import sys
import termios
import time
from pathlib import Path

import pytest

from data_tools import progress
from data_tools.sources.layouts import archive


class Late(int):
    """A number that takes its time to be added."""

    def __radd__(self, other: int) -> int:
        time.sleep(0.05)
        return other + int(self)


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


def test_a_terminal_has_a_bar_for_what_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "images.tar.gz"
    source.write_bytes(gzip.compress(os.urandom(2**20)))
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with open(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setattr(progress, "_SECONDS_BEFORE_BAR", 600.0)  # However slow the machine is.
        archive.unpack(source, "gzip", tmp_path / "fast")
        print("between", file=terminal, flush=True)
        patch.setattr(progress, "_SECONDS_BEFORE_BAR", 0.0)
        archive.unpack(source, "gzip", tmp_path / "slow")
    shown = b""
    with contextlib.suppress(OSError):  # The end of a terminal.
        while part := os.read(ours, 2**16):
            shown += part
    os.close(ours)
    before, _, after = shown.decode().partition("between\r\n")
    assert before == ""
    assert "unpacked images.tar.gz: 100%" in after
    assert "1.05M/1.05M" in after
    assert "MB/s" in after.splitlines()[-1]


def test_a_shard_is_counted_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file said that its images were done, and no time or rate of them."""
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_FILES", 0.001)
    with progress.ProgressMeter(1000, 10, tmp_path, "sharded") as job:
        assert job.file is not None
        states, write = [], job.file.write
        monkeypatch.setattr(job.file, "write", lambda state: (states.append(state), write(state)))
        job.add(Late(100), Late(1_000_000))
        job.retried("It was lost.")
    assert states[-1]["images"] == 100
    for state in states:
        assert state["images"] / 100 == state["bytes"] / 1_000_000 == state["shards"]
        assert state["images_per_second"] * state["seconds"] == pytest.approx(state["images"])
