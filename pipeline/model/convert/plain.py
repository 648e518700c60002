"""Converts our ViTs to the form that other projects' files can hold, or refuses those that they cannot hold."""

from dataclasses import replace

import torch
from torch import Tensor

from pipeline.architecture.config import ONLY_TRAIN, Pool, ViTConfig
from pipeline.base.errors import UserError
from pipeline.model import position
from pipeline.model.vit import VisionTransformer


def as_plain(
    model: VisionTransformer,
    target: str,
    pools: tuple[Pool, ...],
    hybrids: bool,
    representation: bool,
    holds: frozenset[str] = frozenset(),
) -> tuple[ViTConfig, dict[str, Tensor]]:
    """(configuration, state dict) with one learned table of positions, which computes the same function.

    2-D and sine-cosine positions become such a table, and no positions become zeros unless RoPE takes their place, both
    bit for bit. target: name of the format, for errors. pools, hybrids, representation, holds: what the format can
    hold, the last as fields of ViTConfig. Raises UserError for a model that it cannot hold.
    """
    config, state = model.config, dict(model.state_dict())
    unsupported = {
        "axial attention": config.axial,
        "relative positions": config.positions == "relative",
        "positions that are added before every block": config.positions_at != "stem",
        "register tokens": config.registers > 0 and "registers" not in holds,
        f"pool = {config.pool}": config.pool not in pools,
        "a ResNet stem (a hybrid)": config.stem is not None and not hybrids,
        "a representation layer (leave it out with the head: head=false)": config.representation and not representation,
    }
    harmless = {"registers", "kernel"} | holds | set(ONLY_TRAIN)
    unsupported |= {f"{name} = {value}": name not in harmless for name, value in config.added().items()}
    for feature in (feature for feature, is_present in unsupported.items() if is_present):
        raise UserError(f"{target} cannot hold {feature}; format = safetensors or onnx can.")
    if config.positions != "learned" and not (config.positions == "none" and config.rope_base is not None):
        if model.positions is None:
            state["positions"] = torch.zeros(1, config.num_positions, config.width)
        else:
            state["positions"] = position.per_token(model.positions, config)
        config = replace(config, positions="learned")
    return config, state


def move_patch_bias(state: dict[str, Tensor], num_patches: int) -> None:
    """Move the bias of the patch embedding, in place, into the positions of the patches, which are added to the same
    tokens.
    """
    positions = state["positions"].clone()
    positions[:, -num_patches:] += state.pop("patch_embedding.bias")
    state["positions"] = positions
