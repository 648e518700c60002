"""Commands that a grid or a study starts."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from polling import until

from pipeline.base.errors import UserError
from pipeline.experiment import spec

COMMAND = """
import pathlib, signal, sys, time
def stop(number, frame):
    pathlib.Path(sys.argv[1]).write_text(str(number))
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("begun", flush=True)
time.sleep(600)
"""
PARENT = """
import pathlib, sys
sys.path[:] = {path!r}
from pipeline.experiment import spec
spec._COMMANDS = pathlib.Path(sys.argv[1])
spec.start_command("train", [sys.argv[2]], "", sys.stdout.buffer)
"""


def test_a_command_is_asked_to_stop_when_its_parent_is_killed(tmp_path: Path) -> None:
    """Otherwise it would go on, and keep its run's folder from whoever continues the run."""
    (tmp_path / "train.py").write_text(COMMAND)
    heard = tmp_path / "heard"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(path=sys.path), str(tmp_path), str(heard)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout.readline() == "begun\n"
    parent.kill()
    until(lambda: heard.exists() and heard.read_text())
    assert heard.read_text() == str(int(signal.SIGTERM))
    parent.wait()
    parent.stdout.close()


@pytest.mark.parametrize("launcher", ["nosuchlauncher --num_gpus 8"])
def test_a_launcher_that_cannot_be_started_is_refused_in_one_line(launcher: str) -> None:
    with pytest.raises(
        UserError, match=r"^'.*': there is no such program, or it may not be run\. Name the launcher as"
    ):
        spec.start_command("pretrain", [], launcher, sys.stdout.buffer)
