"""What is proposed for settings that other tools, or other commands, call otherwise."""

import json
from collections import Counter
from pathlib import Path

import pytest

from pipeline.base.errors import UserError
from pipeline.settings import schema
from pipeline.settings.commands import bench, data, operate, reports, segment, study, transfer, weights
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import Settings
from pipeline.settings.yaml_reader import read_table

MODULES = (bench, data, operate, reports, segment, study, transfer, weights)
COMMANDS = {RunConfig} | {
    cls
    for module in MODULES
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, Settings) and cls.__module__ == module.__name__
}


@pytest.mark.parametrize(
    ("cls", "given", "meant"),
    [
        (RunConfig, "optimizer.learning-rate=1", " mean optimizer.lr?"),
        (RunConfig, "lr=1", " mean optimizer.lr?"),
        (RunConfig, "train.batch_size=8", " mean train.global_batch?"),
        (RunConfig, "epochs=3", " mean train.length?"),
        (RunConfig, "num_workers=4", " mean data.threads?"),
        (RunConfig, "weights=runs/a", " mean init.weights?"),
        (RunConfig, "source=photos", " mean data.path?"),
        (data.ShardConfig, "images=photos", " mean source?"),
        (weights.ScoreConfig, "source=photos", " mean data?"),
        (weights.PredictConfig, "images=photos", " mean source or data?"),
    ],
)
def test_a_word_of_other_tools_or_commands_is_answered_with_the_setting(cls: type, given: str, meant: str) -> None:
    with pytest.raises(UserError) as error:
        schema.load(cls, None, [given])
    assert meant in str(error.value)


def test_the_table_has_settings_that_exist_and_words_that_do_not_contradict_them() -> None:
    known = {name for cls in COMMANDS for name, *_ in schema.leaves(cls)}
    table = read_table(str(Path(schema.__file__).with_name("synonyms")), dict[str, str])
    assert not {name for row in table for name in row.split()} - known
    words = Counter(word for row in table.values() for word in row.split())
    assert {word for word, count in words.items() if count > 1} == {"model"}  # A name of one, or its weights.
    assert all(word == word.lower() and "-" not in word for word in words)


def test_a_data_set_and_image_files_have_a_setting_each(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset.json").write_text(json.dumps({}))
    needs = ["weights=w"]
    with pytest.raises(UserError, match=rf"source = {tmp_path / 'set'} .*data={tmp_path / 'set'}"):
        schema.load(weights.PredictConfig, None, [*needs, f"source=[photos,{tmp_path / 'set'}]"])
    with pytest.raises(UserError, match="data=s3://b/set"):
        schema.load(weights.PredictConfig, None, [*needs, "source=s3://b/set"])
    with pytest.raises(UserError, match=r"source.* data"):
        schema.load(weights.PredictConfig, None, [*needs, "source=a", "data=b"])
    with pytest.raises(UserError, match="split = test has no effect without data"):
        schema.load(weights.PredictConfig, None, [*needs, "source=a", "split=test"])
    assert schema.load(weights.PredictConfig, None, [*needs, "source=[a,b]"]).images == ["a", "b"]
    assert schema.load(weights.PredictConfig, None, [*needs, "data=a", "split=test"]).images == ["a"]
    assert not schema.load(weights.ExplainConfig, None, needs).images
