"""What the supervisor makes of a start's end. The run is a small script that ends as a list says; the rest is real."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from polling import until
from ranks import ROOT

from pipeline.cluster.status_files import RunFolder
from pipeline.cluster.supervise import _settings_of

# The launcher: does what the next line of `plan` says. left: code of a child of its own that lives on without it.
_DEEPSPEED = """#!{python}
import json, signal, subprocess, sys, time
from pathlib import Path
run = Path({run!r})
act, *rest = (run / "plan").read_text().splitlines()
(run / "plan").write_text("\\n".join(rest))
act = json.loads(act)
if act.get("deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(run / "commands").open("a").write(json.dumps(sys.argv[1:]) + "\\n")
if "left" in act:
    subprocess.Popen([sys.executable, "-c", act["left"], str(run)])
    while not (run / "lock").exists():
        time.sleep(0.02)
while act.get("deaf") or act.get("until_stop") and not (run / "stop").exists():
    time.sleep(0.02)
if "status" in act:
    (run / "status.json").write_text(json.dumps(act["status"]))
sys.exit(act["code"])
"""
# Lives on without the launcher until it notices that, as rank 0 does.
_ORPHAN = """
import json, sys, time
from pathlib import Path
from pipeline.cluster.status_files import RunFolder
run = RunFolder(Path(sys.argv[1]), 0)
run.lock()
time.sleep(1)
said = {"status": "stopped", "step": 9, "code": 75, "reason": "the end of its launcher"}
(Path(sys.argv[1]) / "status.json").write_text(json.dumps(said))
"""
WHOLE = ["data.path=d", "train.length=9 steps", "train.global_batch=24", "data.streams=4", "model.name=ViT-S/16"]


def ending(status: str, step: int, code: int = 1, reason: str = "", **more: object) -> dict:
    return {"status": {"status": status, "step": step, "code": code, "reason": reason}, "code": code, **more}


FINISHED = ending("finished", 99, 0)
KILLED = {**ending("running", 0, -1), "code": 247}


class Case:
    """A run folder, a launcher that plays `plan` in it, and the supervisor over both."""

    def __init__(self, folder: Path, plan: list[dict], *options: str, run: tuple[str, ...] = ()) -> None:
        self.run = folder / "runs" / "x"
        self.run.mkdir(parents=True)
        (self.run / "plan").write_text("\n".join(map(json.dumps, plan)))
        launcher = folder / "deepspeed"
        launcher.write_text(_DEEPSPEED.format(python=sys.executable, run=str(self.run)))
        launcher.chmod(0o755)
        self._command = [
            sys.executable,
            "launch/supervise.py",
            "pause_seconds=0",
            *options,
            "--",
            str(launcher),
            "launch/pretrain.py",
            "name=x",
            f"out={folder / 'runs'}",
            *WHOLE,
            *run,
        ]
        self.process = self.start()

    def start(self) -> subprocess.Popen:
        return subprocess.Popen(self._command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def end(self) -> tuple[int, str]:
        output = self.process.communicate(timeout=500)[0]
        return self.process.returncode, output

    def wait_for_start(self) -> None:
        until(lambda: self.commands() or self.process.poll() is not None)
        assert self.process.poll() is None, self.end()

    def commands(self) -> list[list[str]]:
        file = self.run / "commands"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_crashes_and_preemption_are_followed_by_a_start_until_it_is_finished(tmp_path: Path) -> None:
    """The second start says nothing: it is not taken for the end of the first."""
    plan = [
        ending("failed", 5, 1, "RuntimeError: no"),
        {"code": 1},
        KILLED,
        ending("stopped", 5, 75, "SIGTERM"),
        FINISHED,
    ]
    case = Case(tmp_path, plan)
    code, output = case.end()
    assert code == 0, output
    assert len(case.commands()) == 5
    assert (case.run / "supervise.log").read_text().count("RuntimeError: no") == 1


@pytest.mark.parametrize("how", ["its reader is gone", "its terminal is closed", "the disk is full"])
def test_it_goes_on_when(tmp_path: Path, how: str) -> None:
    case = Case(tmp_path, [{**FINISHED, "until_stop": True}])
    case.wait_for_start()
    if how == "its reader is gone":
        case.process.stdout.close()
    elif how == "its terminal is closed":
        case.process.send_signal(signal.SIGHUP)
    else:
        (case.run / "supervise.log").unlink()
        (case.run / "supervise.log").symlink_to("/dev/full")
    (case.run / "stop").touch()
    assert case.process.wait(timeout=500) == 0


def test_the_password_in_its_command_is_in_none_of_its_files(tmp_path: Path) -> None:
    case = Case(tmp_path, [FINISHED], run=("track.uri=postgresql://me:secret@host/runs",))
    output = case.end()[1] + (case.run / "supervise.log").read_text()
    assert "secret" not in output
    assert output.count("track.uri=postgresql://me:***@host/runs") == 2
    assert "track.uri=postgresql://me:secret@host/runs" in case.commands()[0]


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (ending("refused", 3, 2, "the loss is nan"), 2),
        ({**ending("diverged", 3, 2, "21 steps were skipped"), "code": 1}, 2),
        ({"code": 2}, 2),  # Settings that were refused before there was a folder.
        (ending("stopped", 3, 75, "the stop file"), 75),  # A person wants it to stand.
        (ending("stopped", 3, 75, "train.stop_after_minutes"), 75),
    ],
)
def test_what_would_repeat_itself_or_was_wanted_is_not_started_again(tmp_path: Path, last: dict, code: int) -> None:
    case = Case(tmp_path, [last, FINISHED])
    assert case.end()[0] == code
    assert len(case.commands()) == 1


@pytest.mark.slow
def test_it_gives_up_when_starts_commit_nothing(tmp_path: Path) -> None:
    forward = ending("failed", 7, 1, "RuntimeError: no")
    case = Case(tmp_path, [KILLED, KILLED, forward, KILLED, forward, KILLED, FINISHED], "restarts=2")
    assert case.end()[0] == 1
    assert len(case.commands()) == 6, "the third start committed something, so the count began anew"


@pytest.mark.parametrize(("last", "restarts", "code"), [(KILLED, 10, 75), (KILLED, 0, 1), (FINISHED, 10, 0)])
def test_a_person_who_asks_a_run_that_is_ending_is_heard(tmp_path: Path, last: dict, restarts: int, code: int) -> None:
    """The stop file was removed with those that the run had obeyed, and the run started again."""
    case = Case(tmp_path, [{**last, "until_stop": True}, FINISHED], f"restarts={restarts}")
    case.wait_for_start()
    (case.run / "stop").touch()
    assert case.end()[0] == code
    assert len(case.commands()) == 1
    assert not (case.run / "stop").exists()


def test_a_signal_goes_through_and_is_not_answered_by_a_start(tmp_path: Path) -> None:
    case = Case(tmp_path, [ending("stopped", 5, 75, "the stop file", until_stop=True), FINISHED])
    case.wait_for_start()
    case.process.send_signal(signal.SIGTERM)
    code, output = case.end()
    assert code == 75, output
    assert len(case.commands()) == 1
    assert not (case.run / "stop").exists()


def test_a_run_that_hears_nothing_is_killed_by_a_second_ctrl_c(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"code": 0, "deaf": True}, FINISHED])
    case.wait_for_start()
    case.process.send_signal(signal.SIGINT)
    until(lambda: (case.run / "stop").exists())
    case.process.send_signal(signal.SIGINT)
    assert case.end()[0] == 75
    assert not (case.run / "stop").exists()


def test_a_second_supervisor_is_refused_and_a_killed_one_holds_nobody(tmp_path: Path) -> None:
    """Even before the run has its lock, which takes a start some seconds. The fake one never locks it."""
    case = Case(tmp_path, [{**FINISHED, "until_stop": True}, FINISHED])
    case.wait_for_start()
    second = case.start()
    said = second.communicate(timeout=500)[0]
    assert second.returncode == 2, said
    assert f"process {case.process.pid}" in said
    assert len(case.commands()) == 1
    case.process.kill()
    case.process.wait()
    # Its start goes on without it, and its pipe.
    (case.run / "stop").touch()
    case.process.communicate()
    (case.run / "stop").unlink()
    third = case.start()
    third.communicate(timeout=500)
    assert third.returncode == 0
    assert len(case.commands()) == 2


def test_a_run_that_was_started_by_hand_between_two_starts_is_not_stopped(tmp_path: Path) -> None:
    case = Case(tmp_path, [KILLED, FINISHED], "pause_seconds=4")
    until(lambda: (log := case.run / "supervise.log").exists() and log.read_text().count("\n") == 3)
    folder = RunFolder(case.run, 0)
    assert folder.lock() is None
    try:
        code, output = case.end()
    finally:
        folder.unlock()
    assert code == 2, output
    assert f"pid {os.getpid()}" in output
    assert len(case.commands()) == 1
    assert not (case.run / "stop").exists()


@pytest.mark.slow
def test_ranks_that_outlive_their_launcher_are_waited_for(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"code": 1, "left": _ORPHAN}, FINISHED])
    code, output = case.end()
    assert code == 0, output
    assert len(case.commands()) == 2
    assert "step 9" in output


@pytest.mark.parametrize("launcher", [("deepspeed", "--module"), ("torchrun", "--nproc_per_node", "8", "-m")])
def test_an_installed_library_is_started_by_its_module(launcher: tuple[str, ...]) -> None:
    command = [*launcher, "launch.pretrain", "name=x", *WHOLE]
    assert _settings_of(command) == _settings_of(["launch/pretrain.py", "name=x", *WHOLE])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "launch/pretrain.py"),
        (["deepspeed", "launch/pretrain.py", "nmae=x"], "nmae"),
        (["nosuchlauncher", "launch/pretrain.py", "name=no_such_run", *WHOLE], "'nosuchlauncher'"),
        (["", "launch/pretrain.py", "name=no_such_run", *WHOLE], "''"),
    ],
)
def test_commands_that_start_no_run(command: list[str], said: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import launch, runpy, sys; sys.argv[0] = 'launch/supervise.py'\n"
            "try: runpy.run_path('launch/supervise.py', run_name='__main__')\n"
            "finally: assert not {'torch', 'deepspeed', 'ray', 'mlflow', 'numpy', 'pyarrow'} & sys.modules.keys()",
            "--",
            *command,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (ROOT / "runs" / "no_such_run").exists()
