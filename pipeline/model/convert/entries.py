"""One tensor of a file and its place in our state. A list of them, `Entries`, is a file format: read and written by it.

Flax stores a dense kernel as (inputs, outputs), attention with its heads apart, and a convolution as HWIO; torch stores
(outputs, inputs), and OIHW. Some files fuse what others store apart (query, key, value); several entries of one name
are then the parts of one parameter, in the order of its rows.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.errors import UserError

Tensors = Mapping[str, Tensor]
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Entry(NamedTuple):
    key: str  # in the file
    shape: tuple[int, ...]  # in the file
    name: str  # of our parameter
    torch_shape: tuple[int, ...]  # of this entry's part of our parameter


class Entries(list[Entry]):
    """What a file of one architecture holds, no more, no less. flax: its axes and endings are flax's, else torch's."""

    def __init__(self, flax: bool):
        super().__init__()
        self.flax = flax

    def table(self, key: str, name: str, *shape: int) -> None:
        """A tensor that lies the same way everywhere."""
        self.append(Entry(key, shape, name, shape))

    def norm(self, key: str, name: str, width: int, flax_endings: tuple[str, str] = ("scale", "bias")) -> None:
        """A LayerNorm or GroupNorm."""
        for ours, flax in zip(("weight", "bias"), flax_endings, strict=True):
            self.table(f"{key}/{flax}" if self.flax else f"{key}.{ours}", f"{name}.{ours}", width)

    def dense(self, key: str, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        """A linear layer with a bias. Of flax's, inputs or outputs may lie apart, as (heads, of each)."""
        whole = math.prod(outputs), math.prod(inputs)
        if self.flax:
            self.append(Entry(f"{key}/kernel", inputs + outputs, f"{name}.weight", whole))
            self.append(Entry(f"{key}/bias", outputs, f"{name}.bias", whole[:1]))
        else:
            self.append(Entry(f"{key}.weight", whole, f"{name}.weight", whole))
            self.append(Entry(f"{key}.bias", whole[:1], f"{name}.bias", whole[:1]))

    def conv(self, key: str, name: str, inputs: int, outputs: int, side: int, bias: bool = False) -> None:
        """A convolution of side x side cells."""
        shape = (outputs, inputs, side, side)
        if self.flax:
            self.append(Entry(f"{key}/kernel", (side, side, inputs, outputs), f"{name}.weight", shape))
        else:
            self.append(Entry(f"{key}.weight", shape, f"{name}.weight", shape))
        if bias:
            self.table(f"{key}/bias" if self.flax else f"{key}.bias", f"{name}.bias", outputs)

    def read(self, tensors: Tensors) -> dict[str, Tensor]:
        """A file's tensors -> our state, fp32, which shares no memory with them.

        Raises UserError naming the key and the shapes, for what is missing, of another shape, not finite, or too much.
        """
        self._check(tensors)
        parts: dict[str, list[Tensor]] = {}
        for entry in self:
            parts.setdefault(entry.name, []).append(self._to_torch(tensors[entry.key].float(), entry))
        return {name: torch.cat(found).contiguous() for name, found in parts.items()}

    def write(self, state: Tensors) -> dict[str, Tensor]:
        """Our state -> the file's tensors, fp32 on the CPU, in order and each with memory of its own."""
        tensors: dict[str, Tensor] = {}
        rows: dict[str, int] = {}  # of each parameter, how many are written
        for entry in self:
            row = rows.get(entry.name, 0)
            part = state[entry.name].detach()[row : row + entry.torch_shape[0]]
            rows[entry.name] = row + entry.torch_shape[0]
            tensors[entry.key] = self._to_file(part.to("cpu", torch.float32), entry).clone(
                memory_format=torch.contiguous_format
            )
        assert {name: len(tensor) for name, tensor in state.items()} == rows, "every row of the state is written"
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

    def _check(self, tensors: Tensors) -> None:
        for entry in self:
            if entry.key not in tensors:
                raise UserError(f'"{entry.key}" {entry.shape} is missing.')
            tensor = tensors[entry.key]
            if tuple(tensor.shape) != entry.shape:
                raise UserError(f'"{entry.key}" should be {entry.shape}, but is {tuple(tensor.shape)}.')
            check_values(entry.key, tensor)
        unexpected = sorted(tensors.keys() - {entry.key for entry in self})
        if unexpected:
            found = tuple(tensors[unexpected[0]].shape)
            raise UserError(f'"{unexpected[0]}" {found} is not part of this model ({len(unexpected)} such).')


def check_values(key: str, tensor: Tensor) -> None:
    """Raise UserError for a tensor of anything but finite floats, all of which its file holds."""
    if tensor.dtype not in _FLOATS:
        raise UserError(f'"{key}" should hold floats, but holds {str(tensor.dtype).removeprefix("torch.")}.')
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise UserError(f'"{key}" is no plain tensor ({tensor.layout} on {tensor.device}).')
    # A stride of 0 lets a few bytes claim to be any number of values.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UserError(f'"{key}" {tuple(tensor.shape)} claims more values than the file holds.')
    if not (finite := torch.isfinite(tensor.float())).all():  # As fp32: a float64 of 1e300 is infinite there.
        raise UserError(f'"{key}" {tuple(tensor.shape)} holds {int((~finite).sum())} NaN or Inf.')
