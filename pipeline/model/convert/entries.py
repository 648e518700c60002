"""File formats as lists of entries. An entry is one tensor of a file and the part of our state dict that it holds.

Flax stores a dense kernel as (inputs, outputs), attention with the heads as an axis of their own, and a convolution as HWIO;
torch stores (outputs, inputs) and OIHW. Some files store query, key and value separately and others in one tensor: several
entries of one name are the parts of one parameter, and several of one key those of one tensor, in the order of rows.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.architecture.config import Config
from pipeline.base.errors import UserError
from pipeline.model.convert.preprocessing import HALF, Json

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

    normalise: whether it predicts pixels minus the mean of their patch, divided by its deviation. mean, std: of the images whose
    pixels it predicts.
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
    added: Tensors = MappingProxyType({})  # by the objective that trained the model, of which it is no part; fp32
    decoder: DecoderFacts = DecoderFacts()  # of MAE's, if `added` has one


class Entry(NamedTuple):
    key: str  # in the file
    shape: tuple[int, ...]  # in the file
    name: str  # of our parameter
    torch_shape: tuple[int, ...]  # of this entry's part of our parameter


class Entries(list[Entry]):
    """All tensors in a file of one architecture. flax: the file has Flax's axes and key suffixes, else torch's."""

    def __init__(self, flax: bool):
        super().__init__()
        self.flax = flax

    def table(self, key: str, name: str, *shape: int) -> None:
        """A tensor of the same shape in the file and in our state dict."""
        self.append(Entry(key, shape, name, shape))

    def norm(self, key: str, name: str, width: int, flax_suffixes: tuple[str, str] = ("scale", "bias")) -> None:
        """A LayerNorm or GroupNorm."""
        for ours, flax in zip(("weight", "bias"), flax_suffixes, strict=True):
            self.table(f"{key}/{flax}" if self.flax else part_key(key, ours), f"{name}.{ours}", width)

    def dense(
        self,
        key: str,
        name: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        biases: tuple[int, ...] | None = None,
    ) -> None:
        """A linear layer. In Flax inputs or outputs may have two axes, (heads, head width).

        biases: shape of its bias; None is that of the outputs, and (0,) is none.
        """
        self._kernel(key, name, inputs + outputs, (math.prod(outputs), math.prod(inputs)))
        biases = outputs if biases is None else biases
        if rows := math.prod(biases):
            self.append(Entry(self._bias(key), biases if self.flax else (rows,), f"{name}.bias", (rows,)))

    def conv(self, key: str, name: str, inputs: int, outputs: int, side: int, bias: bool = False) -> None:
        """A convolution with a kernel of side x side."""
        self._kernel(key, name, (side, side, inputs, outputs), (outputs, inputs, side, side))
        if bias:
            self.table(self._bias(key), f"{name}.bias", outputs)

    def _kernel(self, key: str, name: str, flax_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
        in_file = (f"{key}/kernel", flax_shape) if self.flax else (part_key(key, "weight"), shape)
        self.append(Entry(*in_file, f"{name}.weight", shape))

    def _bias(self, key: str) -> str:
        return f"{key}/bias" if self.flax else part_key(key, "bias")

    def read(self, tensors: Tensors) -> dict[str, Tensor]:
        """A file's tensors -> our state dict, fp32, which shares no memory with them. Raises UserError (check_tensors)."""
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
