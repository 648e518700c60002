"""What the supervisor makes of a start's end. The run is a small script that ends as a list says; the rest is real."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from polling import until

from pipeline.base.errors import UserError
from pipeline.lifecycle import supervise
from pipeline.lifecycle.hosts import largest_fitting, read_hostfile, to_blame
from pipeline.lifecycle.run_folder import Failure, RunFolder
from pipeline.lifecycle.supervise import Supervisor, _hostfile_of, _option, _settings_of, _with_options
from pipeline.settings import schema
from pipeline.settings.commands.operate import SuperviseConfig
from pipeline.settings.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]
# The launcher: does what the next line of `plan` says. left: seconds that a child of its own lives on without it.
_DEEPSPEED = """#!{python}
import json, os, subprocess, sys, time
from pathlib import Path
run = Path({run!r})
(run / "commands").open("a").write(json.dumps(sys.argv[1:]) + "\\n")
plan = (run / "plan").read_text().splitlines()
(run / "plan").write_text("\\n".join(plan[1:]))
act = json.loads(plan[0])
if "left" in act:
    subprocess.Popen([sys.executable, "-c", act["left"], str(run)])
while act.get("until_stop") and not (run / "stop").exists():
    time.sleep(0.02)
if "status" in act:
    (run / "status.json").write_text(json.dumps(act["status"]))
(run / "failures").mkdir()
for failure in act.get("failures", []):
    (run / "failures" / f"rank-{{failure['rank']:05d}}.json").write_text(json.dumps(failure))
sys.exit(act["code"])
"""
# Lives on without the launcher until it is asked to stop, as ranks do.
_ORPHAN = """
import json, sys, time
from pathlib import Path
run = Path(sys.argv[1])
while not (run / "stop").exists():
    time.sleep(0.02)
