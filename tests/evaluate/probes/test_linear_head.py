"""The fitted head minimises its loss and chooses its decay on held-out samples."""

import pytest
import torch
from torch import Tensor

from pipeline.evaluate.probes import linear_head
from pipeline.evaluate.probes.linear_head import LinearHead
from pipeline.evaluate.probes.out_of_fold import divide
from pipeline.objectives import classification

N, D, K = 300, 12, 4


@pytest.fixture(scope="module")
def samples() -> tuple[Tensor, Tensor]:
    """Features (N, D), of very different scales, and labels (N, 2): the first is the class, half of the time."""
    torch.manual_seed(0)
    classes = torch.arange(N) % K
    features = torch.randn(N, D) + 1.5 * torch.eye(K, D)[classes]
    features = features * torch.logspace(-2, 2, D) + 7
    return features, torch.stack([classes, torch.full((N,), -1)], 1)


def fitted(features: Tensor, labels: Tensor, kind: str = "softmax", weights: Tensor | None = None) -> LinearHead:
    weights = torch.ones(N) if weights is None else weights
    return linear_head.fit(features, labels, weights, divide(labels[:, 0].numpy(), linear_head.FOLDS, None), K, kind)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_gradient_of_the_whole_loss_is_zero(samples: tuple[Tensor, Tensor], kind: str) -> None:
    features, labels = samples
    weights = torch.linspace(0.5, 2, N)
    head = fitted(features, labels, kind, weights)
    weight, bias = (value.double().requires_grad_() for value in (head.weight, head.bias))
    losses = classification.losses(features.double() @ weight.T + bias, labels, kind)
    penalty = (weight * features.std(0)).square().sum() * head.decay / 2
    loss = (losses * weights).sum() / weights.sum() + penalty
    by_weight, by_bias = torch.autograd.grad(loss, [weight, bias])
    centred = by_weight - by_bias[:, None] * features.mean(0)  # By the weights of standardised features.
    assert (centred / features.std(0)).abs().max() < 1e-4
    assert by_bias.abs().max() < 1e-4


def test_the_decay_has_the_least_held_out_loss(samples: tuple[Tensor, Tensor]) -> None:
    features, labels = samples
    head = fitted(features, labels)
    assert head.decay == min(head.held_out, key=lambda decay: head.held_out[decay])
    right = head.predicted.argmax(1) == labels[:, 0]
    assert right.float().mean() > 0.6
    loss = classification.losses(head.predicted.log(), labels, "softmax").mean()
    assert loss == pytest.approx(head.held_out[head.decay], rel=1e-4)
    # Labels that say nothing need the strongest decay, and cannot be predicted.
    noise = fitted(features, labels[torch.randperm(N, generator=torch.Generator().manual_seed(1))])
    assert noise.decay > 3 * head.decay
    assert (noise.predicted.argmax(1) == labels[:, 0]).float().mean() < 0.4


def test_numbers_are_fitted_as_by_ridge_regression(samples: tuple[Tensor, Tensor]) -> None:
    """Against the normal equations of standardised features, of the values that are there."""
    features, labels = samples
    noise = torch.randn(N, generator=torch.Generator().manual_seed(3))
    standard = (features - features.mean(0)) / features.std(0)
    targets = torch.stack([1000 + 50 * (standard[:, 0] - standard[:, 5] + noise), noise], 1)
    targets[::3, 0] = torch.nan
    parts = divide(labels[:, 0].numpy(), linear_head.FOLDS, None)
    head = linear_head.fit_numbers(features, targets, parts)
    known = ~targets[:, 0].isnan()
    x, y = standard[known].double(), targets[known, 0].double()
    x, mean = torch.cat([x, torch.ones(len(x), 1)], 1), y.mean()
    penalty = head.decay * torch.eye(D + 1, dtype=torch.float64)
    penalty[-1, -1] = 0
    solved = torch.linalg.solve(x.T @ x / len(x) + penalty, x.T @ (y - mean) / len(x))
    expected = x @ solved + mean
    torch.testing.assert_close(features[known] @ head.weight[0] + head.bias[0], expected.float(), rtol=1e-4, atol=0.05)
    assert head.decay == min(head.held_out, key=lambda decay: head.held_out[decay])
    errors = [float((head.predicted[:, k] - targets[:, k])[~targets[:, k].isnan()].square().mean()) for k in (0, 1)]
    variances = [float(targets[~targets[:, k].isnan(), k].var(correction=0)) for k in (0, 1)]
    held_out = sum(error / variance for error, variance in zip(errors, variances, strict=True)) / 2
    assert held_out == pytest.approx(head.held_out[head.decay], rel=1e-3)
    assert errors[0] / variances[0] < 0.5 < 0.9 < errors[1] / variances[1]


def test_a_number_that_is_known_in_one_part_alone_is_predicted_there_by_its_mean(
    samples: tuple[Tensor, Tensor],
) -> None:
    """As where one plate was measured, and parts are of whole plates."""
    features, labels = samples
    parts = divide(labels[:, 0].numpy(), linear_head.FOLDS, None)
    targets = features[:, :2].clone()
    targets[parts != 1, 1] = torch.nan
    head = linear_head.fit_numbers(features, targets, parts)
    mean = targets[parts == 1, 1].mean()
    torch.testing.assert_close(head.predicted[parts == 1, 1], mean.expand((parts == 1).sum()))
    assert head.weight.isfinite().all()
