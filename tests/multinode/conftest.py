"""Two hosts, where there can be such."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def can_have_hosts() -> None:
    """Skips where there can be no hosts; in CI, which sets REQUIRE_HOSTS, that is a failure."""
    if reason := hosts.why_not():
        (pytest.fail if os.environ.get("REQUIRE_HOSTS") else pytest.skip)(reason)


@pytest.fixture
def two_hosts(can_have_hosts: None, tmp_path: Path) -> Iterator[list[hosts.Host]]:
    """node1 and node2, which share tmp_path, this repository, and what else lies outside of /tmp and /dev/shm."""
    with hosts.network(2, [tmp_path, ROOT]) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def can_have_ssh() -> None:
    """Skips where the hosts could not be reached; in CI, that is a failure."""
    if missing := [tool for tool in ("/usr/sbin/sshd", "pdsh", "ssh-keygen") if shutil.which(tool) is None]:
        reason = f"hosts need {', '.join(missing)} (Debian: openssh-server, pdsh)"
        (pytest.fail if os.environ.get("REQUIRE_HOSTS") else pytest.skip)(reason)
