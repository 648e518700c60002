"""Losses against torch's losses and against the formulas."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline import model as models
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.mix import mix_pairs
from pipeline.objectives.classification import Classification, TargetsHead, losses
from pipeline.objectives.objective import mean_of_valid


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 3


ONE = torch.tensor([[0], [4], [2], [2], [1], [3]])
MANY = torch.tensor([[0, -1, -1], [4, 1, -1], [2, 1, 0], [-1, -1, -1], [3, 3, -1], [-1, 2, -1]])
HOT = torch.tensor(
    [[1, 0, 0, 0, 0], [0, 1, 0, 0, 1], [1, 1, 1, 0, 0], [0] * 5, [0, 0, 0, 1, 0], [0, 0, 1, 0, 0]]
).float()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_softmax_is_cross_entropy(smoothing: float, logits: torch.Tensor) -> None:
    expected = F.cross_entropy(logits, ONE[:, 0], reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(losses(logits, ONE, "softmax", smoothing), expected)


def test_softmax_of_several_labels_is_against_their_mean(logits: torch.Tensor) -> None:
    expected = F.cross_entropy(logits[[1, 2]], HOT[[1, 2]] / torch.tensor([[2.0], [3.0]]), reduction="none")
    torch.testing.assert_close(losses(logits, MANY, "softmax")[[1, 2]], expected)
    assert losses(logits, MANY, "softmax")[3] == 0  # no label


def test_label_smoothing_teaches_nothing_of_a_sample_without_a_label(logits: torch.Tensor) -> None:
    """It was trained to the uniform distribution."""
    assert losses(logits, MANY, "softmax", 0.1)[3] == 0
    # Of mixed pairs, what is labelled: row 2's labels are a share of 0.7 of its own target, and of 0.3 of row 3's.
    own = torch.full((6,), 0.7)
    smoothed = 0.9 * (HOT / HOT.sum(1, keepdim=True).clamp(min=1)) + 0.1 / 5
    smoothed[3] = 0
    expected = -(mix_pairs(smoothed, own) * logits.log_softmax(1)).sum(1)
    torch.testing.assert_close(losses(logits, MANY, "softmax", 0.1, own), expected)


def test_sigmoid_is_summed_over_classes(logits: torch.Tensor) -> None:
    expected = F.binary_cross_entropy_with_logits(logits, HOT, reduction="none").sum(1)
    torch.testing.assert_close(losses(logits, MANY, "sigmoid"), expected)
    by_hand = -(HOT * torch.sigmoid(logits).log() + (1 - HOT) * torch.sigmoid(-logits).log()).sum(1)
    torch.testing.assert_close(losses(logits, MANY, "sigmoid"), by_hand)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_losses_are_fp32(kind: str, logits: torch.Tensor) -> None:
    rounded = logits.bfloat16()
    found = losses(rounded, ONE, kind)
    assert found.dtype == torch.float32
    assert torch.equal(found, losses(rounded.float(), ONE, kind))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_invalid_samples_count_as_zero(kind: str, logits: torch.Tensor) -> None:
    valid = torch.tensor([True, True, False, True, False, True])
    each = losses(logits, ONE, kind)
    logits.requires_grad_()
    found = mean_of_valid(losses(logits, ONE, kind), valid)
    # Over the batch's 6 places, not its 4 readable ones, so that each place has the same weight on every rank.
    torch.testing.assert_close(found, (each[0] + each[1] + each[3] + each[5]) / 6)
    found.backward()
    assert (logits.grad[~valid] == 0).all()
    assert (logits.grad[valid] != 0).any(1).all()


@pytest.mark.parametrize("name", ["ViT-Ti/8", "BiT-R50x1"])
def test_a_second_head_learns_numbers_from_the_same_features(name: str) -> None:
    small = {"depth": 1, "width": 12, "num_heads": 1, "mlp_width": 8, "representation": False}
    model = models.create(name, 32, 5, **(small if "ViT" in name else {"width": 32}))
    made = Classification(model, "softmax")
    made.targets = TargetsHead(model.config.num_features, ["age"], weight=0.5)
    targets = torch.tensor([[10.0], [20.0], [float("nan")], [40.0]])
    split = SimpleNamespace(target_values=targets.numpy())
    made.learn_from(SimpleNamespace(split=split), head_is_trained=False)  # type: ignore[arg-type]
    images = torch.randint(0, 256, (1, 4, 32, 32, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    rows, valid = np.arange(4), torch.tensor([True, True, True, False])
    batch = Batch((images,), ONE[:4], valid, rows, 0 * rows, targets)
    views, facts = made.inputs(batch, torch.device("cpu"), None)
    torch.nn.init.normal_(made.targets.dense.weight)
    loss, values = made(views, facts)
    predicted = made.targets(model.features(views[0]))[:2]
    standardised = (targets[:2] - np.mean([10, 20, 40])) / np.std([10, 20, 40])
    expected = F.huber_loss(predicted, standardised.float(), reduction="none").sum()
    torch.testing.assert_close(values["targets_loss"], expected / 3)
    of_classes = losses(model(views[0]), ONE[:4], "softmax")[:3].sum()
    torch.testing.assert_close(loss, (of_classes + 0.5 * expected) / 4)
    loss.backward()
    assert made.targets.dense.weight.grad is not None
    assert made.targets.dense.weight.grad.abs().sum() > 0
