"""Checks the environment variables that a launcher (deepspeed, torchrun, Ray, Slurm) sets. Standard library only."""

import contextlib
import os
import random
import socket

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


def busy_port() -> UserError:
    return UserError(
        f"MASTER_PORT = {os.environ.get('MASTER_PORT')} is in use on this host, or kept for the system. Choose another:"
        " deepspeed --master_port PORT, torchrun --master_port PORT, or in the environment."
    )
