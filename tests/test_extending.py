"""The worked examples of docs/extending.md: their diffs apply to the code, and the checks below them pass."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import model as models

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = dict(
    zip(
        ("invert", "json_lines", "final_norm"),
        re.findall(r"```diff\n(.*?)```\n\n```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL),
        strict=True,
    )
)

# Runs every check in a folder of its own, in one process, and writes how each ended, if it failed.
EACH = """
import json, os, sys, traceback
from pathlib import Path

folder, failures = Path.cwd(), {}
for name, check in json.load(sys.stdin).items():
    os.chdir(folder / name)
    try:
        exec(compile(check, name, "exec"), {})
    except Exception:
        failures[name] = traceback.format_exc()
(folder / "failures.json").write_text(json.dumps(failures))
"""

PUBLISHED_PROTOCOL = f"""
from pipeline.settings import schema
from pipeline.settings.schema import facts_of
from pipeline.settings.commands.transfer import VtabConfig

def settings(*given):
    protocol = schema.load(VtabConfig, {str(ROOT / "configs/vtab/peft_224.yaml")!r}, ["weights=any", *given]).protocol
    return schema.flatten({{"protocol": schema.to_dict(protocol)}})

before = settings()
del before["protocol.augment.invert"]
known = facts_of(VtabConfig)
assert not schema.differences(before, settings(), known, "comparison")
assert schema.differences(before, settings("protocol.augment.invert=0.5"), known, "comparison")
"""

WITH_NEW_FIELD = """
from pathlib import Path

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.model.convert.layouts import as_plain
from pipeline.model.files import open_safetensors
from pipeline.settings import schema
from pipeline.settings.command import fields_help
from pipeline.settings.run import RunConfig

def refused(function, *arguments):
    try:
        function(*arguments)
    except UserError as error:
        return str(error)

# Weights that were saved without the field are read, and described by the same bytes.
# (safetensors itself shuffles its metadata.)
models.save(models.load("before.safetensors"), "after.safetensors")
before, after = (open_safetensors(Path(f"{name}.safetensors"))[1] for name in ("before", "after"))
assert before == after and before.keys() == {"vit-weights"}

# What cannot have it refuses it, and weights determine it.
overrides = ["name=try", "data.path=here", "train.length=1 epochs", "model.final_norm=false", "init.weights=w"]
assert "leave out model.final_norm" in refused(schema.load, RunConfig, None, overrides)
assert "model.final_norm = 5" in refused(schema.load, RunConfig, None, ["model.final_norm=5"])
assert "Set model.final_norm=true" in refused(lambda: models.configure("BiT-R50x1", final_norm=False))
without = models.create("ViT-mu/8", 8, 4, final_norm=False)
assert "cannot hold final_norm = False" in refused(as_plain, without, "timm", ("token",))

# --help
shown = fields_help(RunConfig)
assert "model.final_norm  (true|false; default true; another value is another run)\\n" in shown
assert "Normalise the tokens after the last block." in shown
"""


@pytest.mark.slow
def test_the_checks_of_the_worked_examples_pass_and_what_was_made_before_stays(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """With a copy of the code that all diffs were applied to. A sweep that began before a setting existed goes on with
    its default; older weights are read and written alike.
    """
    code, work = (tmp_path_factory.mktemp(name) for name in ("code", "work"))
    for name in ("pipeline", "data_tools", "launch"):
        # With the compiled files, which stay valid; not with those that another test's process is writing: they get
        # another name.
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    for diff, _ in EXAMPLES.values():
        subprocess.run(["git", "apply", "-"], cwd=code, input=diff, text=True, check=True)
    checks = {name: check for name, (_, check) in EXAMPLES.items()}
    checks |= {"published protocol": PUBLISHED_PROTOCOL, "earlier files": WITH_NEW_FIELD}
    for name in checks:
        (work / name).mkdir()
    models.save(models.create("ViT-mu/8", 8, 4, dropout=0.1), work / "earlier files/before.safetensors")
    environment = {**os.environ, "PYTHONPATH": str(code)}
    subprocess.run(
        [sys.executable, "-c", EACH], cwd=work, env=environment, input=json.dumps(checks), text=True, check=True
    )
    failures = json.loads((work / "failures.json").read_text())
    assert not failures, "\n".join(failures.values())


def test_an_augmentation_is_a_setting_and_its_code() -> None:
    changed = re.findall(r"^\+\+\+ b/(.*)", EXAMPLES["invert"][0], re.MULTILINE)
    assert sorted(changed) == ["pipeline/data/loading/distort.py", "pipeline/settings/run.py"]
