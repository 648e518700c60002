"""Counts the bytes of live tensors while a block runs: what torch.cuda.max_memory_allocated would say, on a CPU."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.model.vit import PatchEmbedding


class LiveTensors(TorchDispatchMode):
    """bytes: of all storages that operators have met and that live. peak: the most since `restart`."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.peak = 0, 0
        self.sizes: dict[int, int] = {}

    def restart(self) -> None:
        self.peak = self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((out, args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._meet(leaf.untyped_storage())
        return out

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.sizes and size:
            weakref.finalize(storage, self._forget, key).atexit = False
        self.bytes += size - self.sizes.get(key, 0)
        if size:
            self.sizes[key] = size
        self.peak = max(self.peak, self.bytes)

    def _forget(self, key: int) -> None:
        self.bytes -= self.sizes.pop(key, 0)


@contextmanager
def operators_of_a_gpu() -> Iterator[None]:
    """Dropout with a mask of bytes, as on a GPU, where the CPU's keeps one float for each element; and the product that
    embeds patches there.
    """
    kept, convolved_on = nn.Dropout.forward, PatchEmbedding.convolved_on
    PatchEmbedding.convolved_on = ()
    nn.Dropout.forward = lambda self, x: torch.native_dropout(x, self.p, True)[0] if self.p else x  # type: ignore
    try:
        yield
    finally:
        nn.Dropout.forward = kept  # type: ignore[method-assign]
        PatchEmbedding.convolved_on = convolved_on
