"""The launcher of this rank: its command line, and whether it has ended, so that orphaned ranks commit a checkpoint and
exit. Linux only.

`deepspeed` is two processes: the runner, started by the user, and its child (with pdsh: a child of each host's sshd),
the launcher `deepspeed.launcher.launch`, which starts the ranks. A SIGTERM or SIGKILL to the runner does not reach the
others, and the kernel does not report a grandparent's death. But an orphaned process gets another parent, which /proc
shows.

Only known launchers are watched, because a shell may end while `nohup torchrun ... &` continues.
"""

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil

_RUNNERS = ("deepspeed", "ds", "deepspeed.launcher.runner")
_LAUNCHER = "deepspeed.launcher.launch"
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_PDSH = ("pdsh", "pdsh.bin")  # The second is Debian's.
_SSHD = ("sshd", "sshd-session")


@dataclass(frozen=True)
class LauncherProcess:
    """The process that started this rank. links: (child, parent) pids of the chain up to it, as they were at the
    start.
    """

    name: str
    pid: int
    links: tuple[tuple[int, int], ...]

    def is_gone(self) -> bool:
        """Whether it or a process between it and this rank has ended."""
        return any(_parent(child) != parent for child, parent in self.links)


def find_launcher() -> LauncherProcess | None:
    """Return the process that started this rank, or None if no known launcher is among its ancestors."""
    child = psutil.Process()
    links: list[tuple[int, int]] = []
    found, launcher = None, None
    for parent in child.parents():
        links.append((child.pid, parent.pid))
        program = _program(parent)
        if program in _RUNNERS or program in _TORCHRUN:
            return LauncherProcess(program, parent.pid, tuple(links))
        if program == _LAUNCHER and not launcher:
            found, launcher = LauncherProcess(program, parent.pid, tuple(links)), parent
        if launcher and _started_over_ssh(launcher.pid, parent.pid):
            found = LauncherProcess("the ssh connection", parent.pid, tuple(links))
            # pdsh outlives its runner, and ssh connections outlive pdsh; only pdsh's own host can detect that.
            if (above := _pdsh_above(launcher)) is not None:
                found = LauncherProcess("pdsh", above[0], (*links, above))
            return found
        child = parent
    return found


def end_restarts() -> None:
    """Make torchrun end instead of starting the ranks of this host again, of which a mistake would be repeated, and a
    stop be undone.

    Its agent knows no exit code after which it does not restart, but ends when it is asked to.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0):
        launcher = find_launcher()
        if launcher and launcher.name in _TORCHRUN:
            with contextlib.suppress(ProcessLookupError):
                os.kill(launcher.pid, signal.SIGTERM)


def _started_over_ssh(launcher: int, parent: int) -> bool:
    """Whether `parent` is the sshd of the launcher's session; False if the launcher was detached (nohup, setsid)."""
    with contextlib.suppress(OSError, ValueError):
        if Path(f"/proc/{parent}/comm").read_text().strip() not in _SSHD:
            return False
        status = Path(f"/proc/{launcher}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        return not ignored >> (signal.SIGHUP - 1) & 1 and _parent(os.getsid(launcher)) == parent
    return False


def _pdsh_above(launcher: psutil.Process) -> tuple[int, int] | None:
    """Return (pid, pid of its runner) of the pdsh on this host that started the launcher, or None."""
    own = {word for word in _command(launcher) if word.startswith(("--world_info=", "--master_port="))}
    if not own:  # Not started by a runner: any pdsh would match.
        return None
    for process in psutil.process_iter():
        if _program(process) in _PDSH and own <= {*_command(process)}:
            runner = process.parent()
            if runner and _program(runner) in _RUNNERS:
                return process.pid, runner.pid
    return None


def _parent(pid: int) -> int | None:
    """Return the parent's pid; None if the process does not exist or is hidden."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return None


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _program(process: psutil.Process) -> str:
    """Return the name of the script, module or program that a process runs."""
    program, *words = _command(process) or [""]
    if os.path.basename(program).startswith("python"):
        for number, word in enumerate(words):
            if word == "-m":
                return "".join(words[number + 1 : number + 2])
            if not word.startswith("-"):
                return os.path.basename(word)
        return ""
    return os.path.basename(program)
