"""Regression: losses against the formulas, missing values, units of what is saved and loaded."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.mix import Mixing
from pipeline.model.weights import safetensors_metadata
from pipeline.objectives.regression import Regression, RegressionSettings, losses, metrics_of, standardisation

MISSING = float("nan")
TARGETS = torch.tensor([[30.0, 2.0], [50.0, MISSING], [MISSING, MISSING], [41.0, 7.0]])
CPU = torch.device("cpu")


def test_losses_are_those_of_torch_and_missing_values_contribute_nothing() -> None:
    predicted = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)) * 3
    predicted.requires_grad_()
    targets = (TARGETS - 40) / 10
    found, one = losses(predicted, targets, 0.7), partial(F.huber_loss, delta=0.7)
    for row, column in [(0, 0), (0, 1), (3, 0), (3, 1), (1, 0)]:
        alone = losses(predicted[row, [column]][None], targets[row, [column]][None], 0.7)
        torch.testing.assert_close(alone[0], one(predicted[row, column], targets[row, column]))
    torch.testing.assert_close(found[0], one(predicted[0], targets[0]))
    # Divided by all targets, so that each value counts the same.
    torch.testing.assert_close(found[1], one(predicted[1, 0], targets[1, 0]) / 2)
    assert found[2] == 0
    found.sum().backward()
    gradient = predicted.grad
    assert gradient is not None
    assert (gradient[targets.isnan()] == 0).all()
    assert (gradient[~targets.isnan()] != 0).all()


def test_standardisation_is_of_the_values_that_are_there() -> None:
    values = np.array([[1.0, 5.0], [2.0, np.nan], [6.0, 5.0]], np.float32)
    mean, deviation = standardisation(values)
    assert mean.tolist() == [3, 5]
    assert deviation.tolist() == pytest.approx([np.std([1, 2, 6]), 1])  # A constant would be divided by 0.


def objective(*names: str, trained: bool = False) -> Regression:
    """On images of 8 pixels; with a head of random values if trained."""
    model = models.create("ViT-Ti/8", 8, len(names), depth=1, width=12, num_heads=1, representation=False)
    made = Regression(model, RegressionSettings(), names)
    if trained:
        torch.nn.init.normal_(model.head.weight)
        torch.nn.init.normal_(model.head.bias)
    return made.eval()


def data_of(targets: torch.Tensor) -> Any:
    return SimpleNamespace(split=SimpleNamespace(target_values=targets.numpy()))


def batch_of(targets: torch.Tensor, valid: list[bool]) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (1, len(targets), 8, 8, 3), dtype=torch.uint8, generator=generator)
    rows = np.arange(len(targets))
    return Batch((images,), torch.zeros(len(targets), 0), torch.tensor(valid), rows, 0 * rows, targets)


def test_predictions_are_in_the_units_of_the_data_while_the_head_is_not() -> None:
    made = objective("age", "dose", trained=True)
    made.learn_from(data_of(TARGETS), head_is_trained=False)
    assert made.scale.mean.tolist() == pytest.approx([121 / 3, 4.5])
    views, facts = made.inputs(batch_of(TARGETS, [True] * 4), CPU, None)
    torch.testing.assert_close(
        made(views, facts, task="backbone"), made.backbone(views[0]) * made.scale.deviation + made.scale.mean
    )
    own = made.losses_of(made(views, facts, task="backbone"), TARGETS)
    torch.testing.assert_close(own, made.losses(views, facts), rtol=1e-4, atol=1e-6)


def test_a_trained_head_goes_on_predicting_the_same() -> None:
    """Which another mean and deviation would change."""
    made = objective("age", "dose", trained=True)
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    expected = made.backbone(images)
    made.learn_from(data_of(TARGETS), head_is_trained=True)
    torch.testing.assert_close(made((images,), {}, task="backbone"), expected)


def test_pairs_mix_their_numbers_and_one_that_is_not_mixed_keeps_its_own() -> None:
    made = objective("age", "dose")
    batch = batch_of(TARGETS, [True, True, False, True])
    _, facts = made.inputs(batch, CPU, Mixing(0.75, None))
    assert facts["targets"][:2, 0].tolist() == [0.75 * 30 + 0.25 * 50, 0.75 * 50 + 0.25 * 30]
    assert facts["targets"][:2, 1].isnan().all()  # Its partner's value is not known.
    assert facts["targets"][3].tolist() == [41, 7]  # Its partner cannot be read.


def test_what_is_loaded_predicts_in_the_units_of_the_data(tmp_path: Path) -> None:
    made = objective("age", "dose", trained=True)
    made.learn_from(data_of(TARGETS), head_is_trained=False)
    model = made.backbone
    extra = {"loss": "regression", **made.extra()}
    save_file(model.state_dict(), tmp_path / "run.safetensors", safetensors_metadata(model.config, extra))
    loaded = models.load(tmp_path / "run.safetensors")
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    expected = made((images,), {}, task="backbone")
    torch.testing.assert_close(loaded(images), expected)
    assert loaded.extra["targets"] == ["age", "dose"]
    models.save(loaded, tmp_path / "saved.safetensors")  # Not scaled a second time.
    torch.testing.assert_close(models.load(tmp_path / "saved.safetensors")(images), expected)
    new_head = models.load(tmp_path / "run.safetensors", num_classes=2, new_head=True)
    assert (new_head(images) == 0).all()
    assert "targets" not in new_head.extra
    wrong = {**extra, "targets": ["age"]}
    save_file(model.state_dict(), tmp_path / "wrong.safetensors", safetensors_metadata(model.config, wrong))
    with pytest.raises(UserError, match="targets"):
        models.load(tmp_path / "wrong.safetensors")


def test_errors_of_several_units_have_no_mean() -> None:
    assert list(metrics_of(["age"])) == ["r2", "rmse", "mae", "spearman"]
    found = metrics_of(["age", "dose (mg/l)"])
    assert "rmse" not in found
    assert {"r2", "spearman", "rmse_age", "mae_dose__mg_l_"} <= found.keys()
