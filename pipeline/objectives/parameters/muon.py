"""Muon: momentum whose matrices are made orthogonal before each update; AdamW for all but kernels of hidden layers.

The coefficients are Keller Jordan's ("Muon: An optimizer for hidden layers in neural networks", 2024). The scale
0.2 sqrt(max(rows, columns)) gives updates the root mean square of AdamW's, so both use the same learning rate and
weight decay (Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.2).

Under ZeRO 1 and 2 a rank updates a range of all parameters, which can begin and end within a matrix. Momentum is kept
for the range only. Matrices that are cut are put together from the ranks' parts before they are made orthogonal, and no
others, so ranks communicate at most the parameters.

On a GPU, whose host can take longer to launch the kernels for one matrix than the GPU to run them, a rank makes its
matrices of equal shape orthogonal together. Another number of matrices may be multiplied by another kernel, so the last
bits of an update can depend on which matrices a rank holds: on the number of ranks and the ZeRO stage, which change the
sums of gradients anyway.

DeepSpeed has a Muon of its own, which reports and clips the norm of the update instead of the gradient's, and which
BF16_Optimizer (stage 1 in bf16) does not apply.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

_A, _B, _C, _STEPS = 3.4445, -4.7750, 2.0315, 5
_MOMENTUM = 0.95

# Most elements of several matrices that are made orthogonal together, by type of device.
# In bf16 they have 32 MiB, which a GPU takes longer to read and write than its host to launch a kernel, and all
# temporary tensors at most 256 MiB.
BATCH_ELEMENTS = {"cuda": 2**24}

# (name of a parameter, number of the kernel in it)
Kernel = tuple[str, int]
# Elements [start, start + length) of a parameter are at [offset, offset + length) of a flat tensor: (name, start,
# length, offset).
Place = tuple[str, int, int, int]


class _Piece(NamedTuple):
    """Elements [start, start + length) of a kernel of `shape` are at [offset, offset + length) of a flat tensor."""

    kernel: Kernel
    shape: tuple[int, int]
    start: int
    length: int
    offset: int


class _Update(NamedTuple):
    """The elements of `matrix` from `start` on, once it is orthogonal, are added to the flat `weights`, times
    `factor`.
    """

    matrix: Tensor
    start: int
    weights: Tensor
    factor: float


class Muon(torch.optim.AdamW):
    """AdamW, but groups with "matrices" are updated by Muon. kernels: name of each of their parameters, and how many
    kernels it has.
    """

    def __init__(self, groups: list[dict[str, Any]], kernels: Mapping[Tensor, tuple[str, int]], **adam: Any) -> None:
        super().__init__(groups, **adam)
        self._pieces: dict[Tensor, list[_Piece]] = {}
        # Shapes of the kernels of a flat tensor that a rank holds a part of, in the order that all ranks know.
        self._cut: dict[Tensor, dict[Kernel, tuple[int, int]]] = {}
        # Number of the kernels in a parameter, and rows and columns of each: a convolution's has a row for each output
        # channel.
        self._kernels = {name: (n, (p.shape[0] // n, p[0].numel())) for p, (name, n) in kernels.items()}
        self.lay_out({p: [(name, 0, p.numel(), 0)] for p, (name, _) in kernels.items()}, lambda found: [found])

    def lay_out(self, places: Mapping[Tensor, Iterable[Place]], gather: Callable[[Any], list[Any]]) -> None:
        """Set which elements each tensor holds that this optimizer updates. gather: from all ranks. Collective.

        places: of each tensor, in the same order on all ranks.
        """
        self._pieces = {
            flat: [p for place in there for p in _pieces(place, self._kernels)] for flat, there in places.items()
        }
        cut = [{p.kernel: p.shape for p in pieces if p.length < math.prod(p.shape)} for pieces in self._pieces.values()]
        for flat, *found in zip(self._pieces, *gather(cut), strict=True):
            self._cut[flat] = dict(sorted({kernel: shape for one in found for kernel, shape in one.items()}.items()))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["matrices"]]
            super().step()
        finally:
            self.param_groups = groups
        updates = (
            update
            for group in groups
            for flat in (group["params"] if group["matrices"] else ())
            if flat.grad is not None
            for update in self._updates(flat, group["lr"], group["weight_decay"])
        )
        for batch in _batches(updates):
            matrices = [update.matrix for update in batch]
            # One matrix has no third dimension, because a CPU's products of batches have other bits.
            results = orthogonal(torch.stack(matrices)) if len(batch) > 1 else [orthogonal(matrices[0])]
            for update, result in zip(batch, results, strict=True):
                own = result.reshape(-1).narrow(0, update.start, update.weights.numel())
                update.weights.add_(own, alpha=update.factor)

    def _updates(self, flat: Tensor, lr: float, weight_decay: float) -> Iterator[_Update]:
        """Update the momentum, decay the weights, and yield what is to be added to them."""
        state = self.state[flat]
        if not state:
            state["exp_avg"] = torch.zeros_like(flat, memory_format=torch.preserve_format)
        assert flat.grad is not None
        state["exp_avg"].lerp_(flat.grad, 1 - _MOMENTUM)
        if (
            flat not in self._pieces
        ):  # DeepSpeed steps once before it is known what its tensors hold, to create the states.
            return
        direction = flat.grad.lerp(state["exp_avg"], _MOMENTUM).view(-1)  # Nesterov's
        whole = self._put_together(flat, direction)
        flat.mul_(1 - lr * weight_decay)
        weights = flat.view(-1)
        for piece in self._pieces[flat]:
            matrix = whole.get(piece.kernel)
            if matrix is None:
                matrix = direction.narrow(0, piece.offset, piece.length).view(piece.shape)
            own = weights.narrow(0, piece.offset, piece.length)
            yield _Update(matrix, piece.start, own, -lr * 0.2 * max(piece.shape) ** 0.5)

    def _put_together(self, flat: Tensor, direction: Tensor) -> dict[Kernel, Tensor]:
        """The matrices of which some rank holds a part, from all ranks. Collective if there are any."""
        if not (cut := self._cut[flat]):
            return {}
        sizes = [math.prod(shape) for shape in cut.values()]
        total = direction.new_zeros(sum(sizes))
        parts = dict(zip(cut, total.split(sizes), strict=True))
        for piece in self._pieces[flat]:
            if piece.kernel in cut:
                own = direction.narrow(0, piece.offset, piece.length)
                parts[piece.kernel].narrow(0, piece.start, piece.length).copy_(own)
        distributed.all_reduce(total)  # Each element is of one rank, and 0 on the others.
        return {kernel: part.view(cut[kernel]) for kernel, part in parts.items()}


def _batches(updates: Iterable[_Update]) -> Iterator[list[_Update]]:
    """Yields updates whose matrices are made orthogonal together: of equal shape, and at most BATCH_ELEMENTS, or
    one.
    """
    waiting: dict[torch.Size, list[_Update]] = {}
    for update in updates:
        shape = update.matrix.shape
        batch = waiting.setdefault(shape, [])
        batch.append(update)
        if (len(batch) + 1) * shape.numel() > BATCH_ELEMENTS.get(update.matrix.device.type, 0):
            yield waiting.pop(shape)
    yield from waiting.values()


def _pieces(place: Place, kernels: Mapping[str, tuple[int, tuple[int, int]]]) -> Iterable[_Piece]:
    """The parts of kernels that a place holds."""
    name, start, length, offset = place
    count, shape = kernels.get(name, (0, (0, 0)))
    size = shape[0] * shape[1]
    for number in range(count):
        begin, end = max(start, number * size), min(start + length, (number + 1) * size)
        if begin < end:
            yield _Piece((name, number), shape, begin - number * size, end - begin, offset + begin - start)


def orthogonal(matrix: Tensor) -> Tensor:
    """(m, n) or (batch, m, n) -> same, float32: about U V^T of each singular value decomposition U S V^T, with singular
    values from 0.7 to 1.2.

    Five steps of a Newton-Schulz iteration, in bf16 on a GPU, as published, and in fp32 elsewhere.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    X = matrix / (torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True) + 1e-7)
    X = (X.mT if is_tall else X).to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    # Three kernels for an iteration: with few, small matrices a GPU waits for the host to launch them.
    product, added = (torch.mm, torch.addmm) if X.ndim == 2 else (torch.bmm, torch.baddbmm)
    for _ in range(_STEPS):
        squared = product(X, X.mT)
        X = added(X, added(squared, squared, squared, beta=_B, alpha=_C), X, beta=_A)
    return (X.mT if is_tall else X).float()