(run / "status.json").write_text(json.dumps({"status": "stopped", "step": 9, "code": 75, "reason": "the stop file"}))
"""


def ending(status: str, step: int, code: int = 1, reason: str = "", **more: object) -> dict:
    return {"status": {"status": status, "step": step, "code": code, "reason": reason}, "code": code, **more}


FINISHED = ending("finished", 99, 0)
KILLED = {"status": {"status": "running", "step": 0, "code": -1, "reason": ""}, "code": 247}


class Case:
    """A run folder, a launcher that plays `plan` in it, and the supervisor over both."""

    def __init__(
        self,
        folder: Path,
        plan: list[dict],
        *options: str,
        run: Sequence[str] = (),
        prepare: Callable[[Path], None] = lambda run: None,
    ) -> None:
        self.run = folder / "runs" / "x"
        self.run.mkdir(parents=True)
        prepare(self.run)
        (self.run / "plan").write_text("\n".join(map(json.dumps, plan)))
        for name, text in {"deepspeed": _DEEPSPEED, "ssh": '#!/bin/sh\necho "$@" | grep -qv gone\n'}.items():
            (folder / name).write_text(
                text.format(python=sys.executable, run=str(self.run)) if "{run" in text else text
            )
            (folder / name).chmod(0o755)
        settings = ["pause_seconds=0", *(option for option in options if "=" in option and not option.startswith("-"))]
        launcher = [option for option in options if option.startswith("-")]
        run = ["launch/pretrain.py", *run, "name=x", f"out={folder / 'runs'}", "data.path=d", "train.length=9 steps",
               "train.global_batch=24", "train.micro_batch=6", "data.streams=4", "model.name=ViT-S/16"]  # fmt: skip
        self._command = [
            sys.executable,
            "launch/supervise.py",
            *settings,
            "--",
            str(folder / "deepspeed"),
            *launcher,
            *run,
        ]
        self._environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        self.process = self.start()

    def start(self) -> subprocess.Popen:
        return subprocess.Popen(
            self._command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self._environment
        )

    def end(self) -> tuple[int, str]:
        output = self.process.communicate(timeout=500)[0]
        return self.process.returncode, output

    def events(self) -> list[str]:
        lines = (self.run / "supervise.jsonl").read_text().splitlines()
        return [json.loads(line)["event"] for line in lines]

    def commands(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.run / "commands").read_text().splitlines()]


def test_crashes_and_preemption_are_followed_by_a_start_until_it_is_finished(tmp_path: Path) -> None:
    plan = [KILLED, ending("stopped", 5, 75, "SIGTERM"), ending("failed", 5, 1, "RuntimeError: no"), FINISHED]
    case = Case(tmp_path, plan)
    code, output = case.end()
    assert code == 0, output
    assert case.events() == ["start", "failed", "wait", "start", "preempted", "wait", "start", "failed", "wait", "start",
                             "finished"]  # fmt: skip
    assert "start 1 failed at step 0: killed; the launcher ended with 247" in output
    assert "start 3 failed at step 5: RuntimeError: no" in output
    assert "start 4 finished at step 99" in (case.run / "supervise.log").read_text()


def test_whoever_reads_of_a_start_finds_no_status_of_the_last_one(tmp_path: Path) -> None:
    """Its log is a FIFO here, so it stands still right after it printed the line, until somebody reads it."""
    os.mkfifo(tmp_path / "log")
    case = Case(tmp_path, [KILLED, FINISHED], prepare=lambda run: (run / "supervise.log").symlink_to(tmp_path / "log"))
    assert case.process.stdout
    logged = 0
    try:
        for number, printed in enumerate(case.process.stdout, 1):
            if "start 2: " in printed:
                assert not (case.run / "status.json").exists()
            while logged < number:  # One read may get the next line, too.
                logged += (tmp_path / "log").read_text().count("\n")
    finally:
        case.process.kill()
    assert case.events().count("start") == 2


def test_it_goes_on_when_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    case = Case(tmp_path, [KILLED, FINISHED])
    assert case.process.stdout is not None
    case.process.stdout.close()
    assert case.process.wait(timeout=500) == 0
    assert case.events() == ["start", "failed", "wait", "start", "finished"]


def test_it_goes_on_when_its_terminal_is_closed(tmp_path: Path) -> None:
    case = Case(tmp_path, [{**FINISHED, "until_stop": True}])
    until(lambda: (case.run / "commands").exists())
    case.process.send_signal(signal.SIGHUP)
    time.sleep(1)
    (case.run / "stop").touch()
    assert case.end()[0] == 0


def test_the_password_in_its_command_is_in_none_of_its_files(tmp_path: Path) -> None:
    case = Case(tmp_path, [FINISHED], run=["track.uri=postgresql://me:secret@host/runs"])
    output = case.end()[1]
    assert "track.uri=postgresql://me:***@host/runs" in output
    assert (
        "secret" not in output + (case.run / "supervise.log").read_text() + (case.run / "supervise.jsonl").read_text()
    )
    assert "track.uri=postgresql://me:secret@host/runs" in case.commands()[0]


@pytest.mark.parametrize(
    ("last", "code", "event"),
    [
        (ending("refused", 3, 2, "the loss is nan"), 2, "refused"),
        ({**ending("diverged", 3, 2, "21 steps were skipped"), "code": 1}, 2, "refused"),
        ({"code": 2}, 2, "refused"),  # Settings that were refused before there was a folder.
        (ending("stopped", 3, 75, "the stop file"), 75, "stopped"),  # A person wants it to stand.
        (ending("stopped", 3, 75, "train.stop_after_minutes"), 75, "stopped"),
    ],
)
def test_what_would_repeat_itself_or_was_wanted_is_not_started_again(
    tmp_path: Path, last: dict, code: int, event: str
) -> None:
    case = Case(tmp_path, [last, FINISHED])
    assert case.end()[0] == code
    assert case.events() == ["start", event]


@pytest.mark.slow
def test_it_gives_up_when_starts_commit_nothing(tmp_path: Path) -> None:
    forward = ending("failed", 7, 1, "RuntimeError: no")
    case = Case(tmp_path, [KILLED, KILLED, forward, KILLED, forward, KILLED, FINISHED], "restarts=2")
    code, output = case.end()
    assert code == 1
    assert len(case.commands()) == 6, "the third start committed something, so the count began anew"
    assert "gave up: 3 starts in a row have committed nothing new (restarts=2)" in output


@pytest.mark.parametrize(
    ("last", "options", "code", "events"),
    [
        ({**KILLED, "until_stop": True}, [], 75, ["start", "failed", "wait", "stopped"]),
        ({**KILLED, "until_stop": True}, ["restarts=0"], 1, ["start", "failed", "gave up"]),
        ({**FINISHED, "until_stop": True}, [], 0, ["start", "finished"]),
    ],
)
def test_a_person_who_asks_a_run_that_is_ending_is_heard(
    tmp_path: Path, last: dict, options: list[str], code: int, events: list[str]
) -> None:
    """The stop file was removed with those that the run had obeyed, and the run started again."""
    case = Case(tmp_path, [last, FINISHED], *options)
    until(lambda: (case.run / "commands").exists())
    (case.run / "stop").touch()
    assert case.end()[0] == code
    assert case.events() == events
    assert not (case.run / "stop").exists()


def test_sigterm_goes_through_and_is_not_answered_by_a_start(tmp_path: Path) -> None:
    case = Case(tmp_path, [ending("stopped", 5, 75, "the stop file", until_stop=True), FINISHED])
    while not (case.run / "commands").exists():
        time.sleep(0.01)
    case.process.send_signal(signal.SIGTERM)
    code, output = case.end()
    assert code == 75, output
    assert case.events() == ["start", "stop", "stopped"]
    assert not (case.run / "stop").exists()


def test_a_second_supervisor_is_refused_and_a_killed_one_holds_nobody(tmp_path: Path) -> None:
    """Even before the run has its lock, which takes a start some seconds. The fake one never locks it."""
    case = Case(tmp_path, [{**FINISHED, "until_stop": True}, FINISHED])
    until(lambda: (case.run / "commands").exists())
    second = case.start()
    said = second.communicate(timeout=500)[0]
    assert second.returncode == 2, said
    assert f"{case.run} is supervised by host" in said
    assert f"pid {case.process.pid}, since" in said
    assert len(case.commands()) == 1
    case.process.kill()
    case.process.wait()
    # Its start goes on without it, and its pipe.
    (case.run / "stop").touch()
    case.process.communicate()
    (case.run / "stop").unlink()
    third = case.start()
    assert "start 1 finished" in third.communicate(timeout=500)[0]
    assert third.returncode == 0


def test_a_full_disk_does_not_end_it(tmp_path: Path) -> None:
    """Its run would be alone then: not stopped when that is asked for, and not started again."""
    case = Case(tmp_path, [{**FINISHED, "until_stop": True}])
    until(lambda: (case.run / "commands").exists())
    for name in ("supervise.log", "supervise.jsonl"):
        (case.run / name).unlink()
        (case.run / name).symlink_to("/dev/full")
    (case.run / "stop").symlink_to(case.run / "missing" / "stop")  # touch() fails.
    case.process.send_signal(signal.SIGTERM)
    code, output = case.end()
    assert code == 75, output
    assert "supervise: SIGTERM: asking the run to commit and stop\n" in output
    assert f"supervise: the line above is not in {case.run}: No space left on device\n" in output
    assert "no stop file (No such file or directory): the launcher and its ranks here get SIGTERM" in output


def test_it_waits_for_a_file_server_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with code 1, and nobody started the run again."""
    supervisor = object.__new__(Supervisor)
    supervisor.folder, supervisor.signals, supervisor.command = (
        tmp_path,
        [],
        ["deepspeed", "--launcher=slurm", "pretrain.py"],
    )
    supervisor.hosts, supervisor.config = {"a": 1, "b": 1}, SuperviseConfig(pause_seconds=0)
    supervisor.host_failures = dict.fromkeys(supervisor.hosts, 0)
    stale = OSError(errno.ESTALE, "Stale file handle")
    answers = [stale, None, stale, None]  # Before the first start, before the second, at its end, and again.

    def who(folder: Path) -> None:
        if answer := answers.pop(0):
            raise answer

    def play(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(pid=os.getpid(), returncode=0)

    def end(*_: object) -> tuple[int, int]:
        (tmp_path / "status.json").write_text(json.dumps(FINISHED["status"]))
        raise ChildProcessError

    monkeypatch.setattr(supervise, "holder", who)
    monkeypatch.setattr(supervise.subprocess, "Popen", play)
    monkeypatch.setattr(supervise.os, "waitpid", end)
    monkeypatch.setattr(supervise.time, "sleep", lambda seconds: None)
    assert supervisor.loop() == 0
    assert not answers
    assert "start 1 failed at step 0: not started, because" in (tmp_path / "supervise.log").read_text()
    assert not any(supervisor.host_failures.values())


def test_a_run_that_was_started_by_hand_between_two_starts_is_not_stopped(tmp_path: Path) -> None:
    case = Case(tmp_path, [KILLED, FINISHED], "pause_seconds=10")
    until(lambda: "wait" in case.events() if (case.run / "supervise.jsonl").exists() else False)
    folder = RunFolder(case.run, 0)
    assert folder.lock() is None
    try:
        code, output = case.end()
    finally:
        folder.unlock()
    assert code == 2, output
    assert f"{case.run} is in use by host" in output
    assert case.events() == ["start", "failed", "wait"]
    assert not (case.run / "stop").exists()


@pytest.mark.slow
def test_ranks_that_outlive_their_launcher_are_stopped_first(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"code": 1, "left": _ORPHAN}, FINISHED])
    code, output = case.end()
    assert code == 0, output
    assert case.events() == ["start", "stop", "failed", "wait", "start", "finished"]
    assert "start 1 failed at step 9: its launcher was killed; what was trained is committed" in output


