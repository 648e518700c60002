"""File formats as lists of entries. An entry is one tensor of a file and the part of our state dict that it holds.

Some files store query, key and value separately and others in one tensor: several entries of one name are the parts of
one parameter, and several of one key those of one tensor, in the order of rows.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.architecture.config import Config, ResNetConfig, ViTConfig
from pipeline.base.errors import UserError
from pipeline.model.build import build
from pipeline.model.convert.preprocessing import HALF, Json
from pipeline.model.convert.tables import Names

Tensors = Mapping[str, Tensor]
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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
    state: dict[str, Tensor]  # fp32, on the CPU
    extra: dict[str, Any]  # plain data that belongs to the weights, such as "classes" and "preprocessing"
    notes: list[str]  # what was assumed, converted and left out, a line each
    mean: tuple[float, ...] = HALF  # of the images that the file's model reads, folded into the patch embedding here
    std: tuple[float, ...] = HALF
    added: Tensors = MappingProxyType({})  # by the objective that trained the model, not part of the model; fp32
    decoder: DecoderFacts = DecoderFacts()  # of MAE's, if `added` has one


class Entry(NamedTuple):
    key: str  # in the file
    shape: tuple[int, ...]  # in the file
    name: str  # of our parameter
    torch_shape: tuple[int, ...]  # of this entry's part of our parameter


# A layer of a block, or of a unit of a ResNet: kind of the list, its number, the layer's name in it.
_IN_LIST = re.compile(r"(?:stem\.|decoder_)?(blocks|units)\.(\d+)\.(.+)")
# Layers whose outputs, and those whose inputs, have the heads as an axis in Flax.
_TO_HEADS, _FROM_HEADS = ("attention.qkv", "pool.query", "pool.key_value"), ("attention.out", "pool.out")


class Entries(list[Entry]):
    """All tensors in a file with these names, of a model of this configuration or of what an objective adds.

    state: our state dict, of which only shapes are read.
    """

    def __init__(self, state: Tensors, config: Config, names: Names):
        super().__init__()
        self.flax = names.get("flax", False)
        stages = config.units if isinstance(config, ResNetConfig) else config.stem or ()
        units = [(stage + self.flax, unit + self.flax) for stage, count in enumerate(stages) for unit in range(count)]
        for name, tensor in state.items():
            layer, _, part = name.rpartition(".")
            if part not in ("weight", "bias"):
                layer, part = name, ""
            prefix = ""
            if match := _IN_LIST.fullmatch(layer):
                kind, number, layer = match[1], int(match[2]), match[3]
                prefix = names[kind].format(*(units[number] if kind == "units" else (number,)))
            given = names[_variant(layer, config)]
            keys = given if isinstance(given, list) else [given]
            if part == "bias" and len(keys) == 3 and isinstance(config, ViTConfig) and config.qkv_bias == "qv":
                keys = [keys[0], keys[2]]
            if stages == ():
                keys = [key.replace("backbone.stem.", "backbone.") for key in keys]
            is_norm = bool(part) and state[f"{name.removesuffix(part)}weight"].ndim == 1
            shape = len(tensor) // len(keys), *tensor.shape[1:]
            for key in keys:
                in_file = self._shape(shape, name, layer, config, names)
                self.append(Entry(prefix + self._key(key, part, is_norm, names), in_file, name, shape))

    def _key(self, layer: str, part: str, is_norm: bool, names: Names) -> str:
        if not part:
            return layer
        if not self.flax:
            return part_key(layer, part)
        weight, bias = names.get("norm_suffixes", ("scale", "bias")) if is_norm else ("kernel", "bias")
        return f"{layer}/{weight if part == 'weight' else bias}"

    def _shape(self, shape: tuple[int, ...], name: str, layer: str, config: Config, names: Names) -> tuple[int, ...]:
        """In the file. In Flax a dense kernel is (inputs, outputs), a convolution HWIO, and the heads are an axis of
        their own.
        """
        if name in ("class_token", "positions"):
            return shape[1 + (name == "class_token") :] if names.get("flat") else shape
        if isinstance(config, ResNetConfig) and name == "head.weight":  # a 1 x 1 convolution
            return (1, 1, *shape[::-1]) if self.flax else (*shape, 1, 1)
        if not self.flax or name == "pool.probe":
            return shape
        if len(shape) == 4:
            return *shape[2:], shape[1], shape[0]
        outputs, inputs = shape[:1], shape[1:]
        if isinstance(config, ViTConfig):
            heads = config.num_heads, config.head_dim
            outputs = heads if layer in _TO_HEADS else outputs
            inputs = heads if layer in _FROM_HEADS and inputs else inputs
        return inputs + outputs

    def read(self, tensors: Tensors) -> dict[str, Tensor]:
        """A file's tensors -> our state dict, fp32, which shares no memory with them. Raises UserError
        (check_tensors).
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in self:
            before = shapes.get(entry.key)  # Another entry has the tensor's first rows.
            shapes[entry.key] = (before[0] + entry.shape[0], *entry.shape[1:]) if before else entry.shape
        check_tensors(tensors, shapes)
        parts: dict[str, list[Tensor]] = {}
        rows: dict[str, int] = {}  # number of rows read of each tensor that is in several entries
        for entry in self:
            tensor = tensors[entry.key].float()
            if shapes[entry.key] != entry.shape:
                row = rows.get(entry.key, 0)
                rows[entry.key] = row + entry.shape[0]
                tensor = tensor[row : rows[entry.key]]
            parts.setdefault(entry.name, []).append(self._to_torch(tensor, entry))
        return {name: torch.cat(found).contiguous() for name, found in parts.items()}

    def write(self, state: Tensors) -> dict[str, Tensor]:
        """Our state dict -> the file's tensors, fp32 on the CPU, in order and without shared memory."""
        tensors: dict[str, Tensor] = {}
        rows: dict[str, int] = {}  # number of rows written of each parameter
        for entry in self:
            row = rows.get(entry.name, 0)
            part = state[entry.name].detach()[row : row + entry.torch_shape[0]]
            rows[entry.name] = row + entry.torch_shape[0]
            tensor = self._to_file(part.to("cpu", torch.float32), entry)
            before = [tensors[entry.key]] if entry.key in tensors else []
            tensors[entry.key] = (
                torch.cat([*before, tensor]) if before else tensor.clone(memory_format=torch.contiguous_format)
            )
        assert {name: len(tensor) for name, tensor in state.items()} == rows, "every row of the state dict is written"
        return tensors

    def _to_torch(self, tensor: Tensor, entry: Entry) -> Tensor:
        if not self.flax or len(entry.torch_shape) not in (2, 4):
            return tensor.reshape(entry.torch_shape)
        if len(entry.torch_shape) == 4:  # HWIO -> OIHW
            return tensor.permute(3, 2, 0, 1)
        outputs, inputs = entry.torch_shape
        return tensor.reshape(inputs, outputs).T

    def _to_file(self, part: Tensor, entry: Entry) -> Tensor:
        if self.flax and part.ndim == 4:
            part = part.permute(2, 3, 1, 0)
        elif self.flax and part.ndim == 2:
            part = part.T
        return part.reshape(entry.shape)


