"""Whether there can be hosts."""

import os
import shutil

import hosts
import pytest
from cluster import TOOLS


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