def test_a_host_that_failed_twice_is_left_out_and_the_batch_still_divides(tmp_path: Path) -> None:
    """Of a, gone and c with 2, 2 and 3 ranks: 24 samples on a and c, so on 4 of their 5 slots."""
    (tmp_path / "hosts").write_text("a slots=2\ngone slots=2  # in rack 3\n\nc slots=3\n")
    lost = [{"rank": rank, "host": "?", "error": "gloo", "lost_others": True} for rank in (0, 1, 4, 5, 6)]
    options = [f"--hostfile={tmp_path / 'hosts'}", "--master_addr=a"]
    case = Case(tmp_path, [{**KILLED, "failures": lost}, FINISHED], *options)
    code, output = case.end()
    assert code == 0, output
    assert "going on without gone, on a (2), c (2); 1 slot idle, for the batch of 24" in output
    assert read_hostfile(case.run / "hostfile") == {"a": 2, "c": 2}
    first, second = case.commands()
    assert first[:2] == options
    # The master is still there.
    assert second[:3] == ["--hostfile", str(case.run / "hostfile"), "--force_multi"]
    assert second[3:5] == ["--master_addr=a", "launch/pretrain.py"]


def test_blame() -> None:
    hosts = {"a": 2, "b": 1}

    def left(*lost_others: bool | None) -> dict[int, Failure]:
        return {rank: Failure(rank, "?", "?", lost) for rank, lost in enumerate(lost_others) if lost is not None}

    assert to_blame(hosts, left(True, True, None)) == ["b"], "it says nothing: it was killed, or its host died"
    assert to_blame(hosts, left(True, False, None)) == ["a"], (
        "one that failed of itself comes before one that is silent"
    )
    assert to_blame(hosts, left(False, True, False)) == [], "what happens everywhere is no host's fault"
    outage = {0: Failure(0, "?", "?", False, outage=True)}
    assert to_blame(hosts, left(None, True, True) | outage) == [], "a shared file server is no host's fault"
    assert to_blame(hosts, outage) == [], "nor is the silence of those that were ended because of it"
    assert to_blame(hosts, left(None, True, False) | outage) == ["b"]
    assert to_blame(hosts, {}) == []
    assert to_blame({}, {}) == []


