"""Commands that a grid or a study starts."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from polling import until

from pipeline.base.errors import UserError
from pipeline.process import waits
from pipeline.settings import schema
from pipeline.settings.commands.reports import GridConfig
from pipeline.settings.commands.study import StudyConfig
from pipeline.settings.run import RunConfig
from pipeline.transfer import child_run

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
from pipeline.transfer import child_run
child_run._COMMANDS = pathlib.Path(sys.argv[1])
child_run.start_command("train", [sys.argv[2]])
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
    assert parent.stdout
    assert parent.stdout.readline() == "begun\n"
    parent.kill()
    until(lambda: heard.exists() and heard.read_text())
    assert heard.read_text() == str(int(signal.SIGTERM))
    parent.wait()
    parent.stdout.close()


def test_a_folder_in_use_is_waited_for_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = iter(["pid 7", "pid 7", None])
    said = list[str]()

    def holder(folder: Path) -> str | None:
        said.extend(str(wait) for wait in waits.in_progress())
        return next(users)

    monkeypatch.setattr(child_run, "holder", holder)
    assert child_run.wait_until_free(tmp_path) == ""
    assert set(said) == {f"pid 7 to leave {tmp_path}, at most 2 min"}
    monkeypatch.setattr(child_run, "holder", lambda folder: "pid 8")
    monkeypatch.setattr(child_run, "_COMMIT_SECONDS", 0.0)
    assert child_run.wait_until_free(tmp_path) == "pid 8"


def test_a_machine_without_the_command_says_how_to_bring_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(child_run, "_COMMANDS", tmp_path)
    with pytest.raises(UserError, match=r"has no .*/pretrain.py. On a Ray cluster, use: ray job submit --working-dir"):
        child_run.start_command("pretrain", [])


@pytest.mark.parametrize("launcher", ["nosuchlauncher --num_gpus 8", "''", "/dev/null"])
def test_a_launcher_that_cannot_be_started_is_refused_in_one_line(launcher: str) -> None:
    with pytest.raises(
        UserError, match=r"^'.*': there is no such program, or it may not be run\. Name the launcher as"
    ):
        child_run.start_command("pretrain", [], launcher)


def test_what_an_objective_cannot_measure_is_refused_before_any_run() -> None:
    settings = ["name=x", "data.path=d", "model.name=ViT-Ti/16", "train.length=1 steps", "checkpoint.best=val_top9"]
    with pytest.raises(
        UserError, match=r"checkpoint\.best = 'val_top9' must be one of test_top1, test_top5, test_loss"
    ):
        child_run.make_child("x", "configs/pretrain/cifar10_small.yaml", settings)


@pytest.mark.parametrize("launcher", ["deepspeed --x 'y", 'torchrun "', "deepspeed \\"])
def test_a_quote_that_is_not_closed_is_refused_with_the_settings(launcher: str) -> None:
    for cls, settings in (
        (GridConfig, ["name=g", "run=r", "lr=1"]),
        (StudyConfig, ["name=s", "run=r", "question=ablation", "models=[{name: a},{name: b}]"]),
    ):
        with pytest.raises(UserError, match=r"launcher = .* has a quote that is not closed, or ends in a backslash\."):
            schema.load(cls, None, [*settings, f"launcher={launcher}"])
    with pytest.raises(UserError, match=r"launch\.env = .* has a quote that is not closed"):
        schema.load(RunConfig, None, ["name=x", "data.path=d", "train.length=1 steps", "launch.env='A"])
