"""Which of our models another project's files can hold: the plain ones, and those that are plain in other words."""

from dataclasses import replace

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.model import position
from pipeline.model.variants import Pool, ViTConfig
from pipeline.model.vit import VisionTransformer


def as_plain(
    model: VisionTransformer, holder: str, pools: tuple[Pool, ...], hybrids: bool, representation: bool
) -> tuple[ViTConfig, dict[str, Tensor]]:
    """(configuration, state) with one learned table of positions at the stem: the same function of images, bit for bit.

    2-D and sine-cosine tables are written out, and no positions are zeros. holder: who cannot hold the rest, whose name
    and reason the UserError gives. pools, hybrids, representation: what it can hold.
    """
    config, state = model.config, dict(model.state_dict())
    cannot = {
        "rows and columns attended to in turn": config.axial,
        "relative positions": config.positions == "relative",
        "positions that are added before every block": config.positions_at != "stem",
        "overlapping patches": config.stride != config.patch_size,
        "register tokens": config.registers > 0,
        f"pool = {config.pool}": config.pool not in pools,
        "a ResNet in front (a hybrid)": config.stem is not None and not hybrids,
        "a representation layer (leave it out with the head: head=false)": config.representation and not representation,
    }
    for what in (what for what, is_so in cannot.items() if is_so):
        raise UserError(f"{holder} cannot hold {what}; format = safetensors, onnx or torch_export can.")
    if config.positions != "learned":
        if model.positions is None:
            state["positions"] = torch.zeros(1, config.num_positions, config.width)
        else:
            state["positions"] = position.per_token(model.positions, config)
        config = replace(config, positions="learned")
    return config, state