def test_the_most_slots_that_fit() -> None:
    hosts = {"a": 4, "b": 4, "c": 2}
    assert largest_fitting(hosts, lambda n: 24 % n == 0) == {"a": 4, "b": 4}
    assert largest_fitting(hosts, lambda n: 30 % n == 0) == hosts
    assert largest_fitting(hosts, lambda n: 12 % n == 0) == {"a": 4, "b": 2}
    assert largest_fitting(hosts, lambda n: False) == {}


@pytest.mark.parametrize(("micro_batch", "kept"), [(6, {"a": 2, "c": 4}), (3, {"a": 2, "gone": 2, "c": 4})])
def test_a_loss_of_the_whole_batch_keeps_ranks_that_can_hold_it(tmp_path: Path, micro_batch: int, kept: dict) -> None:
    """24 samples on 8 ranks. On 6 they are 4 each, which a micro-batch of 3 cannot hold, nor can fewer ranks."""
    needed = [
        "name=x",
        f"out={tmp_path}",
        "data.path=d",
        "train.length=9 steps",
        "train.loss=lejepa",
        "model.name=ViT-S/16",
    ]
    supervisor = Supervisor.__new__(Supervisor)
    supervisor.command, supervisor.config = (
        ["deepspeed", "--no_ssh", "launch/pretrain.py"],
        SuperviseConfig(host_failures=2),
    )
    batch = ["train.global_batch=24", f"train.micro_batch={micro_batch}", "data.streams=4"]
    supervisor.run, supervisor.folder = schema.load(RunConfig, None, [*needed, *batch]), tmp_path
    supervisor.hosts = {"a": 2, "gone": 2, "c": 4}
    supervisor.host_failures, supervisor.needed_hosts = {"a": 0, "gone": 2, "c": 0}, []
    for _ in range(2):  # Two restarts: what cannot be done is said once.
        supervisor._leave_out_hosts()
    said = (tmp_path / "supervise.log").read_text()
    assert supervisor.hosts == kept, said
    assert said.count("not going on without gone: train.loss = lejepa compares all samples") == (micro_batch == 3)


