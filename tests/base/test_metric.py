"""What metrics are: declared by a run, else known from earlier versions."""

import pytest

from pipeline import objectives
from pipeline.architecture.objectives import OBJECTIVES
from pipeline.base.metric import GROUPS, UNITS, Metric, metric_of, score_of
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

RUN = [
    "name=x",
    "data.path=d",
    "model.name=ViT-Ti/16",
    "train.length=1 steps",
    "probe.every=1 steps",
    "probe.neighbours=20",
]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_a_run_measures_is_declared_as_its_name_was_read_before(objective: str) -> None:
    config = schema.load(RunConfig, None, [*RUN, f"train.loss={objective}"])
    declared = {name: metric for of in objectives.metrics(config).values() for name, metric in of.items()}
    assert {"val_5shot", "val_5shot_std", "val_20nn"} <= declared.keys()
    of_split = objectives.kind(objective).metrics(config)
    assert {f"val_{name}" for name in ({"num_samples", *of_split} if of_split else ())} <= declared.keys()
    for name, metric in declared.items():
        assert metric == metric_of(name), name
        assert metric.unit in UNITS
        assert metric.group in GROUPS


@pytest.mark.parametrize(
    ("objective", "score"),
    [
        ("softmax", "val_top1"),
        ("regression", "val_r2"),
        ("masked_mean_color", "val_color_accuracy"),
        ("mae", "val_20nn"),
        ("lejepa", "val_20nn"),
        ("distill", "val_20nn"),
        ("distill_classes", "val_top1"),
    ],
)
def test_the_score_of_a_run_is_an_accuracy_if_it_measures_one(objective: str, score: str) -> None:
    config = schema.load(RunConfig, None, [*RUN, f"train.loss={objective}"])
    declared = {name: metric for of in objectives.metrics(config).values() for name, metric in of.items()}
    assert score_of(declared) == score
    few_shot = {name: metric for name, metric in declared.items() if name != "val_20nn"}
    assert score_of(few_shot) == score.replace("20nn", "5shot")
    assert score_of({name: metric for name, metric in declared.items() if metric.unit == "loss"}) in ("val_loss", "")
    assert score_of({"sigreg": Metric("loss", "lower", "train")}) == ""
    probes = [f"{data}_{kind}" for data in ("own", "old") for kind in ("5shot", "20nn")]
    assert score_of({name: metric_of(name) for name in probes}) == "own_20nn", "of several data sets, the first counts"


def test_effective_images_are_no_score_of_a_probe() -> None:
    for name in ("val_top1", "pets_5shot", "pets_5shot_l2_0.1", "pets_20nn"):
        assert metric_of(f"{name}_effective_images") == Metric("count", "", "eval")


def test_a_declaration_comes_before_the_name() -> None:
    declared = {"val_loss": Metric("share", "higher", "eval"), "val_rank": Metric("count", "higher", "eval")}
    assert metric_of("val_loss", declared).is_share
    assert metric_of("train_rank", declared) == Metric()
