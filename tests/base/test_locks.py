"""Locks between processes: exclusive, released by the death of their owner, and void when their file was removed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import ROOT

from pipeline.base.locks import FileLock, locked

HOLD = """
import sys, time
from pathlib import Path
from pipeline.base.locks import FileLock
lock = FileLock(Path(sys.argv[1]), by_record=sys.argv[2] == "True")
assert lock.acquire()
lock.write_owner("the first")
print("locked", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("by_record", [False, True])
def test_the_lock_ends_with_its_process(by_record: bool, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path), str(by_record)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout.readline() == b"locked\n"
            lock = FileLock(path, create=False, by_record=by_record)
            assert not lock.acquire(wait=False)
            assert lock.read_owner() == "the first"
        finally:
            owner.send_signal(signal.SIGKILL)
    assert lock.acquire()
    lock.write_owner("second")
    assert lock.read_owner() == path.read_text() == "second"
    lock.close()


def test_a_removed_file_locks_nothing(tmp_path: Path) -> None:
    with locked(tmp_path / "lock") as lock:
        assert lock.is_current()
        (tmp_path / "lock").unlink()
        assert not lock.is_current()
        with locked(tmp_path / "lock") as other:
            assert other.is_current()
            assert not lock.is_current()
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "missing", create=False)


def test_a_lock_ends_with_its_block_also_when_a_process_was_forked_in_it(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        child = os.fork()
        if not child:
            time.sleep(600)
            os._exit(0)
    other = FileLock(tmp_path / "lock")
    try:
        assert other.acquire(wait=False)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        other.close()
