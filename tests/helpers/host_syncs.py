"""Finds where the host waits for the device, by looking at each operator that a block calls."""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
# A fake tensor's device is asked for by an operator: more than half of all.
_DEVICE = torch.ops.prim.device.default
# Their result's shape depends on the values; `equal` returns a bool.
_WAITING = {"nonzero", "masked_select", "unique_dim", "_unique", "_unique2", "unique_consecutive", "equal"}
_PRODUCTS = {"mm", "addmm", "convolution"}


class HostSyncs(TorchDispatchMode):
    """Counts operators that make the host wait for the device, by where they are called: "copy to cuda,
    train/file.py:function".

    A read of a value (`item`, `float`, `bool`), a copy between host and device that is not both non_blocking and of
    pinned memory, and an operator whose shape depends on values. A value of a fake tensor is unknown: 1 for a float,
    else 0. Does not see explicit synchronisation of streams and events, which a caller may `note`.

    products: number types that dense layers and convolutions read (not attention, of which a CPU's build has another
    kernel).
    """

    def __init__(self) -> None:
        super().__init__()
        self.found, self.products = Counter[str](), set[str]()
        self._pinned: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch would keep its compiler away from each operator: a wrapper that takes as
        long as this mode.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            self.products |= {str(leaf.dtype) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        if name in _WAITING and self._reads_ours(args, kwargs):
            self.note(name)
        if func is _aten._to_copy.default:
            target = kwargs.get("device") or args[0].device
            self._note_copy(args[0], torch.device(target), kwargs.get("non_blocking"))
        if func is _aten.copy_.default:
            self._note_copy(args[1], args[0].device, kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if func is _aten._pin_memory.default:  # A fake tensor cannot be pinned.
            self._pinned.append(args[0].clone())
            return self._pinned[-1]
        if func is not _aten._local_scalar_dense.default:
            return func(*args, **kwargs)
        if self._reads_ours(args, kwargs):
            self.note("read")
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return 1.0 if args[0].is_floating_point() else 0

    def _reads_ours(self, *given: Any) -> bool:
        """Whether a tensor among the arguments is on the device. A fake tensor's device is an operator, too: asked only
        where it counts.
        """
        return any(isinstance(leaf, Tensor) and leaf.device.type == "cuda" for leaf in tree_leaves(given))

    def _note_copy(self, source: Tensor, target: torch.device, non_blocking: Any) -> None:
        storage = source.untyped_storage()._cdata  # A view of pinned memory is pinned.
        is_pinned = any(tensor.untyped_storage()._cdata == storage for tensor in self._pinned)
        if source.device.type != target.type and not (non_blocking and (source.device.type != "cpu" or is_pinned)):
            self.note(f"copy to {target.type}")

    def note(self, what: str) -> None:
        """Count it for the innermost function that is neither torch's nor this file's."""
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename][:-2]
        while frames[-1].filename == __file__:
            frames.pop()
        self.found[f"{what}, {'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].name}"] += 1
