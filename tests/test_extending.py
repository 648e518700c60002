"""The worked examples of docs/extending.md: their diffs apply to the code, and the checks below them pass."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = re.findall(r"```diff\n(.*?)```\n\n```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)


@pytest.mark.parametrize(("diff", "check"), EXAMPLES, ids=["augmentation", "layout"])
def test_worked_example(diff: str, check: str, tmp_path: Path) -> None:
    for name in ("pipeline", "data_tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    done = run(check, tmp_path, tmp_path / "with")
    assert done.returncode == 0, done.stderr
    # The check fails without the change, so it looks at what was added.
    without = run(check, ROOT, tmp_path / "without")
    assert re.search(r"grayscale|json_lines", without.stderr.splitlines()[-1]), without.stderr


def run(code: str, root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a new folder, with the packages of `root`."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


def test_there_are_two_examples() -> None:
    assert len(EXAMPLES) == 2
