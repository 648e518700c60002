"""Arrays that one process of a host makes and all map: whatever is killed, none is half made, and none stays."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from polling import until

from pipeline.base.errors import OneRankError
from pipeline.data.storage import host_arrays
from pipeline.data.storage.host_arrays import HostArrays, new_array

# A rank of a balanced run, which says the inodes that it maps and waits for its standard input to end.
RANK = """
import re, sys, numpy as np
from pipeline.data.loading.balance import ClassBalance
from pipeline.data.loading.order import SampleOrder
labels = np.arange(20_000) ** 2 % 77
order = SampleOrder(np.full(20, 1000), 0, 64, 4, 100, ClassBalance(labels, np.arange(21) * 1000, 0.5, 0))
rows, used = order.slice(700)
maps = [line.split() for line in open("/proc/self/maps") if "/arrays/" in line]
print(*sorted({fields[4] for fields in maps}), rows.sum(), used.sum(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / f"vit-pipeline-{os.getuid()}" / "arrays"


def made_of(name: str, length: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        new_array(folder, name, np.int32, length)[:] = np.arange(length)

    return make


def folders(home: Path) -> int:
    return sum(path.is_dir() for path in home.iterdir())


def start_rank(program: str = RANK) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True)


def test_ranks_of_a_host_map_the_same_files_which_end_with_the_last_of_them(home: Path) -> None:
    ranks = [start_rank() for _ in range(2)]
    said = [rank.stdout.readline().split() for rank in ranks]
    assert said[0] == said[1]
    assert len(said[0]) == 7 + 2, "the inodes of two arrays of the run and five of the epoch"
    ranks[0].send_signal(signal.SIGKILL)
    ranks[0].wait()
    later = start_rank()
    assert later.stdout.readline().split() == said[1]
    for rank in (ranks[1], later):
        assert folders(home) == 2
        rank.stdin.close()
        rank.wait()
    assert folders(home) == 0
    for rank in (*ranks, later):
        rank.stdout.close()
    ranks[0].stdin.close()


def test_what_a_killed_process_left_is_not_read_and_not_kept(home: Path) -> None:
    program = """
import sys, time
from pipeline.data.storage.host_arrays import HostArrays, new_array
def make(folder):
    new_array(folder, "a", "int32", 5)[:] = 9
    if sys.argv[-1] == "making":
        print(flush=True)
        time.sleep(600)
arrays = HostArrays("x", "key", make)
print(flush=True)
time.sleep(600)
"""
    for moment in ("making", "using"):
        process = subprocess.Popen([sys.executable, "-c", program, moment], stdout=-1)
        process.stdout.readline()
        assert folders(home) == 1
        if moment == "making":
            # Another one waits until the first is killed, and then makes them itself.
            second = subprocess.Popen([sys.executable, "-c", program, "using"], stdout=-1)
            until(partial(is_waiting, second.pid))
            assert HostArrays("x", "other", made_of("a", 2))["a"].tolist() == [0, 1], "which does not wait"
            process.kill()
            second.stdout.readline()
            second.kill()
            second.wait()
            second.stdout.close()
        process.kill()
        process.wait()
        process.stdout.close()
        arrays = HostArrays("x", "key", made_of("a", 3))
        assert arrays["a"].tolist() == [0, 1, 2]
        assert folders(home) == 1
        del arrays
        assert folders(home) == 0


def is_waiting(process: int) -> bool:
    """Whether it waits for a lock that another process has."""
    return any(line.split()[1] == "->" and line.split()[5] == str(process) for line in open("/proc/locks"))


def test_arrays_are_of_their_key_and_stay_while_they_are_read(home: Path) -> None:
    first = HostArrays("x", "one", made_of("a", 3))
    assert HostArrays("x", "one", made_of("a", 5))["a"].tolist() == [0, 1, 2], "of the first, which are not made again"
    assert HostArrays("x", "two", made_of("a", 5))["a"].tolist() == [0, 1, 2, 3, 4]
    array = first["a"]
    del first
    gc.collect()
    assert folders(home) == 0
    assert array.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_without_room_it_is_one_line_and_nothing_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OneRankError, match=r"^TMPDIR = .* the order "):
        HostArrays(
            "the order", "key", lambda folder: made_of("a", 5)(folder) or new_array(folder, "b", np.int64, 2**58)
        )
    assert folders(home) == 0
    monkeypatch.setattr(host_arrays.tempfile, "gettempdir", lambda: str(home / "lock"))
    with pytest.raises(OneRankError, match="TMPDIR"):
        HostArrays("the order", "key", made_of("a", 5))