def _variant(layer: str, config: Config) -> str:
    """The name of a layer in a table, where two layers of other files are one of ours."""
    if isinstance(config, ViTConfig) and config.swiglu and layer.startswith("mlp.") and not layer.endswith("scale"):
        return layer.replace("mlp.", "gated.")
    return "pool_norm" if layer == "norm" and isinstance(config, ViTConfig) and config.pool_norm else layer


def model_entries(config: Config, names: Names) -> Entries:
    """Every tensor of a model of this configuration, in a file with these names."""
    with torch.device("meta"):
        state = build(config).state_dict()
    if names.get("no_patch_bias"):
        del state["patch_embedding.bias"]
    return Entries(state, config, names)


def part_key(key: str, part: str) -> str:
    """The key of "weight" or "bias" of a layer in torch's files."""
    return f"{key}{part}" if key.endswith("_") else f"{key}.{part}"


def check_tensors(tensors: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError unless there are exactly these tensors, with these shapes and finite values.

    The error names the key, the expected shape and what was found.
    """
    for key, shape in shapes.items():
        if key not in tensors:
            raise UserError(f'"{key}" {shape} is missing.')
        tensor = tensors[key]
        if not isinstance(tensor, Tensor):
            raise UserError(f'"{key}" should be a tensor {shape}, but is {type(tensor).__name__}.')
        if tuple(tensor.shape) != shape:
            raise UserError(f'"{key}" should be {shape}, but is {tuple(tensor.shape)}.')
        check_values(key, tensor)
    unexpected = sorted(tensors.keys() - shapes.keys(), key=str)
    if unexpected:
        tensor = tensors[unexpected[0]]
        shape_found = f" {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else ""
        raise UserError(f'"{unexpected[0]}"{shape_found} is not part of this model ({len(unexpected)} such).')


def check_values(key: str, tensor: Tensor) -> None:
    """Raise UserError unless the tensor holds finite floats on the CPU."""
    if tensor.dtype not in _FLOATS:
        raise UserError(f'"{key}" should hold floats, but holds {str(tensor.dtype).removeprefix("torch.")}.')
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise UserError(f'"{key}" is not a dense tensor on the CPU, but {tensor.layout} on {tensor.device}.')
    if not (finite := torch.isfinite(tensor.float())).all():  # In fp32, where a float64 of 1e300 is infinite.
        raise UserError(f'"{key}" {tuple(tensor.shape)} holds {int((~finite).sum())} NaN or Inf.')


def key_pattern(template: str) -> str:
    """The regular expression of a key's template, a group of digits for each {...} in it."""
    return r"(\d+)".join(map(re.escape, re.split(r"\{.*?\}", template)))
