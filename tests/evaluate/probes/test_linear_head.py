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
    right = head.probabilities.argmax(1) == labels[:, 0]
    assert right.float().mean() > 0.6
    loss = classification.losses(head.probabilities.log(), labels, "softmax").mean()
    assert loss == pytest.approx(head.held_out[head.decay], rel=1e-4)
    # Labels that say nothing need the strongest decay, and cannot be predicted.
    noise = fitted(features, labels[torch.randperm(N, generator=torch.Generator().manual_seed(1))])
    assert noise.decay > 3 * head.decay
    assert (noise.probabilities.argmax(1) == labels[:, 0]).float().mean() < 0.4


def test_a_wrong_label_is_doubted_by_the_head_that_was_not_fitted_to_it(samples: tuple[Tensor, Tensor]) -> None:
    features, labels = samples
    wrong = labels.clone()
    wrong[:8, 0] = (wrong[:8, 0] + 1) % K
    of_label = fitted(features, wrong).probabilities.gather(1, wrong[:, :1])[:, 0]
    assert of_label[:8].median() < of_label[8:].median() / 2
