"""Settings that are paths: `~` means the home folder in all of them, in every command, and is expanded in one place."""

import dataclasses
import re
import typing
from pathlib import Path

import pytest
from settings_classes import CLASSES

from pipeline.checkpoint.store import checkpoint_folder
from pipeline.settings import schema
from pipeline.settings.commands import reports
from pipeline.settings.quantities import PathText
from pipeline.settings.run import RunConfig

# How the help of a path begins, and what begins in the same way without being one.
PATH_WORDS = re.compile(
    r"(YAML |JSON |PNG )?files?\b|folders?\b|data sets?\b|weights:|images:|runs?, as|the run:|run"
    r" (folders?|files?)|result folders|"
    r"an image file|start from these weights|more data sets|imagenet1k:"
    r" labels",
    re.IGNORECASE,
)
RUN = ["name=try", "model.name=ViT-Ti/16", "data.path=here", "train.length=90 epochs"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("cls", CLASSES.values())
def test_every_setting_whose_help_names_a_file_or_folder_is_declared_a_path(cls: type) -> None:
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind, is_path = hints[field.name], {PathText} & {hints[field.name], *typing.get_args(hints[field.name])}
        named = str in (kind, *typing.get_args(kind)) and PATH_WORDS.match(field.metadata["description"])
        is_output = field.metadata["output"] and not field.metadata["within"]
        assert is_path or not (named or is_output) or field.metadata["within"], f"{cls.__name__}.{field.name}"


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
