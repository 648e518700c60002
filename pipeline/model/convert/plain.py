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

    2-D and sine-cosine positions become such a table, and no positions become zeros unless RoPE takes their place, both bit for
    bit. Where the format has no place for it, LayerScale is folded into the layers that it scales, and missing biases become
    zeros. target: name of the format, for errors. pools, hybrids, representation, holds: what the format can hold, the last as
    fields of ViTConfig. Raises UserError for a model that it cannot hold.
    """
    config, state = model.config, dict(model.state_dict())
    unsupported = {
        "axial attention": config.axial,
        "relative positions": config.positions == "relative",
        "positions that are added before every block": config.positions_at != "stem",
        "overlapping patches": config.stride != config.patch_size,
        "register tokens": config.registers > 0 and "registers" not in holds,
        f"pool = {config.pool}": config.pool not in pools,
        "a ResNet stem (a hybrid)": config.stem is not None and not hybrids,
        "a representation layer (leave it out with the head: head=false)": config.representation and not representation,
    }
    if "layer_scale" not in holds and config.layer_scale is not None:
        config, state = replace(config, layer_scale=None), _fold_layer_scale(state)
    for field in ("qkv_bias", "out_bias", "mlp_bias"):
        if field not in holds:
            config = replace(config, **{field: getattr(ViTConfig, field)})
    _add_biases(state, config)
    harmless = {"registers", "kernel"} | holds | set(ONLY_TRAIN)
    unsupported |= {f"{name} = {value}": name not in harmless for name, value in config.added().items()}
    for feature in (feature for feature, is_present in unsupported.items() if is_present):
        raise UserError(f"{target} cannot hold {feature}; format = safetensors, onnx or torch_export can.")
    if config.positions != "learned" and not (config.positions == "none" and config.rope_base is not None):
        if model.positions is None:
            state["positions"] = torch.zeros(1, config.num_positions, config.width)
        else:
            state["positions"] = position.per_token(model.positions, config)
        config = replace(config, positions="learned")
    return config, state


def _fold_layer_scale(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a model whose layers with LayerScale are plain ones that compute the same, but for rounding."""
    folded = {name: tensor for name, tensor in state.items() if not name.endswith(".scale")}
    for name, scale in (
        (n.removesuffix(".scale"), tensor.double()) for n, tensor in state.items() if n.endswith(".scale")
    ):
        folded[f"{name}.weight"] = (state[f"{name}.weight"].double() * scale[:, None]).float()
        if f"{name}.bias" in state:
            folded[f"{name}.bias"] = (state[f"{name}.bias"].double() * scale).float()
    return folded


def _add_biases(state: dict[str, Tensor], config: ViTConfig) -> None:
    """Add zeros, in place, for biases that the configuration has and the state dict has not."""
    layers = {"attention.qkv": config.qkv_bias == "qkv", "attention.out": config.out_bias}
    layers |= {"mlp.up": config.mlp_bias, "mlp.down": config.mlp_bias}
    for name in [f"blocks.{i}.{layer}" for i in range(config.depth) for layer, has_bias in layers.items() if has_bias]:
        kernel, bias = state[f"{name}.weight"], state.get(f"{name}.bias")
        if bias is None:
            state[f"{name}.bias"] = kernel.new_zeros(len(kernel))
        elif len(bias) < len(kernel):  # of q and v only
            q, v = bias.chunk(2)
            state[f"{name}.bias"] = torch.cat([q, torch.zeros_like(q), v])


def move_patch_bias(state: dict[str, Tensor], num_patches: int) -> None:
    """Move the bias of the patch embedding, in place, into the positions of the patches, which are added to the same tokens."""
    positions = state["positions"].clone()
    positions[:, -num_patches:] += state.pop("patch_embedding.bias")
    state["positions"] = positions
