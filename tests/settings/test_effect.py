"""Settings without effect: each is said, in one line, and no shipped file has one."""

import dataclasses
import typing
from pathlib import Path

import pytest
from ranks import ROOT
from settings_classes import CLASSES

from pipeline import objectives
from pipeline.architecture.objectives import OBJECTIVES
from pipeline.base.errors import UserError
from pipeline.settings import schema
from pipeline.settings.commands import data, study, transfer, weights
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import without_effect

RUNS = [
    path
    for path in sorted((ROOT / "configs").rglob("*.yaml"))
    if path.parent.name in ("continued", "demo", "finetune", "pretrain") or path.name.startswith("cifar10_")
]
WEIGHTS = ["model.name=null", "init.weights=runs/mae"]
RUN = ["name=try", "model.name=ViT-Ti/16", "data.path=here", "train.length=90 epochs", "train.loss=softmax"]


def test_what_a_setting_needs_is_a_setting_with_such_a_value() -> None:
    checked = 0
    for cls in {*CLASSES.values(), *(objectives.kind(loss).Settings for loss in OBJECTIVES)}:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            needs = field.metadata["needs"]
            of = hints | (
                typing.get_type_hints(hints[field.name]) if dataclasses.is_dataclass(hints[field.name]) else {}
            )
            if cls is transfer.ProtocolConfig:  # A section of this one.
                of |= typing.get_type_hints(transfer.VtabConfig)
            known = 0
            for name, _, values in (need.partition("=") for need in filter(None, needs.split("|"))):
                if name in of:
                    known += 1
                    (kind,) = typing.get_args(of[name]) if typing.get_origin(of[name]) is list else (of[name],)
                    accepted = set(filter(None, values.split(",")))
                    assert accepted <= {*typing.get_args(kind), *OBJECTIVES, *study.QUESTIONS}, (
                        f"{cls.__name__}.{field.name}"
                    )
            assert bool(known) == bool(needs), f"{cls.__name__}.{field.name}"
            checked += known
    assert checked > 40


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_shipped_run_has_a_setting_without_effect(path: Path) -> None:
    assert objectives.without_effect(schema.load(RunConfig, path)) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["probe.shots=[1,5]"], ["probe.shots", "probe.every"]),
        (["probe.every=5%", "probe.temperature=0.1"], ["probe.temperature", "probe.neighbours"]),
        (["data.weight=2"], ["data.weight", "data.mix"]),
        (["augment.crop=none", "augment.area_min=0.3"], ["augment.area_min", "augment.crop"]),
        (["schedule.decay=constant", "schedule.final=0.1"], ["schedule.final", "schedule.cooldown"]),
        (["schedule.decay=constant", "schedule.final=0.1", "schedule.cooldown=10%"], []),
        (
            ["train.loss=lejepa", "objective.local_views=0", "objective.local_size=64"],
            ["objective.local_size", "objective.local_views"],
        ),
    ],
)
def test_a_run_says_what_has_no_effect(given: list[str], said: list[str]) -> None:
    """An override may turn off what settings of the file belong to, so they are not refused."""
    lines = objectives.without_effect(schema.load(RunConfig, None, [*RUN, *given]))
    assert len(lines) == bool(said)
    assert all(name in lines[0] for name in said)


@pytest.mark.parametrize(
    ("cls", "given", "said"),
    [
        (RunConfig, [*RUN, "train.lora_alpha=8"], "train.lora_alpha = 8.0 has no effect without train.lora_rank. Set"),
        (weights.ExportConfig, ["weights=w", "format=huggingface_mae", "out=a", "head=false"], "writes MAE as it was"),
        (
            weights.ExplainConfig,
            ["weights=w", "draw=[filters,positions]", "layer=3"],
            "layer = 3 has no effect without draw = attention",
        ),
        (
            data.ShardConfig,
            ["source=s", "out=o", "layout=folder", "label_column=x"],
            "label_column = x has no effect without layout = parquet or list.",
        ),
    ],
)
def test_a_command_refuses_what_has_no_effect(cls: type, given: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        schema.load(cls, None, given)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["bit_hyperrule", "lightweight", "peft_224", "vit_paper"])
def test_a_protocol_may_have_a_setting_without_effect_and_a_shipped_one_has_none(name: str) -> None:
    """A sweep that began with one would not go on without it."""
    file = ROOT / f"configs/vtab/{name}.yaml"
    given = ["weights=w", "protocol.augment.randaugment_magnitude=3"]
    assert without_effect(schema.load(transfer.VtabConfig, file, given[:1])) == []
    assert without_effect(schema.load(transfer.VtabConfig, file, given)) == [
        "protocol.augment.randaugment_magnitude = 3.0 has no effect without protocol.augment.randaugment_layers"
    ]


def test_what_is_needed_makes_it_accepted() -> None:
    assert schema.load(weights.ExplainConfig, None, ["weights=w", "layer=3"]).draw == [], "which is all"
    assert (
        schema.load(weights.ScoreConfig, None, ["weights=w", "data=d", "mlflow=http://x", "experiment=e"]).experiment
        == "e"
    )


def test_a_sweep_says_which_settings_its_method_does_not_read() -> None:
    def said(*given: str) -> list[str]:
        file = ROOT / "configs/vtab/vit_paper.yaml"
        return without_effect(schema.load(transfer.VtabConfig, file, ["weights=w", *given]))

    # The evaluation view, eval_crop = resize with resize_filter = bilinear, is read by all methods.
    of_file = ["seeds", *(f"protocol.{name}" for name in ("augment.crop", "batch", "length", "lr", "clip"))]
    of_file += ["protocol.schedule.decay", "protocol.schedule.warmup"]
    assert [line.split()[0] for line in said("method=linear")] == of_file
    assert [line.split()[0] for line in said("protocol.l2=[1]")] == ["protocol.l2"]
    assert said("protocol.l2=[1]")[0].endswith("method = linear")
