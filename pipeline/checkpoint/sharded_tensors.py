"""Tensors of a checkpoint, stored as the ranges that each writing rank owned.

`rank-*.bin` is raw little-endian fp32: for each state (weights, exp_avg, ...) the same ranges, concatenated; then the
ranges of constants, which no optimizer updates (frozen parameters, buffers) and which are the same in every state.
`index.json` lists them:

    {"shapes": {name: [int, ...]}, "states": ["weights", ...], "files": {file: [[name, start, length], ...]},
     "constants": {file: [[name, start, length], ...]}}

"constants" is left out if there are none. start and length count elements of the flattened tensor. On any number of
ranks, each reads only the ranges it owns.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.data.storage.bucket import AnyPath

if TYPE_CHECKING:  # The process that writes checkpoints starts without torch.
    from torch import Tensor

# Parts of flattened tensors: (name, first element, number of elements).
Ranges = list[tuple[str, int, int]]
# The states that are not the optimizer's: weights, and their exponential moving average.
WEIGHTS, EMA = "weights", "ema"
INDEX = "index.json"
BYTES = 4
_READ_AHEAD = 2**23
# Before and after the names of LoRA's factors: objective.lora.NAME/OF/LAYER.up.
_FACTORS, _ENDS = "objective.lora.", (".up", ".down", ".scale")
# Bytes of tensors that are read together, of up to 32 files; of more, so many more.
_BATCH, _FILES = 2**25, 32


class Range(NamedTuple):
    """Requests elements [start, start + len(out)) of a flattened tensor's state. out: float32 (n,), is filled."""

    state: str
    name: str
    start: int
    out: np.ndarray


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a checkpoint. ranges: (name, start, length). tensors: by state, one flat fp32 tensor per
    range.

    constant_ranges, constants: the same of tensors that no optimizer updates, of any floating-point type.
    """

    ranges: Ranges
    tensors: dict[str, Sequence["Tensor"]]
    constant_ranges: Ranges = field(default_factory=list)
    constants: Sequence["Tensor"] = ()

    @property
    def num_elements(self) -> int:
        return sum(tensor.numel() for tensor in self.all_tensors())

    def all_tensors(self) -> list["Tensor"]:
        """The tensors in the order of the rank's file."""
        return [tensor for tensors in self.tensors.values() for tensor in tensors] + list(self.constants)


