"""Whether there can be hosts."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from cluster import CPU_RANKS, PATH, TOOLS, Site, copy_repository, start_sshd, write_ssh
from ranks import ROOT, without_mlflow


@pytest.fixture(scope="session")
def can_have_hosts() -> None:
    """Skips where there can be no hosts; in CI, which sets REQUIRE_HOSTS, that is a failure."""
    if reason := hosts.why_not():
        (pytest.fail if os.environ.get("REQUIRE_HOSTS") else pytest.skip)(reason)


@pytest.fixture(scope="session")
def can_have_ssh() -> None:
    """Skips where the hosts could not be reached; in CI, that is a failure."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        reason = f"hosts need {', '.join(missing)} (Debian: openssh-server, pdsh)"
        (pytest.fail if os.environ.get("REQUIRE_HOSTS") else pytest.skip)(reason)


@pytest.fixture(scope="module")
def site(can_have_hosts: None, can_have_ssh: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("site")
    folder = copy_repository(home / "vit")
    with hosts.network(3, [home, ROOT, Path(sys.prefix)]) as nodes:
        client = write_ssh(home, nodes)
        environment = {
            "PATH": PATH,
            "HOME": str(home),
            "PDSH_SSH_ARGS_APPEND": f"-F {client}",
            "PDSH_RCMD_TYPE": "ssh",
            **CPU_RANKS,
            "PYTHONPATH": without_mlflow(home),
        }
        daemons = [start_sshd(node, home) for node in nodes]
        yield Site(nodes, folder, environment)
        for node, daemon in zip(nodes, daemons, strict=True):
            node.kill()
            daemon.wait()
