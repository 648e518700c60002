"""How the last start of a run ended, in words, also after a supervisor has set its status aside."""

import json
import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.base.errors import OneRankError
from pipeline.lifecycle.run_folder import (
    Failure,
    Status,
    forget_last_start,
    is_stop_asked,
    last_end_in_words,
    read_failures,
    read_status,
)
from pipeline.lifecycle.stop import Stop
from pipeline.settings import schema
from pipeline.settings.run import RunConfig


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
    forget_last_start(tmp_path)  # As a supervisor before it starts the run again.
    assert read_status(tmp_path) is None
    assert last_end_in_words(tmp_path) == words
    (tmp_path / "status.json").write_text(json.dumps(asdict(Status("finished", 99, 0, ""))))
    assert last_end_in_words(tmp_path) == "finished at step 99"


def test_a_folder_that_cannot_be_read_asks_for_no_stop(tmp_path: Path) -> None:
    """An exception would end the thread that hears signals, and SIGTERM would be ignored from then on."""
    assert not is_stop_asked(tmp_path / ("x" * 5000))
    (tmp_path / "stop").touch()
    assert is_stop_asked(tmp_path)


def test_why_one_rank_alone_ended_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the others say that it was killed."""
    monkeypatch.setenv("RANK", "1")
    given = ["name=x", f"out={tmp_path}", "data.path=x", "model.name=ViT-Ti/16", "train.length=2 steps"]
    (tmp_path / "x").mkdir()
    stop = Stop(schema.load(RunConfig, None, given))
    stop.folder.ours = True
    with pytest.raises(OneRankError), stop:
        raise OneRankError("shard 3 is missing")
    assert read_failures(tmp_path / "x") == {1: Failure(1, socket.gethostname(), "shard 3 is missing", False)}
