"""One driver at a time for each output folder, and none is held up by a dead one."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT

from data_tools.check import verify
from data_tools.dedup import dedup
from data_tools.sharding import index, shard
from pipeline.base.errors import UserError
from pipeline.base.locks import only_writer
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.storage.bucket import AnyPath, to_path
from pipeline.settings.commands.data import DedupConfig, IndexConfig, ShardConfig, VerifyConfig

HOLD = """
import sys
from pipeline.base.locks import only_writer
from pipeline.data.storage.bucket import to_path
sys.argv[0] = "launch/shard.py"
with only_writer(to_path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(folder: AnyPath) -> subprocess.Popen[str]:
    """A process that has the folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("place", ["disk", "s3://bucket/out"])
def test_the_second_is_refused_by_name_and_a_dead_one_holds_nobody(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = to_path(place) if "://" in place else tmp_path / place
    first = hold(folder)
    try:
        with pytest.raises(UserError, match="Wait until that ends, or stop it") as error, only_writer(folder):
            pass
        name = f"{folder} is being written by shard.py on {socket.gethostname()} (process {first.pid}, since 20"
        assert str(error.value).startswith(name)
        # Another folder is another matter.
        with only_writer(tmp_path / "other"):
            pass
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    left = list(tmp_path.rglob("*lock"))
    assert left, "the file stays, the lock does not"
    with only_writer(folder):
        (tmp_path / "kept").touch()
        assert f"(process {os.getpid()}," in left[0].read_text()
    assert not list(tmp_path.rglob("*lock"))
    assert not (tmp_path / "other").exists()


def test_every_driver_asks(ray_cluster: int, dataset: Dataset, source: Path, tmp_path: Path) -> None:
    data, out = str(dataset.path), tmp_path / "out"
    runs = {
        out: lambda: shard.run(ShardConfig(source=str(source), out=str(out))),
        tmp_path / "verify": lambda: verify.run(VerifyConfig(data=data, out=str(tmp_path / "verify"))),
        tmp_path / "index": lambda: index.run(IndexConfig(source=data, out=str(tmp_path / "index"))),
        dataset.path / "dedup": lambda: dedup.run(DedupConfig(data=data, split="train", against=[f"{data}:val"])),
    }
    for folder, run in runs.items():
        with only_writer(folder), pytest.raises(UserError, match=rf"^{folder} is being written by"):
            run()
        assert not folder.exists(), "an empty folder does not stay"
    # Two checks with folders of their own would write the same list.
    with only_writer(dataset.path / "exclude"), pytest.raises(UserError, match="exclude is being written by"):
        runs[tmp_path / "verify"]()


def test_one_that_ends_while_another_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our opening the file and our locking it, its owner may have removed it: that would lock nothing."""
    out, flock = tmp_path / "out", fcntl.flock

    def too_late(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (out / ".lock").unlink()
        out.rmdir()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with only_writer(out), pytest.raises(UserError, match="is being written by"), only_writer(out):
        pass
    assert not out.exists()
