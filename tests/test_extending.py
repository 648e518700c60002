"""The worked examples of docs/extending.md: their diffs apply to the code, and the checks below them pass."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = dict(
    zip(
        ("invert", "json_lines", "simclr", "final_norm"),
        re.findall(r"```diff\n(.*?)```\n\n```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL),
        strict=True,
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_example(name: str, tmp_path: Path) -> None:
    diff, check = EXAMPLES[name]
    changed(tmp_path, diff)
    done = run(check, tmp_path, tmp_path / "with")
    assert done.returncode == 0, done.stderr
    # The check fails without the change, so it looks at what was added.
    without = run(check, ROOT, tmp_path / "without")
    assert name in without.stderr.splitlines()[-1], without.stderr


def changed(folder: Path, diff: str) -> None:
    """Copy the code to a folder, and apply a diff to it."""
    for name in ("pipeline", "data_tools", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, text=True, check=True)


def test_an_augmentation_is_a_setting_and_its_code_and_older_sweeps_are_continued(tmp_path: Path) -> None:
    """In two files. The digest of a published protocol, which outcomes of earlier sweeps carry, stays."""
    diff = EXAMPLES["invert"][0]
    changed = re.findall(r"^\+\+\+ b/(.*)", diff, re.MULTILINE)
    assert sorted(changed) == ["pipeline/data/loading/distort.py", "pipeline/settings/run_sections.py"]
    shutil.copytree(ROOT / "pipeline", tmp_path / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    code = f"""
from pipeline.settings import schema
from pipeline.settings.commands.transfer import VtabConfig
from pipeline.transfer.sweep import protocol_sha256
for given in ([], ["protocol.augment.invert=0.5"]):
    config = schema.load(VtabConfig, {str(ROOT / "configs/vtab/peft_224.yaml")!r}, ["weights=any", *given])
    print(protocol_sha256(config.protocol)[:16])
"""
    done = run(code, tmp_path, tmp_path / "folder")
    assert done.returncode == 0, done.stderr
    published, changed_one = done.stdout.split()
    assert published == "0549e0750c139c4b" != changed_one


def run(code: str, root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, with the packages of `root`."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


WITH_NEW_FIELD = """
import json
from pathlib import Path

import torch

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.model.convert.plain import as_plain
from pipeline.model.files import open_safetensors
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.settings import changes
from pipeline.settings.run import RunConfig

def refused(function, *arguments):
    try:
        function(*arguments)
    except UserError as error:
        return str(error)

# A run folder and a checkpoint that an earlier version made.
folder = Path("runs/old")
checkpoint = folder / "checkpoints/step-00000003"
assert schema.build(RunConfig, json.loads((folder / "config.json").read_text()), "config.json").model.final_norm is True
saved = json.loads((checkpoint / "state.json").read_text())
assert "final_norm" not in saved["model"] and models.config_from_dict(saved["model"]).final_norm is True
assert "model.final_norm" not in saved["identity"] and changes.defaults(RunConfig)["model.final_norm"] is True
assert models.load(folder)(torch.zeros(1, 3, 8, 8)).isfinite().all()

# Weights that were saved without the field are read, and described by the same bytes. (safetensors itself shuffles its metadata.)
models.save_safetensors(models.load("before.safetensors"), "after.safetensors")
before, after = (open_safetensors(Path(f"{name}.safetensors"))[1] for name in ("before", "after"))
assert before == after and before.keys() == {"format", "vit-weights"}

# What cannot have it refuses it, and weights determine it.
overrides = ["name=try", "data.path=here", "train.length=1 epochs", "model.final_norm=false", "init.weights=w"]
assert "leave out model.final_norm" in refused(schema.load, RunConfig, None, overrides)
assert "must be true or false" in refused(schema.load, RunConfig, None, ["model.final_norm=5"])
assert "Set model.final_norm=true" in refused(lambda: models.configure("BiT-R50x1", final_norm=False))
without = models.create("ViT-mu/8", 8, 4, final_norm=False)
assert "cannot hold final_norm = False" in refused(as_plain, without, "timm", ("token",), True, True)
"""


def test_a_new_field_of_the_model_leaves_what_was_made_before_as_it_was(tmp_path: Path) -> None:
    changed(tmp_path, EXAMPLES["final_norm"][0])
    folder = tmp_path / "work"
    before = (
        "from pipeline.model import *; save_safetensors(create('ViT-mu/8', 8, 4, dropout=0.1), 'before.safetensors')"
    )
    assert run(before, ROOT, folder).returncode == 0
    with tarfile.open(ROOT / "tests/old_versions/made_2026-11-22.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    done = run(WITH_NEW_FIELD, tmp_path, folder)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, tmp_path / "launch/pretrain.py", "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (
        "model.final_norm  (true|false; default true; another value is another run)\n      Normalise the tokens after the last block."
        in help_text
    )
