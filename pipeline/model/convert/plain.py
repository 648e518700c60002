"""Converts our ViTs to the form that other projects' files can hold, or refuses those that they cannot hold."""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from pipeline.architecture.config import OPTIONS, Pool, ViTConfig
from pipeline.base.errors import UserError
from pipeline.model import position
from pipeline.model.build import build
from pipeline.model.vit import VisionTransformer


def without_layer_scale(model: VisionTransformer) -> VisionTransformer:
    """A model without LayerScale that computes the same, up to rounding: the factors are folded into the layers that they scale.

    The product is computed in float64. Returns the model itself if it has no LayerScale.
    """
    if model.config.layer_scale is None:
        return model
    state = dict(model.state_dict())
    for name in [name for name in state if name.endswith(".scale")]:
        layer, scale = name.removesuffix(".scale"), state.pop(name).double()
        state[f"{layer}.weight"] = state[f"{layer}.weight"].double() * scale[:, None]
        if f"{layer}.bias" in state:
            state[f"{layer}.bias"] = state[f"{layer}.bias"].double() * scale
    plain = build(replace(model.config, layer_scale=None))
    plain.load_state_dict(state)
    return cast(VisionTransformer, plain.train(model.training))


def as_plain(
    model: VisionTransformer, target: str, pools: tuple[Pool, ...], hybrids: bool, representation: bool
) -> tuple[ViTConfig, dict[str, Tensor]]:
    """(configuration, state dict) with one learned table of positions, which computes the same function bit for bit.

    2-D and sine-cosine positions become such a table, and no positions become zeros. target: name of the format, for errors.
    pools, hybrids, representation: what the format can hold. Raises UserError for a model that it cannot hold.
    """
    config, state = model.config, dict(model.state_dict())
    unsupported = {
        "axial attention": config.axial,
        "relative positions": config.positions == "relative",
        "positions that are added before every block": config.positions_at != "stem",
        "overlapping patches": config.stride != config.patch_size,
        "LayerScale (fold it: fold_layer_scale=true)": config.layer_scale is not None,
        "register tokens": config.registers > 0,
        f"pool = {config.pool}": config.pool not in pools,
        "a ResNet stem (a hybrid)": config.stem is not None and not hybrids,
        "a representation layer (leave it out with the head: head=false)": config.representation and not representation,
    }
    harmless = {"registers", "kernel", "layer_scale"} | {name for name, option in OPTIONS.items() if option.only_trains}
    unsupported |= {f"{name} = {value}": name not in harmless for name, value in config.added().items()}
    for feature in (feature for feature, is_present in unsupported.items() if is_present):
        raise UserError(f"{target} cannot hold {feature}; format = safetensors, onnx or torch_export can.")
    if config.positions != "learned":
        if model.positions is None:
            state["positions"] = torch.zeros(1, config.num_positions, config.width)
        else:
            state["positions"] = position.per_token(model.positions, config)
        config = replace(config, positions="learned")
    return config, state
