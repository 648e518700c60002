"""Starts a run again after a crash or a preemption, for `deepspeed`, which does not. (torchrun does: docs/running.md.)
No slow imports.

How a start ended is read from status.json, because the exit code of DeepSpeed's launcher is not that of the ranks.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.locks import only_writer
from pipeline.cluster.status_files import RESUME, holder, is_stop_asked, read_end, stop_file
from pipeline.cluster.stop import BY_FILE, BY_LIMIT
from pipeline.monitor.run_page import hide_passwords
from pipeline.process.outputs import try_outputs
from pipeline.process.start import check_program
from pipeline.settings.command import read_settings
from pipeline.settings.commands.operate import SuperviseConfig
from pipeline.settings.run import RunConfig

# What starts a run: files of the repository, or modules of an installed library.
_SCRIPTS = ("pretrain.py", "finetune.py", "launch.pretrain", "launch.finetune")
_POLL_SECONDS, _LONGEST_PAUSE = 0.2, 600.0
# How long ranks may outlive the launcher, whose end they notice, before they are no longer waited for.
_REMOTE_SECONDS = 300.0


def supervise(command: list[str], config: SuperviseConfig) -> None:
    """Restart `command` until its run is finished. Exits with 0, 75 (resume later), 2 (refused) or 1 (gave up).

    Raises UserError if the command does not start a run, or the run is running or supervised already.
    """
    run = _settings_of(command)
    check_program(command[0])
    try_outputs(run)
    folder = Path(run.out) / run.name
    with only_writer(folder / "supervise.log", is_file=True):
        code = Supervisor(command, config, folder).loop()
    stop_file(folder).unlink(missing_ok=True)  # Written for a run that had just ended.
    sys.exit(code)


class Supervisor:
    """Supervises the starts of one run."""

    def __init__(self, command: list[str], config: SuperviseConfig, folder: Path) -> None:
        self.command, self.config, self.folder = command, config, folder
        self.signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        signal.signal(signal.SIGHUP, lambda number, frame: None)  # The run outlives its terminal.

    def loop(self) -> int:
        """Start the run until it need not be started again. Returns the exit code."""
        number = idle = committed = 0
        while True:
            if who := holder(self.folder):  # Its ranks would count as those of this start, and be asked to stop.
                raise UserError(f"{self.folder} is in use by {who}. Stop that one, or remove lock if its host is gone.")
            number, before = number + 1, self._version()
            self.say(f"start {number}: {' '.join(self.command)}")
            code = self._start()
            status = read_end(self.folder) if self._version() != before else None
            step, how, why = (status.step, status.status, status.reason) if status else (0, "", "")
            self.say(f"start {number} ended at step {step:,} (launcher's code {code}): {how or 'killed'} {why}")
            if how == "finished":
                return 0
            by_person = how == "stopped" and why.startswith((BY_FILE, BY_LIMIT, "SIGINT", "a second SIGINT"))
            if self.signals or by_person:
                return RESUME
            if how in ("refused", "diverged") or (code == 2 and how != "stopped"):
                return 2
            idle, committed = (0, step) if step > committed else (idle + 1, committed)
            if idle > self.config.restarts:
                self.say(f"gave up: no new checkpoint after {idle} starts (restarts = {self.config.restarts})")
                return 1
            pause = min(self.config.pause_seconds * 2 ** min(idle, 10), _LONGEST_PAUSE)
            self.say(f"starting again in {pause:.0f} s")
            end = time.monotonic() + pause
            while not (is_asked := bool(self.signals) or is_stop_asked(self.folder)) and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            if is_asked:
                return RESUME

    def _start(self) -> int:
        """Start the run, and wait for its end. Returns the launcher's exit code."""
        # A session of its own: Ctrl-C reaches only this process, which asks the run to stop.
        process = subprocess.Popen(self.command, start_new_session=True)
        last, is_asked = float("inf"), False
        while process.poll() is None or (self._is_held() and time.monotonic() < last):
            if process.returncode is not None:
                last = min(last, time.monotonic() + _REMOTE_SECONDS)
            if self.signals and not is_asked:
                is_asked = True
                with contextlib.suppress(OSError):
                    stop_file(self.folder).touch()
            if self.signals.count(signal.SIGINT) > 1:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        return process.returncode

    def _is_held(self) -> bool:
        """Whether rank 0 lives on without its launcher, whose end it notices; or its file server fails."""
        with contextlib.suppress(OSError):
            return holder(self.folder) is not None
        return True

    def _version(self) -> tuple[int, int] | None:
        """Changes when status.json is written."""
        with contextlib.suppress(OSError), open(self.folder / "status.json") as file:  # NFS asks its server at an open.
            return os.fstat(file.fileno()).st_ino, os.fstat(file.fileno()).st_mtime_ns
        return None

    def say(self, line: str) -> None:
        """Print a line, and append it to supervise.log. A closed terminal or a full disk does not end the
        supervisor.
        """
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {hide_passwords(line)}\n"  # The command may have one.
        with contextlib.suppress(OSError):
            os.write(1, f"supervise: {line}".encode(errors="backslashreplace"))
        with contextlib.suppress(OSError), open(self.folder / "supervise.log", "a", errors="backslashreplace") as file:
            file.write(line)


def _settings_of(command: list[str]) -> RunConfig:
    """Return the settings of the run that a command starts. Raises UserError."""
    for place, word in enumerate(command):
        if Path(word).name in _SCRIPTS:
            return read_settings(RunConfig, command[place + 1 :])
    raise UserError(f"{' '.join(command) or 'no command'}: give a command that starts launch/pretrain.py after --.")
