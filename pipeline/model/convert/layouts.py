"""The names and axes of other projects' tensors. Writing, reading and looking for a layer all follow from a table of
tables.toml, whose comments say what its entries mean.
"""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.architecture.config import ONLY_TRAIN, Config, Pool, ResNetConfig, ViTConfig
from pipeline.architecture.pixels import PerChannel
from pipeline.base.errors import UserError
from pipeline.model import position
from pipeline.model.build import build
from pipeline.model.convert.preprocessing import HALF, Json, Plain
from pipeline.model.resnet import ResNet
from pipeline.model.vit import VisionTransformer

TABLES: Plain = tomllib.loads(Path(__file__).with_name("tables.toml").read_text())
# A layer of ours -> the file's layer or layers.
Names = Plain
NAMES: dict[str, Names] = {}
for _kind, _own in TABLES["names"].items():
    NAMES[_kind] = NAMES.get(_own.get("like"), {}) | _own

Tensors = Mapping[str, Tensor]
State = dict[str, Tensor]
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# A layer of a block, or of a unit of a ResNet: kind of the list, its number, the layer's name in it.
_IN_LIST = re.compile(r"(?:stem\.|decoder_)?(blocks|units)\.(\d+)\.(.+)")
# Layers whose outputs, and those whose inputs, have the heads as an axis in Flax.
_TO_HEADS, _FROM_HEADS = ("attention.qkv", "pool.query", "pool.key_value"), ("attention.out", "pool.out")


@dataclass(frozen=True)
class ConfigFiles:
    """The configuration files in the folder of weights, as plain data; {} for a missing one."""

    config: Json = field(default_factory=dict)  # config.json
    processor: Json = field(default_factory=dict)  # preprocessor_config.json
    clip: Json = field(default_factory=dict)  # open_clip_config.json


@dataclass(frozen=True)
class DecoderFacts:
    """What the tensors of MAE's decoder do not tell; None if unknown.

    normalise: whether it predicts pixels minus the mean of their patch, divided by its deviation. mean, std: of the
    images whose pixels it predicts.
    """

    num_heads: int | None = None
    normalise: bool | None = None
    mean: tuple[float, float, float] = HALF
    std: tuple[float, float, float] = HALF


class Weights(NamedTuple):
    """A weights file in our terms."""

    config: Config
    state: State  # fp32, on the CPU
    extra: Plain  # plain data that belongs to the weights, such as "classes" and "preprocessing"
    notes: list[str]  # what was assumed, converted and left out, a line each
    mean: PerChannel = HALF  # of the images that the file's model reads, folded into the patch embedding here
    std: PerChannel = HALF
    added: Tensors = MappingProxyType({})  # by the objective that trained the model, not part of the model; fp32
    decoder: DecoderFacts = DecoderFacts()  # of MAE's, if `added` has one


