"""Optimizers, weight decay groups, and the learning rate as a pure function of the step."""

import math

import torch
from torch import nn

from pipeline.settings.run_sections import EngineConfig, OptimizerConfig, ScheduleConfig


def is_fused(config: EngineConfig, device: torch.device) -> bool:
    """Whether a run on this device updates its weights in one kernel: engine.fused, or what is fastest there."""
    return config.fused if config.fused is not None else device.type == "cuda" and not config.offload


def build(model: nn.Module, decayed: set[str], config: OptimizerConfig, fused: bool = False) -> torch.optim.Optimizer:
    """Build AdamW or SGD with two parameter groups: those named in `decayed`, and the rest without weight decay.

    fused: with torch's fused kernels, instead of those that it chooses.

    torch's AdamW multiplies weights by 1 - lr x weight_decay: the paper's decoupled decay with its own value, scaled by
    the schedule.
    """
    named = dict(model.named_parameters())
    unknown = decayed - named.keys()
    assert not unknown, unknown
    groups = [
        {"params": [p for n, p in named.items() if n in decayed], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named.items() if n not in decayed], "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused or None)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused or None)


def peak_rate(config: OptimizerConfig, global_batch: int) -> float:
    """Learning rate after warm-up: optimizer.lr, scaled linearly from optimizer.lr_batch to the global batch if that is set."""
    return config.lr * global_batch / config.lr_batch if config.lr_batch else config.lr


def learning_rate(
    config: ScheduleConfig, peak: float, step: int, total_steps: int, warmup_steps: int, cooldown_steps: int = 0
) -> float:
    """Learning rate of step `step` (from 0): linear warm-up from 0, then decay to `final` x peak.

    As in the paper's code: shape(progress) x min(1, step / warmup), progress counted from the end of the warm-up
    (big_vision, utils.create_learning_rate_schedule). "drops" counts from the start of the run, as in BiT.
    cooldown_steps: steps at the end of a "constant" schedule in which the rate falls linearly, as in Zhai et al., "Scaling Vision
    Transformers" (2022), where it follows a rate that falls with the square root of the step.
    """
    progress = min(max((step - warmup_steps) / max(total_steps - warmup_steps, 1), 0.0), 1.0)
    if config.decay == "linear":
        shape = 1 - progress
    elif config.decay == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.decay == "drops":
        shape = 0.1 ** sum(step >= drop * total_steps for drop in config.drops)
    else:
        shape = min(1.0, max(0, total_steps - step) / cooldown_steps) if cooldown_steps else 1.0
    shape = config.final + (1 - config.final) * shape
    return peak * shape * min(1.0, step / warmup_steps if warmup_steps else 1.0)
