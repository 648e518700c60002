"""Distillation of a classifier against its formula, what its teacher reads, and a run on images with and without
labels.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forge
from ranks import metrics, settings
from safetensors.numpy import load_file
from tiny import make_dataset
from torch import Tensor

from pipeline import model as models
from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.mix import Mixing
from pipeline.estimate.forecast import make_forecast
from pipeline.model import build, configure, save
from pipeline.objectives.distill import DistillClasses, divergence
from pipeline.settings import schema
from pipeline.settings.commands.operate import PlanConfig
from pipeline.settings.run import RunConfig
from pipeline.train.start import prepare

CLASSES = [f"class{n}" for n in range(4)]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights for images of 24 pixels, whose head predicts CLASSES."""
    return weights(tmp_path_factory.mktemp("teacher"))


def weights(folder: Path, num_classes: int = 4, classes: list[str] = CLASSES, **extra: str) -> Path:
    """In a folder of their own: a process reads a teacher once."""
    folder.mkdir(exist_ok=True)
    model = build(configure("ViT-mu/12", 24, num_classes, width=48, dropout=0.5), seed=1)
    if num_classes:  # A new head is zero.
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
    save(model, folder / "teacher.safetensors", {"classes": classes, **extra})
    return folder / "teacher.safetensors"


def given(teacher: Path | str, data: Path, *more: str) -> list[str]:
    return settings(data, data.parent, "run", "train.loss=distill_classes", f"objective.teacher={teacher}", *more)


def run(teacher: Path | str, *more: str) -> RunConfig:
    return schema.load(RunConfig, None, given(teacher, Path("d"), *more))


def create(teacher: Path, *more: str) -> DistillClasses:
    config = run(teacher, *more)
    found = objectives.create(config, build(objectives.new_backbone(config, 4)))
    return found


def batch(size: int = 16, label: int = 0, valid: tuple[bool, ...] = (True, True, True, False)) -> Batch:
    B = len(valid)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, B, size, size, 3), np.uint8))
    return Batch((images,), torch.full((B, 1), label), torch.tensor(valid), np.arange(B), np.zeros(B, np.int64))


def losses(objective: DistillClasses, of: Batch, mixing: Mixing | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    return objective(*objective.inputs(of, torch.device("cpu"), mixing))


@pytest.mark.parametrize("temperature", [1, 3])
def test_the_divergence_is_its_formula(temperature: float) -> None:
    logits, target = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, q = (np.exp(one.numpy() / temperature) for one in (target, logits))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    found = divergence(logits, target, "softmax", temperature)
    assert np.allclose(found, temperature**2 * (p * np.log(p / q)).sum(1))
    p, q = (1 / (1 + np.exp(-one.numpy() / temperature)) for one in (target, logits))
    found = divergence(logits, target, "sigmoid", temperature)
    assert np.allclose(found, temperature**2 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum(1))


def test_the_loss_is_of_readable_images_and_reads_no_label(teacher: Path) -> None:
    objective = create(teacher, "objective.temperature=2").eval()
    found, values = losses(objective, batch())
    views, facts = objective.inputs(batch(), torch.device("cpu"), None)
    of_each = divergence(objective.backbone(views[0]), objective.frozen_teacher(facts["seen"]), "softmax", 2.0)
    assert found.item() == pytest.approx((of_each[:3].sum() / 4).item())
    agree = objective.backbone(views[0]).argmax(1) == objective.frozen_teacher(facts["seen"]).argmax(1)
    assert values["agreement"].item() == pytest.approx(agree[:3].float().mean().item())
    assert losses(objective, batch(label=3))[0] == found
    assert values.keys() == DistillClasses.values(run(teacher)).keys()


def test_the_teacher_reads_its_own_size_or_another_shape(teacher: Path) -> None:
    objective = create(teacher).train()
    assert not objective.frozen_teacher.training  # It has dropout.
    assert objective.inputs(batch(), torch.device("cpu"), None).facts["seen"].shape[2:] == (24, 24)
    losses(objective, batch())[0].backward()
    assert all(p.grad is None for p in objective.frozen_teacher.parameters())
    assert all(p.grad is not None for p in objective.backbone.parameters())
    assert create(teacher, "model.image_size=24x48").frozen_teacher.config.image_size == (24, 48)


@pytest.mark.parametrize("mixing", [Mixing(0.7, None), Mixing(0.75, (0, 0, 8, 8))])
def test_it_teaches_what_it_sees_in_mixed_images(teacher: Path, mixing: Mixing) -> None:
    """A student that is its teacher has nothing to learn, whatever the images: both see the same mixture."""
    student = models.load(teacher)
    objective = DistillClasses(student.eval(), models.load(teacher).eval())
    assert losses(objective, batch(24), mixing)[0].item() == pytest.approx(0, abs=1e-6)
    views, _ = objective.inputs(batch(24), torch.device("cpu"), mixing)
    assert not torch.equal(views[0], objective.inputs(batch(24), torch.device("cpu"), None).views[0])


def test_what_cannot_be_its_teacher_is_said_in_one_line(teacher: Path, dataset: Path, tmp_path: Path) -> None:
    def said(teacher: Path | str) -> str:
        with pytest.raises(UserError) as error:
            prepare(schema.load(RunConfig, None, given(teacher, dataset)))
        with pytest.raises(UserError) as planned:
            make_forecast(schema.load(PlanConfig, None, given(teacher, dataset)))
        assert str(planned.value) == str(error.value)
        return str(error.value)

    assert f"has 5 classes, {dataset} has 4. Use weights that were fine-tuned on these" in said(
        weights(tmp_path / "five", 5, [*CLASSES, "class4"])
    )
    moved = weights(tmp_path / "moved", classes=[*CLASSES[:2], *CLASSES[:1:-1]])
    assert "class 2 of" in said(moved)
    bare = make_dataset(tmp_path / "bare", {"train": 30}, labelled=False)
    with pytest.raises(UserError, match="distill_classes needs labels, and this data set has none"):
        prepare(schema.load(RunConfig, None, given(teacher, bare)))


def test_a_run_on_images_with_and_without_labels_is_scored_and_resumes_exactly(
    forge: Forge, dataset: Path, tmp_path: Path
) -> None:
    bare = make_dataset(tmp_path / "bare", {"train": 60}, labelled=False, seed=1)
    teacher = weights(tmp_path, loss="sigmoid")
    more = [
        f"out={tmp_path}",
        f"data.mix=[{{path: {bare}, weight: 1}}]",
        "augment.mixup=0.5",
        "train.length=4 steps",
        "evaluate.every=2 steps",
        "checkpoint.every=2 steps",
        "checkpoint.best=val_top1",
    ]
    forge.start(1, [*given(teacher, dataset, *more), "name=whole"]).finish()
    whole = tmp_path / "whole"
    assert set(metrics(whole, "val_top1")) == {2, 4}
    assert set(metrics(whole, "agreement")) == {1, 2, 3, 4}
    name = "checkpoints/step-00000004/model.safetensors"
    config, _, extra = models.read_weights(whole / name)[:3]
    assert (config.num_classes, extra["classes"], extra["loss"]) == (4, CLASSES, "sigmoid")
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    shutil.rmtree(cut / "checkpoints/step-00000004")
    forge.start(1, [*given(teacher, dataset, *more), "name=cut"]).finish()
    then, now = (load_file(run / name) for run in (whole, cut))
    assert then.keys() == now.keys()
    assert all(np.array_equal(value, now[tensor]) for tensor, value in then.items())
    assert metrics(whole, "loss") == metrics(cut, "loss")
