"""DeepSpeed hostfiles: which hosts of a run failed, and which to continue with."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.lifecycle.run_folder import Failure

Hosts = dict[str, int]  # name -> slots (ranks), in the order of the ranks
_CONNECT_SECONDS = 10


def read_hostfile(path: Path) -> Hosts:
    """Parse lines `name slots=N`; empty lines and comments are ignored. Raises UserError."""
    try:
        lines = path.read_bytes().decode().splitlines()
    except OSError as error:
        raise UserError(f"{path}: the hostfile cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: the hostfile cannot be read (it is no text in UTF-8).") from None
    hosts: Hosts = {}
    for line in lines:
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=([1-9]\d{0,5})", text, re.ASCII)
        if not match or match[1] in hosts:
            raise UserError(
                f"{path}: {line!r} is not a hostfile line: write each host once, as 'name slots=8'; to leave one out, begin its line with #."
            )
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise UserError(f"{path} names no host: write lines as 'name slots=8'.")
    return hosts


def write_hostfile(path: Path, hosts: Hosts) -> None:
    path.write_text("".join(f"{name} slots={slots}\n" for name, slots in hosts.items()))


def to_blame(hosts: Hosts, failures: dict[int, Failure]) -> list[str]:
    """Return the hosts responsible for a failure, from its failure records (`run_folder.read_failures`).

    First choice: hosts with a rank that failed by itself, not by losing others. Otherwise: hosts with a rank that left no
    record, because it was killed or its host died. If this applies to all hosts, none is blamed. A rank that met the failure of a
    file server tells nothing of its host, and the others were ended because of it.
    """
    host_of = [name for name, slots in hosts.items() for _ in range(slots)]
    by_themselves = {
        host_of[rank] for rank, f in failures.items() if 0 <= rank < len(host_of) and not (f.lost_others or f.outage)
    }
    outage = any(f.outage for f in failures.values())
    silent = {name for rank, name in enumerate(host_of) if rank not in failures and not outage}
    for suspects in (by_themselves, silent):
        if suspects:
            return [name for name in hosts if name in suspects] if len(suspects) < len(hosts) else []
    return []


def ssh_options() -> list[str]:
    """The options of ssh that pdsh takes from the environment. Raises UserError."""
    text = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    try:
        return shlex.split(text)
    except ValueError:
        raise UserError(f"PDSH_SSH_ARGS_APPEND = {text!r} in the environment has a quote that is not closed.") from None


def unreachable(hosts: Hosts, ssh_port: str | None) -> list[str]:
    """Return the hosts that ssh cannot reach, with the options that DeepSpeed's pdsh uses; tried in parallel."""
    options = ssh_options() + (["-p", ssh_port] if ssh_port else [])

    def answers(host: str) -> bool:
        command = ["ssh", *options, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", host, "true"]
        try:
            return subprocess.run(command, capture_output=True, timeout=3 * _CONNECT_SECONDS).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        return [host for host, answered in zip(hosts, pool.map(answers, hosts), strict=True) if not answered]


def largest_fitting(hosts: Hosts, fits: Callable[[int], bool]) -> Hosts:
    """Choose the largest number of slots that `fits`, in host order; the last host may be used partially. {} if none fits."""
    count = next((count for count in range(sum(hosts.values()), 0, -1) if fits(count)), 0)
    chosen: Hosts = {}
    for name, slots in hosts.items():
        taken = min(slots, count - sum(chosen.values()))
        if taken:
            chosen[name] = taken
    return chosen
