"""How the last start of a run ended, in words; whether one has its folder, and its settings."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from ranks import ROOT

from pipeline.base.locks import FileLock
from pipeline.cluster.status_files import (
    RunFolder,
    Status,
    holder,
    last_end_in_words,
)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (Status("running", 1200, -1, ""), "killed, or lost with its host, at step 1,200 or later"),
        (Status("stopped", 40, 75, "SIGTERM"), "stopped at step 40: SIGTERM"),
        (Status("failed", 40, 1, "rank 3 on b is gone"), "failed at step 40: rank 3 on b is gone"),
        (Status("diverged", 40, 2, "the loss has jumped"), "diverged at step 40: the loss has jumped"),
        (Status("finished", 60, 0, ""), "finished at step 60"),
    ],
)
def test_each_ending(tmp_path: Path, status: Status, words: str) -> None:
    assert last_end_in_words(tmp_path) == ""
    (tmp_path / "status.json").write_text(json.dumps(asdict(status)))
    assert last_end_in_words(tmp_path) == words


def test_a_run_that_ended_just_before_the_next_start_was_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the next start found was looked up before it had the folder, and was that of a run that went on."""
    told, acquire = tmp_path / "status.json", FileLock.acquire
    told.write_text(json.dumps(asdict(Status("running", 40, -1, ""))))

    def end_first(lock: FileLock, wait: bool = True) -> bool:
        told.write_text(json.dumps(asdict(Status("finished", 60, 0, ""))))
        return acquire(lock, wait)

    monkeypatch.setattr(FileLock, "acquire", end_first)
    run = RunFolder(tmp_path, 0)
    assert run.lock() is None
    assert run.before == "finished at step 60"
    run.unlock()


def test_a_start_is_not_refused_while_others_ask_who_has_the_folder(tmp_path: Path) -> None:
    """They took the lock for a moment to find out, and a start at that moment said that another run has the folder."""
    run = RunFolder(tmp_path, 0)
    assert run.lock() is None
    code = (
        "import sys; from pathlib import Path; from pipeline.cluster.status_files import holder\n"
        "print(holder(Path(sys.argv[1])), flush=True)\n"
        "while True: holder(Path(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline().startswith("host ")
        for _ in range(1000):
            run.unlock()
            assert run.lock() is None
    finally:
        process.kill()
        process.communicate()
    run.unlock()
    assert holder(tmp_path) is None
