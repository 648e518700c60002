"""Hosts on this machine: each has processes, a network, a host name, a /tmp and a /dev/shm of its own.

They are Linux namespaces without names, joined by veth pairs to a bridge that lies in a namespace too. So any number of
such networks can stand side by side, nothing outside of them changes, and there is nothing to clean up: when a host's
first process ends, the kernel kills the others, unmounts, and takes the network away. That process ends with the `with`
block, and with this process however it dies, since it waits for the end of a pipe that only this process holds.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_UNSHARE = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
# $@: folders that stay visible under the new /tmp. The first process adopts what others leave behind; with SIGCHLD
# ignored, the kernel buries it.
_FIRST_PROCESS = """
set -e
mount -t tmpfs tmpfs /mnt
for folder in "$@"; do mkdir -p "/mnt$folder"; mount --bind "$folder" "/mnt$folder"; done
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
for folder in "$@"; do mkdir -p "$folder"; mount --move "/mnt$folder" "$folder"; done
umount /mnt
echo up
exec env --ignore-signal=CHLD cat
"""


class Host:
    """One host. name: its host name. address: its IP address in the network of all; number: its last part."""

    def __init__(self, name: str, number: int, visible: Sequence[Path], switch: "Host | None" = None) -> None:
        self.name, self.address, self.number = name, f"10.77.0.{number}", number
        self._visible, self._switch = visible, switch
        self.boot()

    def boot(self) -> None:
        """Start it, with an empty /tmp; after `kill`, the same host again. Raises OSError."""
        script = f"hostname {self.name}\n{_FIRST_PROCESS}"
        self._holder = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", script, "sh", *map(str, self._visible)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._holder.stdout.readline() != "up\n":
            self._holder.kill()
            raise OSError(f"{self.name} did not start: {self._holder.communicate()[1].strip()}")
        (first,) = psutil.Process(self._holder.pid).children()
        self.pid = first.pid
        if self._switch:
            # From outside, where the hosts' process ids mean something. The kernel names the bridge's end, since it
            # takes away that of a dead host a moment after its death. The same MAC address, because the other hosts
            # remember it.
            mac = f"02:00:00:00:00:{self.number:02x}"
            cable = f"link add master bridge up type veth peer name eth0 address {mac} netns {self.pid}"
            _ip(self._switch, [cable])
            _ip(self, ["link set lo up", f"address add {self.address}/24 dev eth0", "link set eth0 up"])

    def start(
        self, *command: str | Path, cwd: Path = Path("/"), env: dict[str, str] | None = None, **options: object
    ) -> subprocess.Popen:
        """Start a command there. env: in place of this process's. options: of Popen.

        A signal to what is returned reaches the way into the host, not the command: see `processes` and `kill`.
        """
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--pid", "--mount", "env", f"--chdir={cwd}"]
        return subprocess.Popen([*enter, *map(str, command)], env=env, **options)  # type: ignore[call-overload]

    def run(
        self, *command: str | Path, timeout: float = 300, cwd: Path = Path("/"), env: dict[str, str] | None = None
    ) -> str:
        """Run a command there; what it prints. Raises CalledProcessError (with the output) when it fails."""
        process = self.start(*command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with process:
            try:
                output = process.communicate(timeout=timeout)[0]
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(command), output)
        return output

    def processes(self, title: str = "") -> list[psutil.Process]:
        """What runs there, its first process aside; title: whose command line begins so."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                inside = os.readlink(f"/proc/{process.pid}/ns/pid") == os.readlink(f"/proc/{self.pid}/ns/pid")
                if inside and process.pid != self.pid and " ".join(process.cmdline()).startswith(title):
                    found.append(process)
        return found

    def kill(self) -> None:
        """As if the power failed: SIGKILL to every process, and no word to the other hosts. Returns when all is
        gone.
        """
        if self._holder.poll() is None:
            # The kernel lets it end after all others; then its parent, the holder, ends.
            os.kill(self.pid, signal.SIGKILL)
        self._holder.communicate()


@contextlib.contextmanager
def network(size: int, visible: Sequence[Path]) -> Iterator[list[Host]]:
    """Hosts node1, node2, ... (10.77.0.1, ...) that reach each other, and nothing else.

    visible: folders that all of them and this machine share, even if they lie in /tmp. Raises OSError.
    """
    # Where a path leads, too: .venv may be a link.
    folders = {path for folder in visible for path in (folder.absolute(), folder.resolve())}
    hidden = [f for f in folders if f.parts[:2] == ("/", "tmp") and not folders.intersection(f.parents)]
    with contextlib.ExitStack() as stack:

        def start(name: str, number: int, switch: Host | None = None) -> Host:
            host = Host(name, number, hidden, switch)
            stack.callback(host.kill)
            return host

        switch = start("switch", 254)
        _ip(switch, ["link add bridge type bridge", "link set bridge up"])
        yield [start(f"node{number}", number, switch) for number in range(1, size + 1)]


def why_not() -> str:
    """Why there can be no hosts here; empty when there can."""
    if missing := [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]:
        return f"hosts need {', '.join(missing)} (Debian: iproute2, util-linux)"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True)
    return f"hosts need root and its capabilities: {tried.stderr.strip()}" if tried.returncode else ""


def _ip(host: Host, commands: Sequence[str]) -> None:
    subprocess.run(
        ["nsenter", f"--target={host.pid}", "--net", "ip", "-batch", "-"],
        input="\n".join(commands),
        text=True,
        check=True,
    )