class Layout:
    """Names and axes of the tensors in a file of one model.

    config: of the model; without it, names are those of a model with biases of keys, whose last norm is of all tokens,
    and those of a ResNet's units are not known.
    """

    def __init__(self, names: Names, config: Config | None = None):
        self.names, self.flax = dict(names), "flax" in names
        self.has_key_bias, self.num_heads = True, 1
        units = config.units if isinstance(config, ResNetConfig) else ()
        if isinstance(config, ViTConfig):
            # A bias of keys, where queries, keys and values are apart.
            self.has_key_bias, self.num_heads = config.qkv_bias != "qv", config.num_heads
            units = config.stem or ()
            if config.pool_norm:
                self.names["norm"] = names["pool_norm"]
        self.units = [(i + self.flax, j + self.flax) for i, count in enumerate(units) for j in range(count)]

    def keys(self, name: str) -> list[str]:
        """The keys in the file of one of our parameters, which has their rows; [] if it has no place there."""
        layer, part = _split(name)
        prefix = ""
        if match := _IN_LIST.fullmatch(layer):
            kind, number, layer = match[1], int(match[2]), match[3]
            prefix = self.names[kind].format(*(self.units[number] if kind == "units" else (number,)))
        found = self.names.get(layer, [])
        layers = found if isinstance(found, list) else [found]
        if part == "bias" and len(layers) == 3 and not self.has_key_bias:
            layers = layers[::2]
        if part and self.flax:
            suffixes = self.names.get("norm_suffixes", ("scale", "bias")) if "norm" in layer else ("kernel", "bias")
            part = f"/{suffixes[part == 'bias']}"
        elif part:
            part = f".{part}"
        return [f"{prefix}{one}{part}".replace("_.", "_") for one in layers]

    def write(self, state: Tensors) -> State:
        """Our state dict -> the file's tensors, fp32 on the CPU (shapes alone on the meta device), without shared
        memory.
        """
        tensors: State = {}
        for name, tensor in state.items():
            keys = self.keys(name)
            assert keys, f"{name} has no place in this format"
            for key, part in zip(keys, tensor.detach().chunk(len(keys)), strict=True):
                found = self._to_file(name, part.to("meta" if part.is_meta else "cpu", torch.float32))
                before = [tensors[key]] if key in tensors else []
                tensors[key] = torch.cat([*before, found]).contiguous()
        return tensors

    def read(self, tensors: Tensors, state: Tensors) -> State:
        """A file's tensors -> our state dict, fp32, which shares no memory with them.

        state: a state dict of ours with these names and shapes, perhaps on the meta device. Raises UserError
        (check_tensors).
        """
        check_tensors(tensors, {key: tuple(tensor.shape) for key, tensor in self.write(state).items()})
        found, rows = {}, Counter[str]()  # rows: number of those read of a tensor, of which several of ours have some
        for name, like in state.items():
            parts, keys = [], self.keys(name)
            shape = len(like) // len(keys), *like.shape[1:]
            for key in keys:
                tensor = tensors[key].float()
                if tensor.numel() > math.prod(shape):
                    tensor = tensor[rows[key] : rows[key] + shape[0]]
                    rows[key] += shape[0]
                parts.append(self._from_file(tensor, shape))
            found[name] = torch.cat(parts).contiguous()
        return found

    def _to_file(self, name: str, tensor: Tensor) -> Tensor:
        """In Flax a dense kernel is (inputs, outputs), a convolution HWIO, and the heads are an axis of their own."""
        layer, part = _split(name)
        if name in ("class_token", "positions"):
            return tensor.reshape(tensor.shape[1 + (name == "class_token") :]) if self.names.get("flat") else tensor
        if name == "head.weight" and "root" in self.names:  # of a BiT, a 1 x 1 convolution
            tensor = tensor[..., None, None]
        if not self.flax or not part:
            return tensor
        tensor = tensor.permute(2, 3, 1, 0) if tensor.ndim == 4 else tensor.movedim(0, -1)
        if layer.endswith(_TO_HEADS):
            return tensor.unflatten(-1, (self.num_heads, -1))
        return tensor.unflatten(0, (self.num_heads, -1)) if layer.endswith(_FROM_HEADS) and part == "weight" else tensor

    def _from_file(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self.flax and len(shape) == 4:  # HWIO -> OIHW
            return tensor.permute(3, 2, 0, 1)
        return tensor.reshape(shape[::-1]).T if self.flax and len(shape) == 2 else tensor.reshape(shape)


def _split(name: str) -> tuple[str, str]:
    """-> (layer, "weight" or "bias"); ("class_token", "") of a parameter that is not part of a layer."""
    layer, _, part = name.rpartition(".")
    return (layer, part) if part in ("weight", "bias") else (name, "")


def read_model(tensors: Tensors, config: Config, names: Names) -> State:
    """The state dict of a model of this configuration, from a file with these names. Raises UserError."""
    with torch.device("meta"):
        state = build(config).state_dict()
    return Layout(names, config).read(tensors, state)


def write_model(state: Tensors, config: Config, names: Names) -> State:
    """The tensors of a file with these names, of a model's state dict."""
    return Layout(names, config).write(state)


def check_tensors(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError unless there are exactly these tensors, with these shapes and finite values.

    The error names the key, the expected shape and what was found.
    """
    for key, shape in shapes.items():
        if key not in tensors:
            raise UserError(f'"{key}" {shape} is missing.')
        if tuple(tensors[key].shape) != shape:
            raise UserError(f'"{key}" should be {shape}, but is {tuple(tensors[key].shape)}.')
        check_values(key, tensors[key])
    if unexpected := sorted(tensors.keys() - shapes.keys()):
        key = unexpected[0]
        raise UserError(f'"{key}" {tuple(tensors[key].shape)} is not part of this model ({len(unexpected)} such).')


def check_values(key: str, tensor: Tensor) -> None:
    """Raise UserError unless the tensor holds finite floats."""
    if tensor.dtype not in _FLOATS:
        raise UserError(f'"{key}" should hold floats, but holds {str(tensor.dtype).removeprefix("torch.")}.')
    if not (finite := torch.isfinite(tensor.float())).all():  # In fp32, where a float64 of 1e300 is infinite.
        raise UserError(f'"{key}" {tuple(tensor.shape)} holds {int((~finite).sum())} NaN or Inf.')


def as_plain(
    model: VisionTransformer | ResNet,
    target: str,
    pools: Sequence[Pool],
    representation: bool = False,
    holds: frozenset[str] = frozenset(),
    cannot: Mapping[str, bool] = MappingProxyType({}),
) -> tuple[ViTConfig, State]:
    """(configuration, state dict) with one learned table of positions, which computes the same function.

    2-D and sine-cosine positions become such a table, and no positions become zeros unless RoPE takes their place, both
    bit for bit. target: name of the format, for errors. pools, representation, holds: what the format can hold, the
    last as fields of ViTConfig. cannot: what else it cannot, and whether the model has it. Raises UserError for a model
    that it cannot hold.
    """
    if isinstance(model, ResNet):
        raise UserError(f"{target} cannot hold a ResNet; format = safetensors can.")
    config, state = model.config, dict(model.state_dict())
    unsupported = {
        **cannot,
        "axial attention": config.axial,
        "relative positions": config.positions == "relative",
        "positions that are added before every block": config.positions_at != "stem",
        "register tokens": config.registers > 0 and "registers" not in holds,
        f"pool = {config.pool}": config.pool not in pools,
        "a ResNet stem (a hybrid)": config.stem is not None,
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


def move_patch_bias(state: State, num_patches: int) -> None:
    """Move the bias of the patch embedding, in place, into the positions of the patches, which are added to the same
    tokens.
    """
    positions = state["positions"].clone()
    positions[:, -num_patches:] += state.pop("patch_embedding.bias")
    state["positions"] = positions
