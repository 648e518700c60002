"""Messages about a Ray cluster that cannot be reached, and about a node that dies."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import ray_tasks
from pipeline.errors import UserError

ROOT = Path(__file__).parents[2]


def test_an_address_where_nobody_listens_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin = time.monotonic()
    for address in (
        f"127.0.0.1:{port}",
        f"ray://127.0.0.1:{port}",
        f"[::1]:{port}",
        "127.0.0.1:99999",
        "no.such.host.invalid:1",
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserError, match=r"there is no Ray cluster .* unset RAY_ADDRESS to use this machine alone"):
            ray_tasks.connect()
    assert time.monotonic() - begin < 30


SCRIPT = """
import threading, time, psutil
from pipeline import ray_tasks
from pipeline.command import mistakes_in_one_line

def work(number):
    time.sleep(0.1)

def kill():
    time.sleep(3)
    children = psutil.Process().children(recursive=True)
    [child.kill() for child in children if child.cmdline()[:1] == ["ray::RuntimeEnvAgent"]]

with mistakes_in_one_line():
    ray_tasks.connect(1)
    threading.Thread(target=kill, daemon=True).start()
    list(ray_tasks.run_tasks(work, range(200), 2, print))
"""


@pytest.mark.slow
def test_a_node_agent_that_dies_is_one_line(own_ray: None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert "error: Ray's node agent on this machine died" in done.stderr
    assert "Run the same command again to continue." in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) <= 3  # Ray may have a line of its own.
