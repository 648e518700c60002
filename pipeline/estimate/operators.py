"""Counts the memory traffic of a training pass, operator by operator, on the meta device: no arithmetic, no memory.

The model's own forward and backward pass runs there, as PyTorch runs it without compiling: each operator reads its inputs from
the GPU's memory and writes its outputs.
"""

from collections import Counter
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.estimate.activations import OperatorsOfAGpu, meta_inputs
from pipeline.model import Config, ViTConfig, build
from pipeline.objectives import on_meta

MATRICES, ATTENTION, NORMS, GELU, OTHER = "matrix products", "attention", "norms", "GELU", "other"
# Operators whose name contains a word belong to its class.
_CLASSES = {
    "mm": MATRICES,
    "convolution": MATRICES,
    "norm": NORMS,
    "gelu": GELU,
    "tanh": GELU,
    "silu": GELU,  # of SwiGLU
}
_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"}


class Traffic(NamedTuple):
    """Memory traffic of the forward or the backward pass of one micro-batch: bytes by class of operator, number of kernels."""

    bytes: dict[str, int]
    kernels: int


def traffic(config: Config, micro_batch: int, dtype: torch.dtype) -> tuple[Traffic, Traffic]:
    """Returns the traffic of the forward and of the backward pass of `micro_batch` images."""
    # Weights are read once however many images there are, and kernels are launched once; the rest grows with them.
    counts = [on_meta.of_depth(config, partial(_count, images=images, dtype=dtype)) for images in (1, 2)]
    found = zip(on_meta.through((1, 2), counts, micro_batch), counts[0], strict=True)
    forward, backward = (grown._replace(kernels=of_one.kernels) for grown, of_one in found)
    return forward, backward


@cache
def _count(config: Config, images: int, dtype: torch.dtype) -> tuple[Traffic, Traffic]:
    with torch.device("meta"):
        model = build(config).to(dtype)
    with OperatorsOfAGpu():
        with _Counting() as forward:
            logits = model(*meta_inputs(config, images, dtype))
        with _Counting() as backward:
            logits.backward(torch.empty_like(logits))
    if isinstance(config, ViTConfig):
        # The fused kernel reads q, k and v and writes its output; backward reads these and a gradient and writes three.
        tensor = images * config.num_tokens * config.width * dtype.itemsize * config.num_blocks
        forward.bytes[ATTENTION], backward.bytes[ATTENTION] = 4 * tensor, 8 * tensor
        forward.kernels, backward.kernels = forward.kernels + config.num_blocks, backward.kernels + config.num_blocks
    kinds = (MATRICES, ATTENTION, NORMS, GELU, OTHER)
    return tuple(Traffic({kind: part.bytes[kind] for kind in kinds}, part.kernels) for part in (forward, backward))  # type: ignore[return-value]


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._opname
        if func.is_view or name in _FREE:
            return out
        kind = next((kind for word, kind in _CLASSES.items() if word in name), OTHER)
        # An expanded tensor is as large as its storage, a slice of one as its elements.
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        self.bytes[kind] += sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)
        self.kernels += 1
        return out
