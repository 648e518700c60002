"""Tests of what differs on a GPU. Without one they run on the CPU as far as they can, so that they are known to
work.
"""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(f"{HERE}{os.sep}"):  # Every test comes by; `parents` takes ten times as long.
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def gpu() -> torch.device:
    """The GPU; skips without one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: make gpu")
    return torch.device("cuda")
