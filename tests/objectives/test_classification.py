"""Losses against torch's losses and against the formulas."""

import pytest
import torch
import torch.nn.functional as F

from pipeline.data.loading.mix import mix_pairs
from pipeline.objectives.classification import losses
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
