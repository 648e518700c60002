"""Restarts a run until it is finished: after a crash, after preemption, on the remaining hosts. No slow imports.

The outcome of a start is read from the run folder (`run_folder.py`), because the launcher's exit code is unreliable
(DeepSpeed 0.19.8 may exit with 0 or 1 regardless of the ranks). The supervisor waits for the last process of a start, even if
the launcher was killed and its ranks are still running.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pipeline.base.errors import UserError, is_outage
from pipeline.base.locks import FileLock
from pipeline.base.words import counted
from pipeline.estimate.plan import cut_batch
from pipeline.lifecycle.hosts import Hosts, largest_fitting, read_hostfile, to_blame, unreachable, write_hostfile
from pipeline.lifecycle.run_folder import (
    RESUME,
    Status,
    forget_last_start,
    holder,
    is_stop_asked,
    read_end,
    read_failures,
    stop_file,
    this_process,
)
from pipeline.lifecycle.stop import BY_FILE, BY_LAUNCHER, BY_LIMIT
from pipeline.monitor.run_page import hide_passwords
from pipeline.process.outputs import try_outputs
from pipeline.process.start import check_program, silence_broken_output
from pipeline.settings.command import read_settings
from pipeline.settings.commands.operate import SuperviseConfig
from pipeline.settings.run import RunConfig

Outcome = Literal["finished", "stopped", "preempted", "refused", "failed"]
# Of outcomes after which it does not start the run again.
_EXIT_CODES: dict[Outcome, int] = {"finished": 0, "stopped": RESUME, "refused": 2}

# What starts a run: files of the repository, or modules of an installed library.
_SCRIPTS = ("pretrain.py", "finetune.py", "launch.pretrain", "launch.finetune")
# Locked by the supervisor while it lives.
_LOCK_FILE = "supervise.lock"
_DEFAULT_HOSTFILE = Path("/job/hostfile")  # DeepSpeed's default.
_POLL_SECONDS = 0.2
_LONGEST_PAUSE = 600.0
# Seconds after the stop file until SIGTERM goes to the launcher and its ranks, which then have 30 s, and until SIGKILL.
_TERMINATE_SECONDS = 10.0
_KILL_SECONDS = 45.0
# How long processes may outlive the launcher before they are asked to stop.
_ORPHAN_SECONDS = 3.0
# Timeout for ranks on other hosts, which no signal reaches, to obey the stop file.
_REMOTE_SECONDS = 300.0
_SET_CHILD_SUBREAPER = 36  # prctl(2)


def supervise(command: list[str], config: SuperviseConfig) -> None:
    """Restart `command` until its run is finished. Exits with 0, 75 (resume later), 2 (refused) or 1 (gave up).

    Raises UserError if the command does not start a run, or the run is running or supervised already.
    """
    sys.exit(Supervisor(command, config).loop())


class Supervisor:
    """Supervises the starts of one run."""

    def __init__(self, command: list[str], config: SuperviseConfig) -> None:
        self.command, self.config = command, config
        self.run = _settings_of(command)
        self.folder = Path(self.run.out) / self.run.name
        self.hostfile = _hostfile_of(command)
        self.hosts: Hosts = read_hostfile(self.hostfile) if self.hostfile else {}
        self.host_failures = dict.fromkeys(self.hosts, 0)
        self.needed_hosts: list[str] = []  # Failed too often, and the run cannot train without them.
        self.signals: list[int] = []
        self._refuse_another_run()
        check_program(command[0])
        try_outputs(self.run)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = _only_supervisor(self.folder)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        # The end of the terminal. Under nohup, ranks are to ignore it, too.
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, lambda number, frame: None)
        # Orphans of the launcher become children of this process, which can wait for them.
        ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def loop(self) -> int:
        """Start the run, judge the outcome, wait, repeat. Returns the exit code."""
        starts, idle, committed = 0, 0, -1
        while True:
            starts += 1
            outcome, why, step, code = self._start(starts)
            self.say(outcome, f"start {starts} {outcome} at step {step:,}: {why}", number=starts, step=step, code=code)
            if outcome in _EXIT_CODES:
                stop_file(self.folder).unlink(missing_ok=True)  # It came too late.
                return _EXIT_CODES[outcome]
            idle = 0 if step > max(committed, 0) else idle + 1
            committed = max(committed, step)
            if idle > self.config.restarts:
                self.say(
                    "gave up",
                    f"gave up: {counted(idle, 'start')} in a row have committed nothing new (restarts={idle - 1})",
                )
                stop_file(self.folder).unlink(missing_ok=True)
                return 1
            if outcome == "failed" and code is not None:
                self._count_failures(to_blame(self.hosts, read_failures(self.folder)), "a rank failed or fell silent")
            pause = min(self.config.pause_seconds * 2 ** max(idle - 1, 0), _LONGEST_PAUSE)
            self.say("wait", f"starting again in {pause:.0f} s", seconds=pause)
            if not self._wait(pause):
                self.say("stopped", "asked to stop: not started again")
                return RESUME
            self._leave_out_hosts()

    def _start(self, number: int) -> tuple[Outcome, str, int, int | None]:
        """Start the run once, until it ends. Returns (outcome, reason, step, the launcher's exit code; None if it did not start)."""
        try:
            # Once more at a restart: its ranks would count as those of this start, and be asked to stop.
            self._refuse_another_run()
            forget_last_start(self.folder)  # First: whoever reads of a start is not to find the status of the last one.
        except OSError as error:
            if not is_outage(error):
                raise
            return (
                "failed",
                f"not started, because {self.folder} could not be read or written ({error.strerror})",
                0,
                None,
            )
        self.say("start", f"start {number}: {' '.join(self.command)}", number=number)
        launch = Launch(self.command, self.folder, self.signals, self.say)
        launch.wait()
        status = read_end(self.folder)
        return *self._judge(status, launch), status.step if status else 0, launch.code

    def _refuse_another_run(self) -> None:
        """Raise UserError if a run that this supervisor did not start has the folder."""
        if who := holder(self.folder):
            raise UserError(f"{self.folder} is in use by {who}. Stop that one first.")

    def _judge(self, status: Status | None, launch: "Launch") -> tuple[Outcome, str]:
        """Return the outcome of a start and its reason."""
        how = status.status if status else None
        why = status.reason if status else ""
        if how == "finished":
            return "finished", "the run is complete"
        if self.signals:
            return "stopped", why or f"the launcher ended with {launch.code}"
        if how in ("refused", "diverged") or (launch.code == 2 and how != "stopped"):
            return "refused", why or "exit code 2, see above"
        if how == "stopped" and (launch.orphaned or why.startswith(BY_LAUNCHER)):
            return "failed", "its launcher was killed; what was trained is committed"
        if how == "stopped" and why.startswith((BY_FILE, BY_LIMIT, "SIGINT", "a second SIGINT")):
            return "stopped", why  # By a person, or by the time limit.
        if how == "stopped" or (how is None and launch.code == RESUME):
            return "preempted", why or "before it had its folder"
        return "failed", why if how == "failed" else f"killed; the launcher ended with {launch.code}"

    def _wait(self, seconds: float) -> bool:
        """Sleep. Returns False if a stop was requested meanwhile."""
        end = time.monotonic() + seconds
        while not self.signals and not is_stop_asked(self.folder):
            if time.monotonic() >= end:
                return True
            time.sleep(_POLL_SECONDS)
        stop_file(self.folder).unlink(missing_ok=True)
        return False

    # ------------------------------------------------------------------ hosts
    def _leave_out_hosts(self) -> None:
        """Drop hosts that failed too often; use as many of the remaining slots as can divide the batch."""
        if len(self.hosts) < 2:
            return
        launcher, port = _option(self.command, "--launcher"), _option(self.command, "--ssh_port")
        if launcher in (None, "pdsh") and "--no_ssh" not in self.command:
            self._count_failures(unreachable(self.hosts, port), "it does not answer to ssh")
        dropped = [name for name in self.hosts if self.host_failures[name] >= self.config.host_failures]
        left = {name: slots for name, slots in self.hosts.items() if name not in dropped}
        if not dropped or not left:
            return
        first = next(iter(self.hosts))
        chosen = largest_fitting(left, lambda num_ranks: not self._why_not(num_ranks))
        if not chosen:
            if dropped != self.needed_hosts:  # Otherwise each restart would repeat it.
                self.needed_hosts = dropped
                why = self._why_not(sum(left.values()))
                self.say("hosts", f"not going on without {', '.join(dropped)}: {why}", dropped=dropped)
            return
        self.hosts = chosen
        idle = sum(left.values()) - sum(self.hosts.values())
        unused = f"; {counted(idle, 'slot')} idle, for the batch of {self.run.train.global_batch}" if idle else ""
        kept = ", ".join(f"{name} ({slots})" for name, slots in self.hosts.items())
        self.say(
            "hosts", f"going on without {', '.join(dropped)}, on {kept}{unused}", dropped=dropped, hosts=self.hosts
        )
        path = self.folder / "hostfile"
        write_hostfile(path, self.hosts)
        options: dict[str, str | None] = {"--hostfile": str(path)}
        if first not in self.hosts:
            options["--master_addr"] = None  # It names the dropped host; DeepSpeed's default is the first one.
        # Otherwise DeepSpeed starts a single host's ranks locally, whatever its name.
        self.command = _with_options(self.command, options, ["--force_multi"])

    def _count_failures(self, hosts: list[str], why: str) -> None:
        for name in hosts:
            self.host_failures[name] += 1
            self.say("host failed", f"host {name} failed ({self.host_failures[name]}): {why}", host=name)

    def _why_not(self, num_ranks: int) -> str:
        """Why the run cannot train on this number of ranks; empty if it can."""
        try:
            cut_batch(self.run, num_ranks)
        except UserError as error:
            return str(error)
        return ""

    def say(self, event: str, line: str, **facts: Any) -> None:
        """Print a line and append it to supervise.log, and with `facts` to supervise.jsonl."""
        line = hide_passwords(line)  # The command may have one, in track.uri.
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            print(f"supervise: {line}", flush=True)
        except OSError:
            # Its reader or its terminal is gone. The run, which has a session of its own, goes on without it.
            silence_broken_output()
        try:
            with open(self.folder / "supervise.log", "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{moment} {line}\n")
            with open(self.folder / "supervise.jsonl", "a") as file:
                file.write(json.dumps({"time": moment, "event": event, "line": line, **facts}) + "\n")
        except OSError as error:
            # A full disk, say. The run is more than its log, and nobody would stop it or start it again.
            with contextlib.suppress(OSError):
                print(f"supervise: the line above is not in {self.folder}: {error.strerror}", flush=True)


class Launch:
    """One start of the command with all its processes. code: the launcher's exit code, once it has ended."""

    def __init__(self, command: list[str], folder: Path, signals: list[int], say: Callable[[str, str], None]) -> None:
        self.folder, self.signals, self.say = folder, signals, say
        self.code: int | None = None
        self.orphaned = False
        self._ended_at = self._asked_at = float("inf")
        self._made_stop_file = False
        self._sent: list[int] = []
        # Own session: Ctrl-C reaches only the supervisor, which then stops the run gracefully.
        self._process = subprocess.Popen(command, start_new_session=True)

    def wait(self) -> None:
        """Wait for the last process on all hosts; forwards stop requests of the supervisor to the run."""
        while (left := self._what_is_left()) is not None:
            now = time.monotonic()
            if self._asked_at == float("inf") and self.signals:
                self._ask(f"{signal.Signals(self.signals[0]).name}: asking the run to commit and stop")
            elif self._asked_at == float("inf") and now - self._ended_at > _ORPHAN_SECONDS:
                self.orphaned = True
                self._ask(f"the launcher has ended ({self.code}), {left} has not: asking it to commit and stop")
            if signal.SIGUSR1 not in self.signals:  # SIGUSR1 announces a preemption and leaves more time.
                self._insist(now - self._asked_at)
            if self.signals.count(signal.SIGINT) > 1:
                self._send(signal.SIGKILL)
            if now - self._ended_at > _REMOTE_SECONDS:
                raise UserError(
                    f"{left} still has {self.folder}, {_REMOTE_SECONDS:.0f} s after its launcher ended. End it, or "
                    f"remove {self.folder / 'lock'} if its host is gone."
                )
            time.sleep(_POLL_SECONDS)
        if self._made_stop_file:  # That of a person, which a dying run has not obeyed, is for the supervisor.
            stop_file(self.folder).unlink(missing_ok=True)

    def _what_is_left(self) -> str | None:
        """Describe what is still running; None if nothing is."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._process.pid:
                    self.code = self._process.returncode = os.waitstatus_to_exitcode(ended[1])
                    self._ended_at = time.monotonic()
            return "a process on this host"
        except ChildProcessError:
            try:
                return holder(self.folder)
            except OSError as error:
                if not is_outage(error) or self.signals:
                    raise
                self._ended_at = time.monotonic()  # Ranks on other hosts could not be asked to stop, either.
                return "perhaps a run"

    def _ask(self, line: str) -> None:
        self.say("stop", line)
        self._asked_at = time.monotonic()
        self._made_stop_file = not is_stop_asked(self.folder)
        try:
            stop_file(self.folder).touch()
        except OSError as error:
            self.say("stop", f"no stop file ({error.strerror}): the launcher and its ranks here get SIGTERM")
            self._send(signal.SIGTERM)

    def _insist(self, seconds: float) -> None:
        if seconds > _TERMINATE_SECONDS:
            self._send(signal.SIGTERM)
        if seconds > _KILL_SECONDS:
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        """Send a signal, at most once, to the launcher and its ranks on this host."""
        if number not in self._sent:
            self._sent.append(number)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def _only_supervisor(folder: Path) -> FileLock:
    """Lock the folder against a second supervisor until this process ends, as `RunFolder.lock` does. Raises UserError.

    A start needs seconds until its rank 0 has the run's own lock, and between starts nobody has it. A second supervisor would start
    the run meanwhile, and take the ranks of the first one for its own, and stop them.
    """
    lock = FileLock(folder / _LOCK_FILE, by_record=True)
    is_free = True
    with contextlib.suppress(OSError):  # Raised by file systems without locks.
        is_free = lock.acquire(wait=False)
    if not is_free:
        who = lock.read_owner()
        lock.close()
        raise UserError(f"{folder} is supervised by {who or 'another process'}. Stop that one first.")
    lock.write_owner(this_process())
    return lock


def _settings_of(command: list[str]) -> RunConfig:
    """Return the settings of the run that a command starts. Raises UserError."""
    if any(Path(word).name in _SCRIPTS for word in command):
        return read_settings(RunConfig, command[_script_place(command) + 1 :])
    raise UserError(
        f"{' '.join(command) or 'no command'}: give the command that starts the run after --, for example: "
        "launch/supervise.py -- deepspeed launch/pretrain.py --config FILE"
    )


def _hostfile_of(command: list[str]) -> Path | None:
    """Return the hostfile of a deepspeed command, None if it has none. Raises UserError."""
    given = _option(command, "--hostfile") or _option(command, "-H")
    path = Path(given) if given else _DEFAULT_HOSTFILE
    if Path(command[0]).name not in ("deepspeed", "ds") or not (given or path.exists()):
        return None
    for name in ("--include", "--exclude", "--num_nodes", "--num_gpus", "--num_accelerators", "-i", "-e"):
        if _option(command, name):
            raise UserError(f"{name} beside --hostfile: supervise chooses hosts itself. Leave them out of {path}.")
    return path


def _option(command: list[str], name: str) -> str | None:
    """Return the value of a launcher option (`name value` or `name=value` before the script), or None."""
    words = command[: _script_place(command)]
    for place, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
        if word == name and place + 1 < len(words):
            return words[place + 1]
    return None


def _with_options(command: list[str], values: dict[str, str | None], flags: list[str]) -> list[str]:
    """Return the command with these launcher options replaced (None: removed) and these flags added."""
    place = _script_place(command)
    words, script = command[1:place], command[place:]
    for name in ("-H", *values, *flags):
        words = [word for word in words if not word.startswith(f"{name}=")]
        while name in words:
            at = words.index(name)
            del words[at : at + (1 if name in flags else 2)]
    given = [word for name, value in values.items() if value is not None for word in (name, value)]
    return [command[0], *given, *flags, *words, *script]


def _script_place(command: list[str]) -> int:
    return next(place for place, word in enumerate(command) if Path(word).name in _SCRIPTS)
