"""The launcher of this rank (deepspeed, torchrun, Ray, Slurm): the environment variables that it sets, its command
line, and whether it has ended, so that orphaned ranks commit a checkpoint and exit. Linux only.

`deepspeed` is two processes: the runner, started by the user, and its child (with pdsh: a child of each host's sshd),
the launcher `deepspeed.launcher.launch`, which starts the ranks. A SIGTERM or SIGKILL to the runner does not reach the
others, and the kernel does not report a grandparent's death. But an orphaned process gets another parent, which /proc
shows.

Only known launchers are watched, because a shell may end while `nohup torchrun ... &` continues.
"""

import contextlib
import os
import random
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.base.errors import OneRankError, UserError

# Those by which a process is one of a launcher's ranks.
VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)
# Those that a script may set for all ranks that a launcher of it starts.
_OF_ALL_RANKS = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = range(20_000, 29_000)  # Above Ray's, below DeepSpeed's 29,500 and those that Linux assigns, from 32,768.
_RUNNERS = ("deepspeed", "ds", "deepspeed.launcher.runner")
_LAUNCHER = "deepspeed.launcher.launch"
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_PDSH = ("pdsh", "pdsh.bin")  # The second is Debian's.
_SSHD = ("sshd", "sshd-session")


def quiet_torch() -> None:
    """Turn off warnings of torch's C++ code. Must be called before torch is imported, which reads the variable once.

    When the rank that hosts the process group's store is killed, each request of the other ranks would print 20 stack
    frames before the line that names the lost rank. Set TORCH_CPP_LOG_LEVEL=WARNING to see them.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def forget_launcher(starts_one: bool = False) -> None:
    """Remove a launcher's variables from the environment of a command that is not a rank.

    starts_one: it starts a launcher, which gets those that are the same for all ranks.

    In a shell that a launcher or a scheduler started, it would take itself and the runs that it starts for one of the
    ranks: it would leave its mistakes to rank 0 to say, and they would wait for the others.
    """
    for name in VARIABLES:
        if not (starts_one and name in _OF_ALL_RANKS):
            os.environ.pop(name, None)


def share_cores() -> None:
    """Give each of several ranks of a host its share of the cores, by OMP_NUM_THREADS, unless that is set. Before torch
    is imported.

    `deepspeed` does not set it: every rank would start a thread for each core, and the threads wait for each other
    spinning.
    """
    if (ranks := ranks_on_host()) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))


def check_environment() -> int:
    """Returns the number of ranks, 1 without a launcher. Raises UserError for missing variables."""
    if "RANK" not in os.environ:
        return 1
    if missing := [name for name in ("LOCAL_RANK", *_OF_ALL_RANKS) if name not in os.environ]:
        raise OneRankError(  # Rank 0 may not exist to report it.
            f"RANK = {os.environ['RANK']} is set in the environment, but not {', '.join(missing)}. A launcher"
            " (deepspeed, torchrun) sets all of them; for a run of one rank, unset RANK."
        )
    return int(os.environ["WORLD_SIZE"])


def ranks_on_host() -> int:
    """The number of ranks on this host, by whichever variable the launcher sets; 1 without a launcher."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1))


def key_of_start(name: str) -> str:
    """A key of the ranks' store that belongs to this start: the store of torchrun's agent outlives the ranks that it
    restarts.

    Any other store ends with rank 0, and there the agents of two hosts may have different counts: of a rank that fails,
    one agent sees the failure, and another one, which does not count it, sees that the first one starts again.
    """
    is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"vit_pipeline/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0) if is_of_agent else 0}"


def free_port() -> int:
    """Returns a free TCP port, from a range that Linux does not assign to connections by itself.

    A port that the system chose (port 0) could be assigned to another process before ours listens on it, seconds later.
    """
    for port in random.SystemRandom().sample(_PORTS, min(100, len(_PORTS))):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
    raise UserError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free on this host, as far as tried.")


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
