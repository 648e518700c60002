"""Distillation against its formula, and its frozen teacher."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.data.loading.loader import Batch
from pipeline.model import Model, build, configure, save
from pipeline.objectives.distill import Distill
from pipeline.objectives.objective import constants
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

STUDENT = configure("ViT-mu/8", 32, 0, representation=False)


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """Weights with a head, for 16 patches of 12 pixels: of another width, patch size and number of patches than the
    student's.
    """
    path = tmp_path / "teacher.pt"
    save(build(configure("ViT-mu/12", 36, 10, width=48, dropout=0.5), seed=1), path)
    return path


def run(teacher: Path | str, *more: str) -> RunConfig:
    given = [
        "name=a",
        "data.path=d",
        "train.length=1 epochs",
        "model.name=ViT-mu/8",
        "model.image_size=32",
        "train.loss=distill",
    ]
    return schema.load(RunConfig, None, [*given, "model.representation=false", f"objective.teacher={teacher}", *more])


def create(config: RunConfig, backbone: Model | None = None) -> Distill:
    found = objectives.create(config, backbone or build(objectives.new_backbone(config, 0)))
    return found


def given(
    objective: Distill, size: tuple[int, int] = (32, 32), valid: tuple[bool, ...] = (True, True, False)
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    B = len(valid)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, B, *size, 3), np.uint8))
    batch = Batch(
        (images,), torch.zeros(B, 1, dtype=torch.int64), torch.tensor(valid), np.arange(B), np.zeros(B, np.int64)
    )
    return objective.inputs(batch, torch.device("cpu"), None)


@pytest.mark.parametrize("patch_weight", [0, 2.5])
def test_the_loss_is_its_formula(teacher: Path, patch_weight: float) -> None:
    objective = create(run(teacher, f"objective.patch_weight={patch_weight}")).train()
    views, facts = given(objective)
    found, values = objective(views, facts)
    with torch.no_grad():
        feature, patches = objective.backbone(views[0], with_patches=True)
        target, target_patches = objective.frozen_teacher(facts["seen"], with_patches=True)
        heads = {name: _as_numpy(head) for name, head in objective.named_children() if name.endswith("_head")}
    expected = 0.0
    for image in (0, 1):  # The third is unreadable.
        of_feature = _error(heads["feature_head"], feature[image], target[image])
        of_patches = (
            np.mean(
                [_error(heads["patch_head"], *pair) for pair in zip(patches[image], target_patches[image], strict=True)]
            )
            if patch_weight
            else 0
        )
        expected += (of_feature + patch_weight * of_patches) / 3
    assert found.item() == pytest.approx(expected, rel=1e-4)
    assert values.keys() == objective.values(run(teacher, f"objective.patch_weight={patch_weight}")).keys()


def _as_numpy(head: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in head.state_dict().items()}


def _error(head: dict[str, np.ndarray], feature: Tensor, target: Tensor) -> float:
    def centred(x: np.ndarray) -> np.ndarray:
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5)

    normed = centred(feature.double().numpy()) * head["0.weight"] + head["0.bias"]
    predicted = head["1.weight"] @ normed + head["1.bias"]
    return float(((predicted - centred(target.double().numpy())) ** 2).mean())


def test_the_teacher_is_frozen_and_reads_as_many_patches(teacher: Path) -> None:
    objective = create(run(teacher)).train()
    of_teacher = objective.frozen_teacher.config
    assert (of_teacher.image_size, of_teacher.grid, of_teacher.num_classes) == ((48, 48), STUDENT.grid, 0)
    assert objective.training
    assert not objective.frozen_teacher.training  # It has dropout.
    assert not any(p.requires_grad for p in objective.frozen_teacher.parameters())
    views, facts = given(objective)
    assert facts["seen"].shape == (3, 3, 48, 48)
    objective(views, facts)[0].backward()
    assert all(p.grad is None for p in objective.frozen_teacher.parameters())
    assert all(p.grad is not None for name, p in objective.named_parameters() if "teacher" not in name)


def test_patches_are_compared_place_by_place(tmp_path: Path) -> None:
    """A student that is its teacher, with heads that change nothing: no patch differs. Not square, so that rows and
    columns cannot be mixed up.
    """
    backbone = build(configure("ViT-mu/8", (16, 32), 0, representation=False))
    save(backbone, tmp_path / "w.pt")
    objective = create(run(tmp_path / "w.pt", "model.image_size=16x32"), backbone)
    for head in (objective.feature_head, objective.patch_head):
        torch.nn.init.eye_(head[1].weight)
        torch.nn.init.zeros_(head[1].bias)
    views, facts = given(objective, (16, 32), (True, True))
    scores = objective(views, facts, task="measure")
    assert scores["loss"].max() < 1e-6
    assert objective(views, facts)[1]["explained"] > 1 - 1e-5


def test_other_weights_in_the_same_file_are_another_teacher(teacher: Path, tmp_path: Path) -> None:
    """A run that goes on compares the digest: its checkpoint does not hold the teacher."""
    digest = objectives.teacher_digest(run(teacher))
    (tmp_path / "moved").mkdir()
    moved = teacher.rename(tmp_path / "moved" / "t.pt")
    assert objectives.teacher_digest(run(moved)) == digest
    for name, changes in {"seed": {"seed": 2}, "eps": {"layer_norm_eps": 1e-3}}.items():
        seed = changes.pop("seed", 1)
        save(
            build(configure("ViT-mu/12", 36, 10, width=48, dropout=0.5, **changes), seed=seed), tmp_path / f"{name}.pt"
        )
        assert objectives.teacher_digest(run(tmp_path / f"{name}.pt")) != digest
    assert objectives.teacher_digest(run(moved, "train.loss=softmax", "objective={}")) == ""
    assert not [name for name, _ in constants(create(run(moved))) if "teacher" in name]


def test_a_resnet_teaches_its_feature_alone(tmp_path: Path) -> None:
    save(build(configure("BiT-R50x1", 32, 10, width=32)), tmp_path / "bit.pt")
    with pytest.raises(
        UserError,
        match=r"patch_weight = 1.0 compares patch tokens, and a ResNet has none: set objective.patch_weight=0",
    ):
        objectives.check(run(tmp_path / "bit.pt"))
    objective = create(run(tmp_path / "bit.pt", "objective.patch_weight=0"))
    assert objective(*given(objective))[0].isfinite()
