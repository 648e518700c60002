"""What a changed setting means for what was made with it."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.settings import schema
from pipeline.settings.commands.transfer import ProtocolConfig
from pipeline.settings.quantities import Length
from pipeline.settings.run import DataConfig, RunConfig, TrainConfig
from pipeline.settings.schema import Fact, decisive, differences, facts_of, setting

FACTS = facts_of(RunConfig)


def test_a_new_setting_changes_the_result_unless_it_or_its_section_says_otherwise() -> None:
    class Section(schema.Settings):
        own: int = setting(1, on_change="run")
        of_section: int = setting(2)

    class All(schema.Settings):
        silent: int = setting(0)
        section: Section = setting(Section, on_change="nothing")
        plain: Section = setting(Section)

    assert {name: fact.on_change for name, fact in facts_of(All).items()} == {
        "silent": "result",
        "section.own": "run",
        "section.of_section": "nothing",
        "plain.own": "run",
        "plain.of_section": "result",
    }


def test_defaults_are_those_of_a_config_that_sets_nothing() -> None:
    config = RunConfig(name="a", data=DataConfig(path="b"), train=TrainConfig(length=Length.parse("1 steps")))
    flat = schema.flatten(schema.to_dict(config))
    required = {
        "name": None,
        "data.path": None,
        "train.length": None,
        "objective": None,
    }  # A mapping's entries have names.
    assert schema.defaults(RunConfig) == flat | required
    assert schema.defaults(ProtocolConfig)["augment.randaugment_contrast"] == "mean"


def of(then: dict[str, Any], now: dict[str, Any], known: dict[str, Fact], **least: Any) -> list[str]:
    return [str(change) for change in differences(then, now, known, **least)]


def test_what_did_not_exist_counts_as_its_default_and_what_no_longer_exists_as_nothing() -> None:
    known = {"rate": Fact(0.1, "run"), "threads": Fact(2, "nothing"), "left_out": Fact(0, "nothing")}
    assert of({}, {"rate": 0.1, "threads": 2}, known) == []
    assert of({}, {"rate": 0.2, "threads": 4}, known) == ["rate was 0.1, is 0.2", "threads was 2, is 4"]
    assert of({}, {"rate": 0.2, "threads": 4}, known, least="comparison") == ["rate was 0.1, is 0.2"]
    assert of({"uri": "http://a"}, {"uri": ""}, {"uri": Fact("", "nothing")}) == ["uri was http://a, is empty"]
    assert of({"rate": 0.2}, {}, known) == ["rate was 0.2, is 0.1"], "left out now"
    assert of({"gone": 1}, {}, known) == []
    assert of({}, {"new": 1}, known, least="result") == ["new was None, is 1"], "nothing describes it"
    assert decisive({"rate": 1, "threads": 1, "left_out.a": 1, "new": 1}, known, "result") == {"rate": 1, "new": 1}


def test_the_entries_of_a_mapping_are_what_the_mapping_is() -> None:
    known = {"left_out": Fact(0, "nothing"), "objective": Fact(None, "run"), "objective.colour": Fact(1, "nothing")}
    now = {"left_out.val.blurred": 3, "objective.width": 8, "objective.colour": 1}
    assert of({"left_out.train.small": 2}, now, known) == [
        "left_out.val.blurred was 0, is 3",
        "objective.width was None, is 8",
        "left_out.train.small was 2, is 0",
    ]
    assert of({"objective.a.b": 1}, now, known, least="run") == [
        "objective.width was None, is 8",
        "objective.a.b was 1, is None",
    ]


@pytest.mark.parametrize(("then", "now"), [(224, "224"), (1, 1.0), ([0.5], [0.5]), ("None", None)])
def test_values_are_the_same_if_their_text_is(then: object, now: object) -> None:
    assert of({"x": then}, {"x": now}, {}) == []
    assert of({"x": then}, {"x": "other"}, {}) == [f"x was {then}, is other"]


def test_the_documentation_lists_what_each_setting_means() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/running.md").read_text()
    for on_change in ("run", "comparison", "nothing"):
        assert f"\n| {listed(on_change)} | " in text, listed(on_change)


def listed(on_change: str) -> str:
    """The settings of a meaning, as a table of docs/running.md names them: sections, of which all settings have it, by
    `section.*`.
    """
    sections: dict[str, list[str]] = {}
    for name in FACTS:
        sections.setdefault(name.partition(".")[0] if "." in name else name, []).append(name)
    names = []
    for section, inside in sections.items():
        having = [name for name in inside if FACTS[name].on_change == on_change]
        names += [f"{section}.*"] if having == inside and inside != [section] else having
    return ", ".join(f"`{name}`" for name in names)
