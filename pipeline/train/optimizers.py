"""Optimizers and which parameters they decay."""

import torch
from torch import nn

from pipeline.settings.run import OptimizerConfig


def build(model: nn.Module, decayed: set[str], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over two groups of `model`: parameters named in `decayed`, and the rest without weight decay.

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
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
