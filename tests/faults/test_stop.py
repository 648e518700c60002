"""Stopping at every moment of a run: all ranks leave with the code that means "resume me", and nothing is lost.

One run is stopped over and over, each time in another way and at another moment, and must end as one that nobody
touched.
"""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from faulty_s3 import S3, copy_folder, stall
from forked import Forge, ForkedRun
from polling import until
from ranks import metrics, settings
from tiny import make_dataset

from pipeline import model as models
from pipeline.base.errors import Stopped
from pipeline.cluster import stop
from pipeline.cluster.status_files import RESUME, Status, holder, read_failures, read_status, stop_file
from pipeline.process import distributed

# What could hold up an end does so for ever, or for minutes: data, other ranks. After 30 s, a launcher would end it.
SECONDS = 100
STEPS = 48
# An evaluation is 40 batches on each rank, of which the first few are done before the ranks agree to stop in one.
LONG = (
    f"train.length={STEPS} steps",
    "evaluate.every=16 steps",
    "checkpoint.every=12 steps",
    "evaluate.batch=5",
    "model.dropout=0.1",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny", {"train": 150, "val": 400})


def ends(run: ForkedRun) -> None:
    """All ranks leave with "resume me"; those that do not are killed."""
    codes = run.wait(SECONDS)
    assert codes == [RESUME] * len(codes), run.said()
    assert "Traceback" not in run.said(0) + run.said(1)


def go_on(run: ForkedRun) -> None:
    for rank in range(len(run.pids)):
        run.send(rank, signal.SIGCONT)


def writers(run: ForkedRun) -> list[psutil.Process]:
    """The ranks' writers of checkpoints, found by their environment: they are nobody's children."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in run.pids and process.environ().get("MASTER_PORT") == str(run.port):
                found.append(process)
    return found


def one_line(said: str) -> str:
    """The one line of an error; nothing like a traceback stands beside it."""
    assert not re.search(r"Traceback|frame #|Exception", said), said
    (line,) = [line for line in said.splitlines() if "rror" in line]
    return line


def at_step(run: ForkedRun, step: int) -> None:
    until(lambda: f"step {step}/" in run.said())


def test_a_run_that_is_stopped_again_and_again_ends_as_the_whole_one(
    forge: Forge, data: Path, tmp_path: Path, s3: tuple[S3, str]
) -> None:
    whole = tmp_path / "whole"
    forge.start(2, settings(data, tmp_path, "whole", *LONG)).finish()
    overrides = settings(data, tmp_path, "cut", *LONG)
    folder = tmp_path / "cut"

    def status() -> Status:
        found = read_status(folder)
        assert found
        return found

    def start(place: str, *steps: int, hears: tuple[int, ...] = (), more: tuple[str, ...] = ()) -> ForkedRun:
        """The run, once it has halted: see `forked.train_with_halts`."""
        run = forge.start_work(2, "forked:train_with_halts", [place, steps, hears, [*overrides, *more]])
        until(run.has_halted)
        return run

    # Warm-up: before anything is trained, and by a signal to the rank that does not keep the books.
    run = start("preparation", hears=(0, 1))
    for rank in (0, 1):
        run.send(rank, signal.SIGTERM)
    go_on(run)
    ends(run)
    assert status() == Status("stopped", 0, RESUME, "SIGTERM, before training began")

    # Training, one rank asked; nobody else may have the folder.
    run = start("step", 3, hears=(1,))
    assert str(run.pids[0]) in str(holder(folder))
    second = forge.start(1, overrides)
    assert second.wait() == [2]
    errors = [line for line in second.said().splitlines() if line.startswith("error")]
    assert len(errors) == 1, second.said()
    assert f"is in use by host {os.uname().nodename}, pid {run.pids[0]}" in errors[0]
    assert status().status == "running", "the second run leaves the first one's word alone"
    run.send(1, signal.SIGUSR1)
    go_on(run)
    ends(run)
    # The fourth step, which was under way, and the one after it.
    assert status() == Status("stopped", 5, RESUME, "SIGUSR1")
    assert "stopped by SIGUSR1 at step 5, which is committed: the same command resumes it (exit code 75)" in run.said()
    assert max(metrics(folder)) == 5
    assert holder(folder) is None

    # Evaluation: it is given up, and made up for.
    run = start("evaluation", 16, hears=(0,))
    run.send(0, signal.SIGINT)
    go_on(run)
    ends(run)
    assert status() == Status("stopped", 16, RESUME, "SIGINT")
    assert "SIGINT: saves" in run.said(0), "at once, before the rank has agreed with the others"
    assert not (folder / "scores.json").exists()

    # While a checkpoint is being written: it is the one that counts.
    run = start("step", 23, 25, hears=(1,))
    assert run.said().index("step 16: val") < run.said().index("step 17/"), "the missing evaluation comes first"
    for writer in (writing := writers(run)):
        writer.suspend()
    go_on(run)
    until(run.has_halted)
    assert not (folder / "checkpoints" / "step-00000024").exists()
    run.send(1, signal.SIGUSR1)
    go_on(run)
    until(lambda: "heard" in run.said(1))
    for writer in writing:
        writer.resume()
    ends(run)
    assert status() == Status("stopped", 27, RESUME, "SIGUSR1")

    # One rank waits for data that does not come; another, in the midst of a collective, is asked.
    copy_folder(data, f"{s3[1]}/tiny")
    run = start("step", 28, more=(f"data.path={s3[1]}/tiny",))
    s3[0].fail(stall, "train-000001.tar")
    go_on(run)
    until(lambda: re.search(r"(waiting|waits) for s3://", run.said()))
    stuck = max(metrics(folder))
    run.send(0, signal.SIGTERM)
    ends(run)
    s3[0].reset()
    assert stuck <= status().step < STEPS

    # A rank is killed: the other one leaves word of that.
    run = start("step", status().step + 1)
    run.send(1, signal.SIGKILL)
    run.send(0, signal.SIGCONT)
    assert run.wait() == [1, -signal.SIGKILL]
    assert (status().status, status().code) == ("failed", 1)
    assert [failure.lost_others for failure in read_failures(folder).values()] == [True]
    loss = one_line(run.said(0))
    assert loss.startswith("error: another rank is gone: ")
    assert f"step {status().step:,}, " in loss
    assert "Traceback" in (folder / "failures" / "rank-00000.txt").read_text()

    # Rank 0, which keeps the books and the store.
    run = start("step", status().step + 1)
    run.send(0, signal.SIGKILL)
    run.send(1, signal.SIGCONT)
    assert run.wait() == [-signal.SIGKILL, 1]
    assert one_line(run.said(1)).startswith("error: another rank is gone: ")

    # A second SIGINT, a second after the first, does not wait for anything: here, for a rank that does not answer.
    run = start("step", status().step + 1)
    run.send(0, signal.SIGCONT)
    until(lambda: (run.send(0, signal.SIGINT), status().code == 130)[1])
    until(lambda: run.has_left(0))
    run.kill()
    assert run.wait() == [130, -signal.SIGKILL]

    assert forge.start(2, overrides).wait() == [0, 0]
    assert status() == Status("finished", STEPS, 0, "")
    for name in ("loss", "grad_norm", "val_loss", "val_top1"):
        assert metrics(folder, name) == metrics(whole, name), name
    a, b = models.read_weights(folder).state, models.read_weights(whole).state
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_running_out_of_memory_ends_all_ranks_in_one_line(forge: Forge, data: Path, tmp_path: Path) -> None:
    """Really: of address space, which each rank allows itself so much more of than it begins with."""
    large = [*settings(data, tmp_path, "large"), "model.image_size=448", "data.streams=8", "engine.zero_stage=0"]

    def ends_with(ranks: tuple[int, ...], *more: str) -> str:
        run = forge.start_work(2, "forked:train_within_a_limit", [ranks, [*large, *more]])
        assert run.wait() == [2, 2], run.said()
        (line,) = [line for rank in (0, 1) for line in run.said(rank).splitlines() if "rror" in line]
        assert read_status(tmp_path / "large") == Status("refused", 0, 2, line.removeprefix("error: "))
        assert "can't allocate memory" in line
        return line

    # Rank 0, which has enough, waits for the other in a collective by then.
    line = ends_with((1,), "train.micro_batch=12", "model.depth=10")
    assert "trying out training: " in line
    assert "Use train.micro_batch=6, or engine.activation_checkpointing=true, or more" in line
    line = ends_with((0, 1), "train.micro_batch=1", "evaluate.batch=200", "model.depth=1")
    assert "trying out evaluation with 200 images (evaluate.batch = 200): " in line
    assert line.endswith("Use evaluate.batch=100.")


def test_the_stop_file_and_the_limit(forge: Forge, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "endless"
    overrides = [*settings(data, tmp_path, "endless", *LONG), "train.length=1000000 steps", "evaluate.every=100%"]
    run = forge.start(2, overrides)
    at_step(run, 3)
    stop_file(folder).touch()
    ends(run)
    assert read_status(folder) == Status("stopped", max(metrics(folder)), RESUME, "the stop file")
    assert not stop_file(folder).exists(), "the next start is not to stop"

    # 33 s are 3 s from the start, and the rest is for the commit; a slow machine has not begun to train by then.
    run = forge.start(1, [*overrides, "name=short", "train.stop_after_minutes=0.55"])
    ends(run)
    status = read_status(tmp_path / "short")
    assert (status.status, status.code) == ("stopped", RESUME)
    assert status.reason.startswith("train.stop_after_minutes")


def connected(folder: str) -> tuple[stop.Stop, distributed.Ranks]:
    stops = stop.Stop(Path(folder))
    torch.distributed.init_process_group("gloo")
    ranks = distributed.from_environment()
    if ranks.is_main:
        assert stops.folder.lock() is None
    stops.connect(ranks)
    return stops, ranks


def leave(folder: str) -> None:
    """In a rank: rank 0 is asked to stop and leaves; the other agrees, without a word of why, and never comes to
    leaving.
    """
    stop._FAREWELL_SECONDS = 2.0
    stops, ranks = connected(folder)
    if ranks.is_main:
        stops.reason = "SIGTERM"
    with pytest.raises(Stopped):
        list(stops.together(iter(range(9))))
    if ranks.is_main:
        stops.leave(7, stops.reason)
    print("wants no more reads:", stops.is_wanted(), flush=True)
    signal.pause()


def tell(folder: str) -> None:
    """In a rank: what rank 0 flags is known to all, with the item that it is of."""
    stops, ranks = connected(folder)
    asked = iter([True, False, False, True, True, False])
    flag = (lambda: next(asked)) if ranks.is_main else (lambda: False)
    print("flagged:", [item for item in stops.together(iter(range(5)), flag) if stops.flagged], flush=True)


def test_what_one_rank_flags_is_known_to_all_with_the_same_item(forge: Forge, tmp_path: Path) -> None:
    run = forge.start_work(2, "test_stop:tell", str(tmp_path / "flags"))
    run.wait()
    for rank in (0, 1):
        assert "flagged: [0, 3, 4]" in run.said(rank), run.said(rank)


def test_a_rank_that_leaves_waits_for_no_other_for_ever(forge: Forge, tmp_path: Path) -> None:
    run = forge.start_work(2, "test_stop:leave", str(tmp_path / "alone"))
    until(lambda: run.has_left(0) and re.search(r"wants .*\n", run.said(1)))  # `print` writes it in pieces.
    run.kill()
    assert run.wait() == [RESUME, -signal.SIGKILL], run.said(0) + run.said(1)
    assert "wants no more reads: True" in run.said(1), "it would wait for those that it has begun"
    assert read_status(tmp_path / "alone") == Status("stopped", 7, RESUME, "SIGTERM")


def stand_still(folder: str) -> None:
    """In a rank: rank 0, which hosts the ranks' store, stands still once all are connected; rank 2 is in training by
    then.
    """
    stops, ranks = connected(folder)
    stops._training = ranks.rank == 2
    print("connected", flush=True)
    if ranks.is_main:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        signal.pause()


def test_ranks_hear_signals_although_rank_0_stands_still(forge: Forge, tmp_path: Path) -> None:
    """Their requests to the store that it hosts waited for ever, and with them what listens to signals."""
    run = forge.start_work(3, "test_stop:stand_still", str(tmp_path / "still"))
    until(lambda: all("connected" in run.said(rank) for rank in (1, 2)))
    until(lambda: psutil.Process(run.pids[0]).status() == psutil.STATUS_STOPPED)
    time.sleep(2)  # They ask the store once a second.
    run.send(1, signal.SIGTERM)
    until(lambda: run.has_left(1))
    until(lambda: (run.send(2, signal.SIGINT), time.sleep(1.5), run.has_left(2))[2])
    run.kill()
    assert run.wait() == [-signal.SIGKILL, RESUME, 130]
