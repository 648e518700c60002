"""Optimizers, parameter groups, and learning rate and weight decay as pure functions of the step."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.model.layers import Dense
from pipeline.model.resnet import StdConv
from pipeline.objectives.objective import BACKBONE, Objective, stored_name, trained_parameters
from pipeline.objectives.parameters.muon import Muon
from pipeline.objectives.parameters.trained import depths
from pipeline.settings.run import EngineConfig, OptimizerConfig, ScheduleConfig


def is_fused(config: EngineConfig, device: torch.device) -> bool:
    """Whether a run on this device updates its weights in one kernel: engine.fused, or what is fastest there."""
    return config.fused if config.fused is not None else device.type == "cuda" and not config.offload


def build(model: nn.Module, decayed: set[str], config: OptimizerConfig, fused: bool = False) -> torch.optim.Optimizer:
    """Build AdamW, SGD or Muon with the `parameter_groups` of a model or an objective. decayed: names of parameters
    with weight decay.

    fused: with torch's fused kernels, instead of those that it chooses.

    torch's AdamW multiplies weights by 1 - lr x weight_decay: the paper's decoupled decay with its own value, scaled by
    the schedule.
    """
    groups = parameter_groups(model, decayed, config)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused or None)
    betas = (config.beta1, config.beta2)
    adam: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.eps, "fused": fused or None}
    if config.name == "muon":
        named, found = dict(model.named_parameters()), matrices(model, decayed)
        kernels: dict[Tensor, tuple[str, int]] = {named[name]: (stored_name(name), n) for name, n in found.items()}
        return Muon(groups, kernels, **adam)
    return torch.optim.AdamW(groups, **adam)


def parameter_groups(model: nn.Module, decayed: set[str], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameter groups for `torch.optim`: those with weight decay, then those without; more with layer_decay or frozen
    steps.

    Each also has "factor", by which its learning rate is multiplied, "frozen_steps", in how many first steps its
    parameters are not changed, "decays", and whether Muon updates its "matrices".
    """
    named = dict(trained_parameters(model))
    frozen = model.frozen_steps() if isinstance(model, Objective) else {}
    unknown = decayed - named.keys()
    assert not unknown, unknown
    depth, top = depths(model.backbone, BACKBONE) if isinstance(model, Objective) else ({}, 0)
    by_muon = matrices(model, decayed) if config.name == "muon" else {}
    groups: dict[tuple[bool, int, float, bool], dict[str, Any]] = {}
    for name, parameter in named.items():
        steps = max((n for prefix, n in frozen.items() if name.startswith(prefix)), default=0)
        factor = config.layer_decay ** (top - depth.get(name, top))
        decays = name in decayed
        group = groups.setdefault(
            (not decays, steps, -factor, name in by_muon),
            {
                "params": [],
                "weight_decay": config.weight_decay if decays else 0.0,
                "factor": factor,
                "frozen_steps": steps,
                "decays": decays,
                "matrices": name in by_muon,
            },
        )
        group["params"].append(parameter)
        if steps:
            parameter.register_hook(partial(_without_gradient, group))
    return [groups[key] for key in sorted(groups)]


def matrices(model: nn.Module, decayed: set[str]) -> dict[str, int]:
    """Names of the parameters that Muon would update, and how many kernels each has: the backbone's hidden layers.

    Those are the dense layers of its blocks, and the convolutions of a ResNet or of a hybrid's stem but the first.
    """
    layers = {f"{name}.weight": of for name, of in model.named_modules() if isinstance(of, (Dense, StdConv))}
    hidden = tuple(f"{BACKBONE}{part}." for part in ("blocks", "units", "stem.units"))
    return {
        name: getattr(layers[name], "num_kernels", 1)
        for name, _ in trained_parameters(model)
        if name.startswith(hidden) and name in layers.keys() & decayed
    }


def _without_gradient(group: dict[str, Any], gradient: Tensor) -> Tensor:
    """The gradient, or zeros while the group is frozen. A hook of its parameters."""
    return torch.zeros_like(gradient) if group.get("is_frozen") else gradient


def set_rates(optimizer: torch.optim.Optimizer, step: int, lr: float, weight_decay: float | None = None) -> None:
    """Set the rates of the parameter groups for step `step` (from 0). weight_decay: None leaves it as it is."""
    for group in optimizer.param_groups:
        group["is_frozen"] = step < group["frozen_steps"]
        group["lr"] = 0.0 if group["is_frozen"] else lr * group["factor"]
        if weight_decay is not None and group["decays"]:
            group["weight_decay"] = weight_decay
        by_adam = "betas" in group and not group["matrices"]  # Muon corrects no bias.
        if weight_decay is not None and group["frozen_steps"] and not group["is_frozen"] and by_adam:
            factor = _correction_after(group["frozen_steps"], step, *group["betas"])
            group["lr"] *= factor
            group["weight_decay"] /= factor  # AdamW multiplies it by the rate.


def _correction_after(frozen_steps: int, step: int, beta1: float, beta2: float) -> float:
    """Factor of the rate with which Adam corrects the bias of moments that begin after the frozen steps, which it has
    counted, too.

    Otherwise the first updates after an epoch of frozen steps would be several times those of DINO's authors, whose
    optimizer begins with the first step in which there is a gradient. step: from 0.
    """
    counted_steps, own_steps = step + 1, step + 1 - frozen_steps
    first = (1 - beta1**counted_steps) / (1 - beta1**own_steps)
    return first * math.sqrt((1 - beta2**own_steps) / (1 - beta2**counted_steps))


def weight_decay(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Weight decay of step `step` (from 0): constant, or along half a cosine to optimizer.weight_decay_end, as in
    DINO.
    """
    if config.weight_decay_end is None:
        return config.weight_decay
    shape = 0.5 * (1 + math.cos(math.pi * step / max(total_steps, 1)))
    return config.weight_decay_end + (config.weight_decay - config.weight_decay_end) * shape


def peak_rate(config: OptimizerConfig, global_batch: int) -> float:
    """Learning rate after warm-up: optimizer.lr, scaled linearly from optimizer.lr_batch to the global batch if that is
    set.
    """
    return config.lr * global_batch / config.lr_batch if config.lr_batch else config.lr


def learning_rate(
    config: ScheduleConfig, peak: float, step: int, total_steps: int, warmup_steps: int, cooldown_steps: int = 0
) -> float:
    """Learning rate of step `step` (from 0): linear warm-up from 0, then decay to `final` x peak.

    As in the paper's code: shape(progress) x min(1, step / warmup), progress counted from the end of the warm-up
    (big_vision, utils.create_learning_rate_schedule). "drops" counts from the start of the run, as in BiT.
    cooldown_steps: steps at the end of a "constant" schedule in which the rate falls linearly, as in Zhai et al.,
    "Scaling Vision Transformers" (2022), where it follows a rate that falls with the square root of the step.
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
