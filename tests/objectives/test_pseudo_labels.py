"""Pseudo-labels against their formula, what the teacher sees, which labels are read, and a run on images with and
without labels.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forge
from ranks import metrics, settings
from safetensors.numpy import load_file
from tiny import make_dataset
from torch import Tensor

from pipeline import objectives
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.mix import Mixing
from pipeline.data.mixture.run_data import open_run_data
from pipeline.data.mixture.split import MixedSplit, mixed_until, mixture_facts
from pipeline.model import build
from pipeline.objectives.pseudo_labels import PseudoLabels
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.train.shown_facts import datasets_of

NONE = -1
# Readable images with a label, without one, the last without one and unreadable.
LABELS, VALID = (2, 0, NONE, NONE, NONE, NONE, NONE, NONE), (True,) * 7 + (False,)


def given(data: Path, *more: str) -> list[str]:
    return settings(data, data.parent, "run", "train.loss=pseudo_labels", "model.representation=false", *more)


def create(*more: str) -> PseudoLabels:
    config = schema.load(RunConfig, None, given(Path("d"), *more))
    found = objectives.create(config, build(objectives.new_backbone(config, 4)))
    for number, model in enumerate((found.backbone, found.teacher["backbone"])):  # New heads are zero.
        torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(number))
    return found.train()


def batch() -> Batch:
    views = np.random.default_rng(0).integers(0, 256, (2, 1, len(LABELS), 16, 16, 3), np.uint8)
    rows = np.arange(len(LABELS))
    return Batch(
        tuple(map(torch.from_numpy, views)), torch.tensor(LABELS)[:, None], torch.tensor(VALID), rows, rows * 0
    )


def losses(objective: PseudoLabels, mixing: Mixing | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    return objective(*objective.inputs(batch(), torch.device("cpu"), mixing))


def expected(objective: PseudoLabels, own: float, threshold: float, smoothing: float) -> tuple[list[float], int]:
    """(losses of pairs that are mixed by `own` where both are readable and have a label, the number of pseudo-labels),
    image by image.
    """
    strong, weak = (view[0].permute(0, 3, 1, 2) / 127.5 - 1 for view in batch().views)
    with torch.no_grad():
        sure = objective.teacher["backbone"](weak).softmax(1).tolist()
    learned = []
    for label, valid, of_teacher in zip(LABELS, VALID, sure, strict=True):
        guess = of_teacher.index(max(of_teacher)) if max(of_teacher) >= threshold and valid else NONE
        learned.append(guess if label == NONE else label)
    found = [0.0] * len(LABELS)
    for image in range(len(LABELS)):
        partner = image ^ 1
        known = NONE not in (learned[image], learned[partner])
        weight = own if known and VALID[image] and VALID[partner] else 1.0
        seen = weight * strong[image] + (1 - weight) * strong[partner]
        log_p = objective.backbone(seen[None])[0].detach().log_softmax(0)
        for label, share in ((learned[image], weight), (learned[partner], 1 - weight)):
            if share and label != NONE and VALID[image]:
                found[image] -= share * float((1 - smoothing) * log_p[label] + smoothing * log_p.mean())
    return found, sum(old == NONE != new for old, new in zip(LABELS, learned, strict=True))


@pytest.mark.parametrize("own", [1.0, 0.7])
@pytest.mark.parametrize("threshold", [0.0, 0.35, 1.0])
def test_the_loss_is_its_formula(own: float, threshold: float) -> None:
    objective = create(f"objective.threshold={threshold}", "train.label_smoothing=0.1")
    loss, values = losses(objective, Mixing(own, None) if own < 1 else None)
    by_hand, used = expected(objective, own, threshold, 0.1)
    assert loss.item() == pytest.approx(sum(by_hand) / 8, rel=1e-5)
    assert values["supervised_loss"].item() == pytest.approx(sum(by_hand[:2]) / 2, rel=1e-5)
    assert values["unsupervised_loss"].item() == pytest.approx(sum(by_hand[2:]) / 5, rel=1e-5)
    assert values["confident"].item() == pytest.approx(used / 5)
    assert used == {0.0: 5, 1.0: 0}.get(threshold, used)
    assert threshold != 0.35 or 0 < used < 5
    assert values.keys() == PseudoLabels.values(schema.load(RunConfig, None, given(Path("d")))).keys()


def test_only_the_backbone_gets_a_gradient_and_the_teacher_has_no_dropout() -> None:
    objective = create("model.dropout=0.5")
    assert not objective.teacher.training
    losses(objective)[0].backward()
    assert all(parameter.grad is None for parameter in objective.teacher.parameters())
    assert all(parameter.grad is not None for parameter in objective.backbone.parameters())


def test_the_teacher_of_a_new_head_follows_closely_at_first() -> None:
    """With the momentum of a long run from the start, it was sure of nothing for 500 steps."""
    config = schema.load(RunConfig, None, given(Path("d"), "objective.momentum=0.99"))
    backbone = build(objectives.new_backbone(config, 4))
    for weights, new_head, first in ((None, True, 0.1), ("w", True, 0.1), ("w", False, 0.99)):
        begun = replace(config, init=replace(config.init, weights=weights, new_head=new_head))
        momentum = objectives.create(begun, backbone).teacher_momentum
        assert [momentum(step) for step in (0, 890, 891, 10**6)] == [first, 0.99, 0.99, 0.99]


def test_the_teacher_s_view_has_the_crop_alone() -> None:
    distorted = (
        "color_jitter",
        "saturation",
        "hue",
        "three_augment",
        "grey",
        "blur",
        "solarise",
        "randaugment_layers",
        "erase",
    )
    given_too = [f"augment.{name}={0.1 if name != 'randaugment_layers' else 2}" for name in distorted]
    config = schema.load(
        RunConfig, None, given(Path("d"), "augment.crop=random_resized", "augment.area_min=0.4", *given_too)
    )
    strong, weak = PseudoLabels.views(config)
    assert strong.augment == config.augment
    assert weak.augment == replace(config.augment, **dict.fromkeys(distorted, 0))
    assert (weak.size, weak.count) == (strong.size, strong.count) == (config.model.image_size, 1)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("bare") / "bare", {"train": 60}, labelled=False, seed=1)


def test_labels_are_those_that_there_are(dataset: Path, bare: Path) -> None:
    """Of the labelled set, of one without labels, and of the first again with its labels left out."""
    mix = f"data.mix=[{{path: {bare}, weight: 2}}, {{path: {dataset}, weight: 1, labels: false}}]"
    config = schema.load(RunConfig, None, given(dataset, mix, "data.limit=20", "train.global_batch=8"))
    data = open_run_data(config.data, 0, config.labels)
    assert isinstance(data.split, MixedSplit)
    whole = open_dataset(dataset).split("train")
    assert [len(part) for part in data.split.parts] == [20, 60, len(whole)]
    assert [len(data.split.labels_of(row)) for row in (0, 19, 20, 79, 80, len(data.split) - 1)] == [1, 1, 0, 0, 0, 0]
    assert data.dataset.classes == open_dataset(dataset).classes
    assert data.split.set_names == [dataset.name, "bare", f"{dataset.name} without labels"]
    shown = [(facts.name, facts.num_classes) for facts in datasets_of(data) if facts.context == "training"]
    assert shown == [(dataset.name, 4), ("bare", 0), (f"{dataset.name} without labels", 0)]
    # Leaving out the labels is another run.
    facts = mixture_facts(data.split)
    assert [one.get("labels", True) for one in facts["sets"]] == [True, True, False]
    read = [one | {"labels": True} for one in facts["sets"]]
    assert mixed_until({"mixture": facts}, 1) != mixed_until({"mixture": facts | {"sets": read}}, 1)


def test_images_that_are_held_out_are_in_neither_set(dataset: Path) -> None:
    """Those of data.dev_share were trained on without their labels."""
    mix = f"data.mix=[{{path: {dataset}, weight: 1, labels: false}}]"
    config = schema.load(
        RunConfig, None, given(dataset, mix, "data.limit=60", "data.dev_share=0.2", "train.global_batch=8")
    )
    data = open_run_data(config.data, 0, config.labels)
    whole, held_out = open_dataset(dataset).split("train"), data.evaluation
    assert held_out is not None
    assert [len(part) for part in data.split.parts] == [48, len(whole) - 12]
    dev = held_out.manifest_rows(np.arange(12))
    for part in data.split.parts:
        assert not np.isin(part.manifest_rows(np.arange(len(part))), dev).any()


def test_a_run_on_few_labels_exports_its_teacher_and_resumes_exactly(
    forge: Forge, dataset: Path, bare: Path, tmp_path: Path
) -> None:
    more = [
        f"out={tmp_path}",
        f"data.mix=[{{path: {bare}, weight: 5}}]",
        "data.limit=24",
        "augment.mixup=0.5",
        "train.length=4 steps",
        "optimizer.lr=0.01",
        "objective={threshold: 0.2501, momentum: 0.5}",
        "evaluate.every=2 steps",
        "checkpoint.every=2 steps",
        "checkpoint.best=val_top1",
    ]
    forge.start(2, [*given(dataset, *more), "name=whole"]).finish()
    whole = tmp_path / "whole"
    assert set(metrics(whole, "val_top1")) == {2, 4}
    for name in ("supervised_loss", "unsupervised_loss", "confident", "pseudo_classes"):
        assert set(metrics(whole, name)) == {1, 2, 3, 4}
    assert any(metrics(whole, "confident").values())
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    shutil.rmtree(cut / "checkpoints/step-00000004")
    forge.start(2, [*given(dataset, *more), "name=cut"]).finish()
    then, now = (load_file(run / "checkpoints/step-00000004/model.safetensors") for run in (whole, cut))
    assert then.keys() == now.keys()
    assert all(np.array_equal(value, now[tensor]) for tensor, value in then.items())
    for name in ("loss", "confident", "val_top1"):
        assert metrics(whole, name) == metrics(cut, name)
