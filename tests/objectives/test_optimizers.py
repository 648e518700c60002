"""Optimizers: one step by the formulas, with decay only where it is named."""

import pytest
import torch
from torch import nn

from pipeline.objectives.parameters import optimizers
from pipeline.objectives.parameters.optimizers import build
from pipeline.settings.run import OptimizerConfig


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))


def with_gradients(net: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_by_hand_with_decoupled_decay(weight_decay: float) -> None:
    net = model()
    config = OptimizerConfig(lr=0.01, weight_decay=weight_decay, beta1=0.8, beta2=0.95, eps=1e-3)
    optimizer = build(net, {"0.weight"}, config)
    expected = {name: p.detach().clone() for name, p in net.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    for t in (1, 2, 3):
        gradients = with_gradients(net, t)
        optimizer.step()
        for name, g in gradients.items():
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            update = (first[name] / (1 - 0.8**t)) / ((second[name] / (1 - 0.95**t)).sqrt() + 1e-3)
            decay = weight_decay if name == "0.weight" else 0.0
            # Decoupled: the decay does not pass through the moments, and is scaled by the learning rate.
            expected[name] = expected[name] - 0.01 * (update + decay * expected[name])
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-6)


def test_after_frozen_steps_adam_is_as_new() -> None:
    """As DINO's authors train the prototypes: without a gradient in the first epoch, their optimizer has no moments of
    them.
    """
    frozen_steps, generator = 40, torch.Generator().manual_seed(0)
    start = torch.randn(5, dtype=torch.float64, generator=generator)
    late, new = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    group = {"params": [late], "factor": 0.5, "frozen_steps": frozen_steps, "decays": True, "matrices": False}
    settings = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 0.0}
    optimizer, as_new = torch.optim.AdamW([group], **settings), torch.optim.AdamW([new], **settings)
    for step in range(frozen_steps + 200):
        optimizers.set_rates(optimizer, step, 0.1, weight_decay=0.3)
        late.grad = torch.zeros_like(late)
        if step >= frozen_steps:
            new.grad = torch.randn(5, dtype=torch.float64, generator=generator)
            late.grad.copy_(new.grad)
            as_new.param_groups[0].update(lr=0.05, weight_decay=0.3)
            as_new.step()
        # Without moments, Adam's update is zero divided by zero.
        optimizer.param_groups[0]["eps"] = 1e-30 if step < frozen_steps else 0.0
        optimizer.step()
        torch.testing.assert_close(late, new, rtol=1e-9, atol=0)
    assert not torch.equal(new, start)