@dataclass(frozen=True)
class CheckpointIndex:
    """Content of index.json. files: by file name, the ranges (name, start, length) of each state, in order.

    constants: those of tensors that have no states, which follow in the same file.
    """

    shapes: dict[str, list[int]]
    states: list[str]
    files: dict[str, Ranges]
    constants: dict[str, Ranges] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The content of index.json."""
        return {name: value for name, value in asdict(self).items() if name != "constants" or value}


@dataclass
class ShardedTensors:
    """The tensors of a checkpoint folder."""

    folder: AnyPath
    index: CheckpointIndex

    def __post_init__(self) -> None:
        # name -> (start, length, file, offset in the block of a state, elements of such a block), by start. A constant
        # is in no block of a state, and its offset is that in the file.
        self._ranges: dict[str, list[tuple[int, int, str, int, int]]] = defaultdict(list)
        for file, ranges in self.index.files.items():
            block, offset = sum(length for _, _, length in ranges), 0
            for name, start, length in ranges:
                self._ranges[name].append((start, length, file, offset, block))
                offset += length
            offset = block * len(self.states)
            for name, start, length in self.index.constants.get(file, []):
                self._ranges[name].append((start, length, file, offset, 0))
                offset += length
        for found in self._ranges.values():
            found.sort()

    @classmethod
    def open(cls, folder: AnyPath) -> "ShardedTensors":
        """Read the index of a checkpoint folder. Raises UserError if it is missing or damaged."""
        file = folder / INDEX
        try:
            index = json_record.parse(file.read_bytes(), CheckpointIndex, str(file))
        except FileNotFoundError:
            raise UserError(f"{file} is missing: {folder} is not a complete checkpoint.") from None
        return cls(folder, index)

    @property
    def states(self) -> list[str]:
        return self.index.states

    def check(self, shapes: dict[str, list[int]]) -> None:
        """Raise UserError, naming the first difference, unless the tensors have these shapes."""
        for name in [*shapes, *self.index.shapes]:
            here, there = shapes.get(name), self.index.shapes.get(name)
            if here != there:
                raise UserError(
                    f"{self.folder} is of another model: {name} has shape {there or 'none'} there, {here or 'none'}"
                    " here."
                )

    def read(self, wanted: Iterable[Range]) -> None:
        """Fill the arrays, reading each file sequentially."""
        reads: dict[str, list[tuple[int, np.ndarray]]] = defaultdict(list)
        for state, name, start, out in wanted:
            ranges, at = self._ranges[name], start
            i = max(bisect_right(ranges, start, key=lambda r: r[0]) - 1, 0)
            while at < start + len(out) and i < len(ranges) and ranges[i][0] <= at:
                begin, length, file, offset, block = ranges[i]
                end = min(begin + length, start + len(out))
                if end > at:
                    position = self.states.index(state) * block + offset + at - begin
                    reads[file].append((position, out[at - start : end - start]))
                    at = end
                i += 1
            if at != start + len(out):
                raise UserError(f"{self.folder} is damaged: it lacks {state} of {name} from element {at} on.")
        for file, parts in sorted(reads.items(), key=lambda item: item[0]):
            parts.sort(key=lambda part: part[0])
            last, out = parts[-1]
            with self._open(file, BYTES * (last - parts[0][0]) + out.nbytes) as stream:
                for position, out in parts:
                    stream.seek(position * BYTES)
                    if stream.readinto(out) != out.nbytes:  # type: ignore[attr-defined]
                        raise UserError(
                            f"{self.folder / file} is damaged: it ends before byte {position * BYTES + out.nbytes}."
                        )

    def _open(self, file: str, span: int) -> BinaryIO:
        """span: bytes from the first to the last that are wanted. Beyond, nothing is read."""
        try:
            return (self.folder / file).open("rb", buffering=min(_READ_AHEAD, span))
        except FileNotFoundError:
            raise UserError(f"{self.folder} is damaged: {file}, which {INDEX} names, is missing.") from None

    def full_tensors(self, state: str, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Return the tensors of one state, by name. names: of some of them; default: all."""
        shapes = {name: self.index.shapes[name] for name in (self.index.shapes if names is None else names)}
        flat = {name: np.empty(prod(shape), np.float32) for name, shape in shapes.items()}
        self.read(Range(state, name, 0, array) for name, array in flat.items())
        return {name: flat[name].reshape(shape) for name, shape in shapes.items()}

    def model_tensors(self, state: str) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the tensors of the model, `with_factors`, in the order of the index.

        Memory: a tensor, or several of _BATCH bytes together, so that few reads are small. At stage 3 a tensor is in
        the files of all ranks.
        """
        names, size = list[str](), 0
        most = _BATCH * max(1, len(self.index.files) // _FILES)
        for name in self.model_shapes():
            shape = self.index.shapes[name]
            if names and size + BYTES * prod(shape) > most:
                yield from with_factors(self.full_tensors(state, names)).items()
                names, size = [], 0
            factors = _FACTORS + stored_layer(name.removesuffix(".weight"))
            names += [name, *(factor for end in _ENDS if (factor := factors + end) in self.index.shapes)]
            size += BYTES * prod(shape)
        yield from with_factors(self.full_tensors(state, names)).items()

    def model_shapes(self) -> dict[str, list[int]]:
        """The shapes of `model_tensors`."""
        return {name: shape for name, shape in self.index.shapes.items() if not name.startswith(_FACTORS)}


def stored_layer(name: str) -> str:
    """The name of a layer, such as blocks.0.mlp.up, as a part of the names of its factors."""
    return name.replace(".", "/")


def with_factors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors without LoRA's factors, whose products are added to the weights of their layers
    (`objectives/parameters/trained.py`).
    """
    found = {name: array for name, array in tensors.items() if not name.startswith(_FACTORS)}
    for up in tensors.keys() - found.keys():
        if up.endswith(".up"):
            factors = up.removesuffix(".up")
            weight = f"{factors.removeprefix(_FACTORS).replace('/', '.')}.weight"
            found[weight] = found[weight] + tensors[f"{factors}.scale"] * (tensors[up] @ tensors[f"{factors}.down"])
    return found
