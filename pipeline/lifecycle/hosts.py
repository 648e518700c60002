"""The hosts of a run, as DeepSpeed's hostfile lists them: which of them failed, and which to go on with."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.errors import UserError
from pipeline.lifecycle.run_folder import Failure

Hosts = dict[str, int]  # name -> slots (ranks), in the order of the ranks
_CONNECT_SECONDS = 10


def read_hostfile(path: Path) -> Hosts:
    """Lines of `name slots=N`; empty ones and comments are skipped. Raises UserError."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"{path}: the hostfile cannot be read ({error.strerror}).") from None
    hosts: Hosts = {}
    for line in lines:
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", text)
        if not match or match[1] in hosts:
            raise UserError(f"{path}: {line!r} is no line of a hostfile: write each host once, as 'name slots=8'.")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise UserError(f"{path} names no host: write lines as 'name slots=8'.")
    return hosts


def write_hostfile(path: Path, hosts: Hosts) -> None:
    path.write_text("".join(f"{name} slots={slots}\n" for name, slots in hosts.items()))


def to_blame(hosts: Hosts, failures: dict[int, Failure]) -> list[str]:
    """The hosts that a run failed on, by the word its ranks left (`run_folder.read_failures`).

    A rank that failed of itself says so; one that lost the others says that; one that was killed, or whose host died,
    says nothing. What happens on all hosts is no host's fault.
    """
    host_of = [name for name, slots in hosts.items() for _ in range(slots)]
    by_themselves = {host_of[rank] for rank, f in failures.items() if 0 <= rank < len(host_of) and not f.lost_others}
    silent = {name for rank, name in enumerate(host_of) if rank not in failures}
    for suspects in (by_themselves, silent):
        if suspects:
            return [name for name in hosts if name in suspects] if len(suspects) < len(hosts) else []
    return []


def unreachable(hosts: Hosts, ssh_port: str | None) -> list[str]:
    """The hosts that do not answer to ssh, asked all at once in the way that DeepSpeed's pdsh asks them."""
    options = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", "")) + (["-p", ssh_port] if ssh_port else [])

    def answers(host: str) -> bool:
        command = ["ssh", *options, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", host, "true"]
        try:
            return subprocess.run(command, capture_output=True, timeout=3 * _CONNECT_SECONDS).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        return [host for host, answered in zip(hosts, pool.map(answers, hosts), strict=True) if not answered]


def largest_fitting(hosts: Hosts, fits: Callable[[int], bool]) -> Hosts:
    """The most slots of these hosts, first to last, whose number `fits`; the last host may give a part of its own."""
    count = next(count for count in range(sum(hosts.values()), 0, -1) if fits(count))
    chosen: Hosts = {}
    for name, slots in hosts.items():
        taken = min(slots, count - sum(chosen.values()))
        if taken:
            chosen[name] = taken
    return chosen
