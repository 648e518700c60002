"""Settings that are paths: `~` means the home folder in all of them, in every command, and is expanded in one place."""

import dataclasses
import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from pipeline.base.errors import UserError
from pipeline.checkpoint.store import checkpoint_folder
from pipeline.settings import run_execution, run_sections, schema
from pipeline.settings.commands import bench, data, operate, reports, study, transfer, weights
from pipeline.settings.run import RunConfig

ROOT = Path(__file__).parents[2]
MODULES = (bench, data, operate, reports, run_execution, run_sections, study, transfer, weights)
CLASSES = {
    c for module in MODULES for c in vars(module).values() if dataclasses.is_dataclass(c) and isinstance(c, type)
}
# How the help of a path begins, and what begins in the same way without being one.
PATH_WORDS = re.compile(
    r"(YAML |JSON |PNG )?files?\b|folders?\b|data sets?\b|weights:|images:|runs?, as|the run:|run (folders?|files?)|result folders|"
    r"an image file|deepspeed's hostfile|start from these weights|more data sets|write a slurm script|imagenet1k: labels",
    re.IGNORECASE,
)
RUN = ["name=try", "model.name=ViT-Ti/16", "data.path=here", "train.length=90 epochs"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("cls", sorted(CLASSES, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_every_setting_whose_help_names_a_file_or_folder_is_declared_a_path(cls: type) -> None:
    for field in dataclasses.fields(cls):
        if "rule" not in field.metadata:
            continue
        kind = typing.get_type_hints(cls)[field.name]
        if kind in (str, str | None, list[str]) and PATH_WORDS.match(field.metadata["doc"]):
            assert field.metadata["rule"].is_path or field.metadata["within"], f"{cls.__name__}.{field.name}"


def test_home_means_the_same_in_all_settings_of_a_run(home: Path) -> None:
    """`out=~/r` once sent the checkpoints to the home folder, and everything else to a folder `./~/r`."""
    paths = ["out=~/r", "data.path=~/d", "data.cache=~/c", "init.weights=~/w"]
    config = schema.load(RunConfig, None, [*RUN[:1], *RUN[2:], *paths])
    assert (config.out, config.data.path, config.data.cache) == (f"{home}/r", f"{home}/d", f"{home}/c")
    assert config.init.weights == f"{home}/w"
    assert checkpoint_folder(config) == home / "r" / "try" / "checkpoints"
    assert schema.load(RunConfig, None, [*RUN, "checkpoint.folder=~/k"]).checkpoint.folder == f"{home}/k"


def test_home_in_lists_and_files_of_settings(home: Path) -> None:
    compared = schema.load(reports.CompareConfig, None, ["runs=[~/a,b~c]"])
    assert compared.runs == [f"{home}/a", "b~c"]
    home.mkdir()
    (home / "run.yaml").write_text("{name: try, out: ~/r, data: {path: s3://b/~x}, train: {length: 1 steps}}")
    config = schema.load(RunConfig, "~/run.yaml", ["model.name=ViT-Ti/16"])
    assert (config.out, config.data.path) == (f"{home}/r", "s3://b/~x")


def test_names_and_text_keep_their_tilde() -> None:
    config = schema.load(RunConfig, None, ["name=~try", *RUN[1:], "track.experiment=~x"])
    assert (config.name, config.track.experiment) == ("~try", "~x")


def test_the_settings_of_an_earlier_run_are_read_with_the_same_meaning(home: Path) -> None:
    tree = json.loads(json.dumps(schema.to_dict(schema.load(RunConfig, None, RUN)))) | {"out": "~/r"}
    assert schema.build(RunConfig, tree, "config.json").out == f"{home}/r"


@pytest.mark.parametrize(
    "override", ["out=~nosuchuser/x", "data.path=~nosuchuser", "init.weights=~nosuchuser/x", "data.cache=~nosuchuser/"]
)
def test_the_home_of_nobody_is_refused(override: str) -> None:
    with pytest.raises(UserError, match=r"= ~nosuchuser\S* names the home folder of a user who does not exist here\."):
        schema.load(RunConfig, None, [*RUN, override])


def test_a_command_with_the_home_of_nobody_creates_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch" / "pretrain.py"), *RUN, "out=~nosuchuser/x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"^--config ~nosuchuser/x names the home folder"):
        schema.load(RunConfig, "~nosuchuser/x")
