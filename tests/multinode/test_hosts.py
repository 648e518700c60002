"""Hosts are apart where machines are, and leave nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import hosts
import psutil
import pytest
from polling import until

ROOT = Path(__file__).resolve().parents[2]
_OWNER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import hosts
with hosts.network(2, []) as nodes:
    nodes[0].start("sleep", "600")
    while not (sleeping := nodes[0].processes("sleep")):
        pass
    print(nodes[0].pid, nodes[1].pid, sleeping[0].pid, flush=True)
    time.sleep(600)
"""


def this_machine(visible: list[Path]) -> tuple[object, ...]:
    """Names of its network devices; what is mounted at the very places where hosts mount (other tests mount below them); its host name."""
    folders = [path.resolve() for path in visible]
    places = {Path("/mnt"), Path("/tmp"), Path("/dev/shm"), *folders, *(Path(f"/mnt{folder}") for folder in folders)}
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    found = sorted(point for point in mounts if Path(point) in places)
    return sorted(os.listdir("/sys/class/net")), found, os.uname().nodename


def test_hosts_share_a_network_and_a_folder_only(can_have_hosts: None, tmp_path: Path) -> None:
    visible = [tmp_path, Path(sys.prefix)]  # A clone in /tmp has its Python there.
    before = this_machine(visible)
    # The same names and addresses twice, at the same time.
    with hosts.network(1, visible) as (other,), hosts.network(2, visible) as (one, two):
        assert this_machine(visible) == before
        serve = (
            "import socket; s = socket.create_server(('', 7000)); open('up', 'w'); s.accept()[0].sendall(b'from two')"
        )
        ask = "import socket; print(socket.create_connection(('10.77.0.2', 7000), timeout=2).recv(99).decode())"
        server = two.start(sys.executable, "-c", serve, cwd=tmp_path)
        until(lambda: (tmp_path / "up").exists() or server.poll() is not None)
        with pytest.raises(subprocess.CalledProcessError, match="non-zero"):
            other.run(sys.executable, "-c", ask)
        assert one.run(sys.executable, "-c", ask.replace("timeout=2", "timeout=200")) == "from two\n"
        assert server.wait(timeout=300) == 0

        assert [host.run("hostname") for host in (other, one, two)] == ["node1\n", "node1\n", "node2\n"]
        one.run("touch", "/tmp/of_one", "/dev/shm/of_one", tmp_path / "of_all")
        assert not [folder for folder in ("/tmp", "/dev/shm") if "of_one" in os.listdir(folder)]
        assert two.run("find", "/tmp", "/dev/shm", "-name", "of_*") == f"{tmp_path}/of_all\n"
        sleeper = one.start("sleep", "600")
        # An orphan, and of a session of its own.
        one.run("sh", "-c", "setsid sleep 601 > /dev/null 2>&1 &")
        assert two.run("ps", "-e").count("sleep") == 0
        until(lambda: len(one.processes("sleep")) == 2)
        one.kill()
        assert sleeper.wait(timeout=300) == -signal.SIGKILL
        assert not one.processes()
        assert two.run("echo", "fine") == "fine\n"
        one.boot()
        assert one.run("ls", "/tmp").split() == sorted(
            {folder.parts[2] for folder in visible if folder.parts[1] == "tmp"}
        )
        with pytest.raises(subprocess.CalledProcessError, match="non-zero") as refused:
            two.run(sys.executable, "-c", ask.replace("0.2", "0.1").replace("timeout=2", "timeout=200"))
        assert "refused" in refused.value.output
    assert this_machine(visible) == before


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_hosts_end_with_the_process_that_made_them(can_have_hosts: None, ending: signal.Signals) -> None:
    command = [sys.executable, "-c", _OWNER, str(ROOT / "tests/helpers")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(processes) == 3
        owner.send_signal(ending)
    _, alive = psutil.wait_procs(processes, timeout=300)
    assert not alive
