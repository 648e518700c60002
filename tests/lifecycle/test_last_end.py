"""How the last start of a run ended, in words, also after a supervisor has set its status aside."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.lifecycle.run_folder import Status, forget_last_start, last_end_in_words, read_status


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
