"""A real small file system; needs root to mount it."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Call with its size: its folder."""
    folder = tmp_path / "small"
    folder.mkdir()

    def mount(size: str) -> Path:
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
        ).returncode:
            pytest.skip("mounting a file system needs root")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)
