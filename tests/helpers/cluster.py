"""What runs on the hosts of a cluster: a copy of this repository, sshd, Ray; and waiting for what they do."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from hosts import Host
from ranks import ROOT

T = TypeVar("T")

TOOLS = ("/usr/sbin/sshd", "pdsh", "ssh-keygen")  # Debian: openssh-server, pdsh.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}:/usr/sbin:/sbin"
# Of the ranks; what DeepSpeed's launcher does not pass on by itself belongs in .deepspeed_env.
CPU_RANKS = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
_SSHD = """
mount -t tmpfs tmpfs /run
mkdir /run/sshd
exec /usr/sbin/sshd -D -e -f "$1"
"""


@dataclass(frozen=True)
class Site:
    """Three hosts, what their user has (`folder`: this repository; the data), and that user's environment."""

    nodes: list[Host]
    folder: Path
    environment: dict[str, str]

    def start(self, *command: str | Path, log: Path) -> subprocess.Popen:
        """A command on node1, where the user is."""
        with open(log, "w") as file:
            return self.nodes[0].start(
                *command, cwd=self.folder, env=self.environment, stdout=file, stderr=subprocess.STDOUT
            )

    def run(self, *command: str | Path) -> tuple[int, str]:
        """Its exit code and what it prints."""
        log = self.folder / "command.log"
        code = self.start(*command, log=log).wait(timeout=500)
        return code, log.read_text()


def readme_commands() -> list[list[str]]:
    """The words of the three commands of the section "On a cluster"."""
    section = (ROOT / "README.md").read_text().partition("\n## On a cluster\n")[2].partition("\n## ")[0]
    lines = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    commands = [shlex.split(line) for line in lines.replace("\\\n", " ").splitlines()]
    assert [Path(word).name for words in commands for word in words if word.startswith("launch/")] == [
        "shard.py",
        "pretrain.py",
        "vtab.py",
    ], commands
    return commands


def copy_repository(folder: Path) -> Path:
    """What a user has, without tests."""
    for name in ("launch", "pipeline", "data_tools", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def write_ssh(home: Path, nodes: list[Host]) -> Path:
    """Write keys and the daemon's configuration; returns that of the client."""
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / name], check=True)
    (home / "sshd_config").write_text(
        f"HostKey {home}/host_key\nAuthorizedKeysFile {home}/key.pub\nStrictModes no\nPidFile none\nUsePAM no\n"
    )
    client = home / "ssh_config"
    client.write_text(
        f"User root\nIdentityFile {home}/key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        + "".join(f"Host {node.name}\n  HostName {node.address}\n" for node in nodes)
    )
    return client


def start_sshd(node: Host, home: Path) -> subprocess.Popen:
    return node.start("sh", "-ec", _SSHD, "sh", home / "sshd_config", stderr=subprocess.DEVNULL)


def ray_environment(home: Path) -> dict[str, str]:
    """Of a Ray cluster and of who talks to it; nothing of this machine's own Ray."""
    (home / "token").write_text("0123456789abcdef" * 4)
    return {
        "PATH": PATH,
        "HOME": str(home),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home / "token"),
        "RAY_JOB_STOP_WAIT_TIME_S": "30",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "eth0",
        # A dead node is given up after seconds.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
        # This machine's memory is used by others too, for whom Ray would kill workers here.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's 30 are too few on a busy machine.
        "RAY_raylet_start_wait_time_s": "300",
    }


def start_ray(host: Host, head: Host, environment: dict[str, str], log: Path) -> subprocess.Popen:
    """Start a Ray of one CPU on a host. See `wait_for_ray`."""
    if host is head:
        options = ["--head", "--port=6379", "--dashboard-host=0.0.0.0", "--no-monitor"]
    else:
        options = [f"--address={head.address}:6379"]
    command = ["ray", "start", "--block", f"--node-ip-address={host.address}", *options]
    command += ["--num-cpus=1", "--object-store-memory=100000000", "--include-log-monitor=false"]
    with open(log, "w") as file:
        return host.start(*command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def wait_for_ray(process: subprocess.Popen, log: Path) -> None:
    wait_for(lambda: "Ray runtime started" in log.read_text(), process, log)


def wait_for(condition: Callable[[], T], process: subprocess.Popen, log: Path, seconds: float = 300) -> T:
    """What a condition is when it holds; fails with the log when the process ends before that, or time is up."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert process.poll() is None, f"ended with {process.returncode}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"still waiting:\n{log.read_text()}"
        time.sleep(0.02)
    return result


def frozen_task(host: Host, function: str, unfinished: str = "") -> psutil.Process | None:
    """A worker of Ray, stopped in the middle of a task; None when there is none at the moment.

    function: of the task. unfinished: pattern of the name of a file that it must have open.
    """
    for process in host.processes(f"ray::{function}"):
        process.send_signal(signal.SIGSTOP)
        while process.status() != psutil.STATUS_STOPPED:
            pass
        if not unfinished:
            return process
        for file in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # Of one of its other threads.
                if re.search(unfinished, os.readlink(file)):
                    return process
        process.send_signal(signal.SIGCONT)
    return None
