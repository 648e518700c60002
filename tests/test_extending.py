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


def test_an_augmentation_is_a_setting_and_its_code_and_older_sweeps_are_continued(tmp_path: Path) -> None:
    """In two files. The digest of a published protocol, which outcomes of earlier sweeps carry, stays."""
    diff = EXAMPLES[0][0]
    changed = re.findall(r"^\+\+\+ b/(.*)", diff, re.MULTILINE)
    assert sorted(changed) == ["pipeline/data/loading/distort.py", "pipeline/settings/run_sections.py"]
    shutil.copytree(ROOT / "pipeline", tmp_path / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    code = f"""
from pipeline.settings import schema
from pipeline.settings.transfer import VtabConfig
from pipeline.transfer.sweep import protocol_sha256
for given in ([], ["protocol.augment.grayscale=0.5"]):
    config = schema.load(VtabConfig, {str(ROOT / "configs/vtab/peft_224.yaml")!r}, ["weights=any", *given])
    print(protocol_sha256(config.protocol)[:16])
"""
    done = run(code, tmp_path, tmp_path / "folder")
    assert done.returncode == 0, done.stderr
    published, changed_one = done.stdout.split()
    assert published == "0549e0750c139c4b" != changed_one


def run(code: str, root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a new folder, with the packages of `root`."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


def test_there_are_two_examples() -> None:
    assert len(EXAMPLES) == 2
