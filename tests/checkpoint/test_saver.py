"""The process that writes checkpoints beside training: what it is given is written, whatever becomes of the rank."""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from ranks import ROOT
from saving import STATES, job, names, newest_complete, tensors

from pipeline.base.errors import CrashError, UserError
from pipeline.checkpoint import writer
from pipeline.checkpoint.saver import Saver
from pipeline.checkpoint.sharded_tensors import RankPart, ShardedTensors
from pipeline.checkpoint.store import Checkpoints
from pipeline.process.distributed import Ranks

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


@pytest.fixture
def saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CHECKPOINT_TEST", str(tmp_path))
    saver = Saver(str(tmp_path), ALONE, 5)
    yield saver
    saver.close()


def writers(tmp_path: Path) -> list[psutil.Process]:
    """The writer's process, found by its environment: it is nobody's child."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("CHECKPOINT_TEST") == str(tmp_path) and process.pid != os.getpid():
                found.append(process)
    return found


def real_part(step: int) -> tuple[RankPart, writer.Commit]:
    work, memory = job(Path("/"), step)
    os.close(memory)
    arrays = tensors(step)
    flat = {s: [torch.tensor(arrays[s][n]).reshape(-1)[b : b + k] for n, b, k in work.ranges] for s in STATES}
    assert work.commit is not None
    return RankPart(work.ranges, flat), work.commit


def test_memory_that_cannot_be_locked_is_said(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_memory = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: out_of_memory)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    saver.ranks = replace(ALONE, device=torch.device("cuda"))
    with pytest.raises(CrashError, match=r"0\.0 GiB .*CUDA error 2.*ulimit -l"):
        saver._map(10)


def test_locked_memory_is_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its size changes and at the end: the next run of a process may map its own memory at the same address."""
    locked: set[int] = set()
    cuda = SimpleNamespace(
        cudaHostRegister=lambda at, size, flags: locked.add(at) or 0, cudaHostUnregister=locked.remove
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    saver = Saver(str(tmp_path), replace(ALONE, device=torch.device("cuda")), 5)
    for count in (10, 5000):
        saver._map(count)
        assert locked == {saver._host.data_ptr()}
    saver.close()
    assert not locked


def test_reserved_memory_is_there_before_the_first_save(saver: Saver, tmp_path: Path) -> None:
    piece, commit = real_part(1)
    saver.reserve(piece)
    saver._reserving.result()
    there = saver._host.data_ptr()
    assert os.fstat(saver._memory).st_blocks * 512 >= 4 * piece.num_elements
    saver.save(1, piece, commit)
    saver.wait()
    assert saver._host.data_ptr() == there
    assert newest_complete(tmp_path) == "step-00000001"


def test_memory_that_cannot_be_reserved_is_said_at_the_save(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(count: int) -> None:
        raise CrashError(f"no memory for {count} numbers")

    monkeypatch.setattr(saver, "_map", full)
    piece, commit = real_part(1)
    saver.reserve(piece)
    with pytest.raises(CrashError, match=f"{piece.num_elements}"):
        saver.save(1, piece, commit)


def test_saving_goes_on_beside_training(saver: Saver, tmp_path: Path) -> None:
    """Weights that change after save() returned are not what is saved; each save waits for the one before."""
    begin = time.perf_counter()
    for step in (1, 2, 3):
        piece, commit = real_part(step)
        saver.save(step, piece, commit)
        for tensors_of_state in piece.tensors.values():
            for tensor in tensors_of_state:
                tensor.fill_(-1)
        saver.mark_best(step, "val_top1", 1 / step)
    saver.wait()
    saver.check([saver.numbers()])
    found = ShardedTensors.open(tmp_path / "step-00000003").full_tensors("weights")
    assert all(np.array_equal(found[name], array) for name, array in tensors(3)["weights"].items())
    assert names(tmp_path) == ["kept.json", "latest", "step-00000001", "step-00000002", "step-00000003"]
    reading = saver.metrics([saver.numbers()])
    assert 0 < reading["checkpoint_blocked_seconds"] < time.perf_counter() - begin
    assert reading["checkpoint_write_seconds"] > 0
    assert saver.metrics([saver.numbers()]) == {"checkpoint_blocked_seconds": 0, "checkpoint_write_seconds": 0}


def test_the_error_of_the_writer_reaches_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a folder should be")
    saver = Saver(str(tmp_path / "file" / "checkpoints"), ALONE, 5)
    saver.save(1, *real_part(1))
    with pytest.raises(UserError, match=r"the checkpoint of step 1 .*file/checkpoints: .*starts the run again"):
        saver.wait()
    saver.close()


def kill_writers(tmp_path: Path) -> None:
    for process in writers(tmp_path):
        process.kill()
        process.wait(300)


@pytest.mark.slow
def test_a_writer_that_was_killed_is_replaced_and_its_work_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between saves; in the middle of one; and after its commit, before it could say so."""
    monkeypatch.setenv("CHECKPOINT_TEST", str(tmp_path))
    said: list[str] = []
    saver = Saver(str(tmp_path), ALONE, 5, 4, said.append)
    kill_writers(tmp_path)
    saver.check([saver.numbers()])
    assert len(said) == 1
    saver.save(10, *real_part(10))
    saver.wait()
    for step in (20, 30):
        (process,) = writers(tmp_path)
        process.suspend()
        saver.save(step, *real_part(step))
        saver.mark_best(step, "val_top1", step / 100)
        if step == 30:  # As far as a writer comes that is killed before its last words.
            given = saver._in_flight[0].job
            assert given is not None
            writer.save(given, saver._memory)
            (tmp_path / "latest").write_text("step-00000020")
        kill_writers(tmp_path)
        saver.check_writer()
        saver.wait()
        assert newest_complete(tmp_path) == f"step-{step:08d}"
        assert (tmp_path / "latest").read_text() == f"step-{step:08d}"
        assert Checkpoints(tmp_path).kept().best == f"step-{step:08d}"
        found = ShardedTensors.open(tmp_path / f"step-{step:08d}").full_tensors("exp_avg")
        assert all(np.array_equal(found[name], array) for name, array in tensors(step)["exp_avg"].items())
    assert len(said) == 3
    assert Checkpoints(tmp_path).unfinished() == []
    assert saver.committed_step == 30
    saver.close()


def test_another_rank_counts_a_checkpoint_as_committed_once_rank_0_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own writer replies when its part is written, which is no checkpoint yet."""
    committed_by_main = 4
    monkeypatch.setattr(Ranks, "gather", lambda ranks, mine: [(None, [], committed_by_main), mine])
    monkeypatch.setattr(Ranks, "agree", lambda ranks, value: value)
    saver = Saver(str(tmp_path), Ranks(1, 0, 2, torch.device("cpu")), 5, 4)
    piece, _ = real_part(5)
    saver.save(5, piece, None)
    saver.wait()
    assert saver.committed_step == 4
    saver.check([[0.0, 0.0, 5, False], saver.numbers()])
    assert saver.committed_step == 5
    saver.close()


def test_the_writer_finds_packages_where_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH may be all that names numpy, and relative; the writer works in another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'absolute'}:relative:")
    monkeypatch.setenv("CHECKPOINT_TEST", str(tmp_path))
    saver = Saver(str(tmp_path), ALONE, 5)
    (process,) = writers(tmp_path)
    assert process.environ()["PYTHONPATH"] == f"{ROOT}:{tmp_path / 'absolute'}:{tmp_path / 'relative'}"
    saver.close()


@pytest.mark.slow
def test_a_writer_that_is_killed_twice_at_a_save_is_a_crash_and_no_mistake(saver: Saver, tmp_path: Path) -> None:
    for process in writers(tmp_path):
        process.suspend()
    saver.save(1, *real_part(1))
    kill_writers(tmp_path)
    send = saver._send

    def send_to_a_victim(given: Any) -> None:
        kill_writers(tmp_path)
        send(given)

    saver._send = send_to_a_victim  # type: ignore[method-assign]
    with pytest.raises(
        CrashError, match=r"the checkpoint writer of rank 0 died .* at the same save\. .*starts the run again"
    ):
        saver.wait()


def test_what_the_writer_did_not_expect_is_a_crash(saver: Saver) -> None:
    piece, commit = real_part(1)
    saver.save(1, piece, replace(commit, shapes={"of": [-1]}))
    with pytest.raises(CrashError, match="the checkpoint writer failed: "):
        saver.wait()


@pytest.mark.slow
def test_a_writer_survives_its_rank_and_every_signal_but_one(tmp_path: Path) -> None:
    """SIGKILL right after the hand-over; the writer's own family, and its session, are signalled too."""
    script = """
import os, signal, sys
from pathlib import Path
import psutil
sys.path.insert(0, sys.argv[2])
from test_saver import ALONE, real_part
from pipeline.checkpoint.saver import Saver
saver = Saver(sys.argv[1], ALONE, 5)
saver.save(1, *real_part(1))
for child in psutil.Process().children(recursive=True):
    child.kill()
os.killpg(0, signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path, Path(__file__).parent],
        cwd=ROOT,
        timeout=300,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/helpers'}", "CHECKPOINT_TEST": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -9, done.stderr
    for process in writers(tmp_path):
        for number in (1, 2, 10, 15):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        process.wait(300)
    assert newest_complete(tmp_path) == "step-00000001"
    assert names(tmp_path) == ["latest", "step-00000001"]