def test_options_of_the_launcher() -> None:
    command = ["deepspeed", "--hostfile=h", "--master_addr", "a", "-q", "launch/pretrain.py", "--hostfile", "mine"]
    assert _option(command, "--hostfile") == "h"
    assert _option(command, "--master_port") is None
    changed = _with_options(command, {"--hostfile": "new", "--master_addr": None}, ["--force_multi"])
    assert changed == [
        "deepspeed",
        "--hostfile",
        "new",
        "--force_multi",
        "-q",
        "launch/pretrain.py",
        "--hostfile",
        "mine",
    ]


@pytest.mark.parametrize("launcher", ["deepspeed", "/venv/bin/ds"])
def test_hosts_are_chosen_for_both_names_of_the_launcher(launcher: str) -> None:
    assert _hostfile_of([launcher, "--hostfile", "mine", "launch/pretrain.py"]) == Path("mine")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a", "'a' is not a hostfile line"),
        ("a slots=1\na slots=2", "each host once"),
        ("a slots=0", "leave one out"),
        ("", "names no host"),
    ],
)
def test_hostfiles_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UserError, match=said):
        read_hostfile(tmp_path / "hosts")


WHOLE = ["name=no_such_run", "model.name=ViT-Ti/16", "data.path=here", "train.length=1 steps"]


@pytest.mark.parametrize("launcher", [("deepspeed", "--module"), ("torchrun", "--nproc_per_node", "8", "-m")])
def test_an_installed_library_is_started_by_its_module(launcher: tuple[str, ...]) -> None:
    command = [*launcher, "launch.pretrain", *WHOLE]
    assert _settings_of(command).model.name == _settings_of(["launch/pretrain.py", *WHOLE]).model.name
    assert _with_options(command, {"--hostfile": "new"}, [])[-len(WHOLE) - 2 :] == [
        launcher[-1],
        "launch.pretrain",
        *WHOLE,
    ]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "give the command that starts the run after --"),
        (["deepspeed", "launch/pretrain.py", "nmae=x"], "unknown setting nmae. Did you mean name?"),
        (["nosuchlauncher", "launch/pretrain.py", *WHOLE], "error: 'nosuchlauncher': there is no such program"),
        (["", "launch/pretrain.py", *WHOLE], "error: '': there is no such program"),
    ],
)
def test_commands_that_start_no_run(command: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import runpy, sys; sys.argv[0] = 'launch/supervise.py'\n"
         "try: runpy.run_path('launch/supervise.py', run_name='__main__')\n"
         "finally: assert not {'torch', 'deepspeed', 'ray', 'mlflow', 'numpy', 'pyarrow'} & sys.modules.keys()", "--", *command],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (ROOT / "runs" / "no_such_run").exists()
