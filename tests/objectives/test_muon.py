"""Muon: torch's own with its scale, kernels on their own, any cut of the matrices over ranks, and AdamW for the
rest.
"""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from pipeline.model import build, configure
from pipeline.objectives.classification import Classification
from pipeline.objectives.parameters import optimizers
from pipeline.objectives.parameters.muon import BATCH_ELEMENTS, Muon, orthogonal
from pipeline.settings.run import OptimizerConfig

CONFIG = OptimizerConfig(name="muon", lr=0.02, weight_decay=0.1)


def objective() -> Classification:
    """With a gated MLP, whose first layer is two kernels, as that of queries, keys and values is three."""
    return Classification(build(configure("ViT-mu/8", 16, 5, swiglu=True), seed=3), "softmax")


def gradients(model: Classification, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (16, 16)])
def test_singular_values_become_alike(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() <= values.max() < 1.25
    inner = u.T @ found @ v.T  # Diagonal: the singular vectors are the same.
    torch.testing.assert_close(inner, inner.diagonal().diag(), atol=1e-4, rtol=0)
    assert not orthogonal(torch.zeros(shape)).any()


def test_steps_are_those_of_torch_and_of_adam() -> None:
    ours, theirs = objective(), objective()
    optimizer = optimizers.build(ours, ours.decayed(), CONFIG)
    names = optimizers.matrices(theirs, theirs.decayed())
    assert {name.split(".", 3)[-1] for name in names} == {
        "attention.qkv.weight",
        "attention.out.weight",
        "mlp.up.weight",
        "mlp.down.weight",
    }
    named = dict(theirs.named_parameters())
    # torch knows no kernels in a weight, so its parameters are views.
    kernels = {
        (name, i): torch.nn.Parameter(part.detach())
        for name in names
        for i, part in enumerate(named[name].chunk(names[name]))
    }
    reference = torch.optim.Muon(kernels.values(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = [
        {
            "params": [p for n, p in named.items() if n not in names and (n in theirs.decayed()) is flag],
            "weight_decay": wd,
        }
        for flag, wd in ((True, 0.1), (False, 0.0))
    ]
    adam = torch.optim.AdamW(rest, lr=0.02)
    for step in range(3):
        gradients(ours, step)
        gradients(theirs, step)
        for (name, i), kernel in kernels.items():
            kernel.grad = named[name].grad.chunk(names[name])[i]
        for one in (optimizer, reference, adam):
            one.step()
    for name, parameter in ours.named_parameters():
        # torch's computes in bf16.
        tolerance = {"rtol": 0, "atol": 2e-3} if name in names else {"rtol": 1e-6, "atol": 1e-7}
        torch.testing.assert_close(parameter, named[name], **tolerance, msg=name)
    assert set(optimizer.state[named_of(ours, "backbone.blocks.0.mlp.up.weight")]) == {"exp_avg"}


def named_of(model: Classification, name: str) -> Tensor:
    return dict(model.named_parameters())[name]


# Elements of matrices that are made orthogonal together: each alone, three at a time, and all of equal shape.
@pytest.mark.parametrize("elements", [0, 3 * 32 * 32, 2**24])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_any_cut_of_the_matrices_gives_the_same_step(
    world_size: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are threads, which hold consecutive ranges of all matrices, as at ZeRO 1 and 2."""
    model = objective()
    whole = optimizers.build(model, model.decayed(), CONFIG)
    kernels = optimizers.matrices(model, model.decayed())
    names = sorted(kernels)
    parameters = [named_of(model, name) for name in names]
    gradients(model, 0)
    weights, grads = (
        torch.cat([t.detach().view(-1) for t in them]) for them in (parameters, [p.grad for p in parameters])
    )
    size = -(-len(weights) // world_size)
    meet, gathered, lock = threading.Barrier(world_size), {}, threading.Lock()
    found: dict[int, Tensor] = {}

    def exchange(rank: int, value: Any) -> list[Any]:
        with lock:
            gathered[rank] = value
        meet.wait()
        every = [gathered[r] for r in range(world_size)]
        meet.wait()
        return every

    ranks = threading.local()

    def all_reduce(total: Tensor) -> None:
        total.copy_(sum(exchange(ranks.number, total.clone())))

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    monkeypatch.setitem(BATCH_ELEMENTS, "cpu", elements)

    def train(rank: int) -> None:
        ranks.number = rank
        begin, at, places = rank * size, 0, []
        for name, parameter in zip(names, parameters, strict=True):
            first, last = max(at, begin), min(at + parameter.numel(), begin + size)
            if first < last:
                places.append((name, first - at, last - first, first - begin))
            at += parameter.numel()
        flat = torch.nn.Parameter(weights[begin : begin + size].clone())
        flat.grad = grads[begin : begin + size].clone()
        group = {"params": [flat], "matrices": True, "weight_decay": 0.1}
        optimizer = Muon(
            [group], {p: (name, kernels[name]) for p, name in zip(parameters, names, strict=True)}, lr=0.02
        )
        optimizer.lay_out({flat: places}, lambda value: exchange(rank, value))
        optimizer.step()
        found[rank] = flat.detach()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(world_size)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    monkeypatch.setitem(BATCH_ELEMENTS, "cpu", 0)
    whole.step()
    expected = torch.cat([p.detach().view(-1) for p in parameters])
    torch.testing.assert_close(torch.cat([found[rank] for rank in range(world_size)]), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["BiT-R50x1", "R26+S/32"])
def test_a_convolution_is_a_matrix_with_a_row_for_each_output(name: str) -> None:
    model = Classification(
        build(configure(name, 32, 5, **({"units": (1, 1)} if "BiT" in name else {"stem": (1, 1), "depth": 1}))),
        "softmax",
    )
    names, named = optimizers.matrices(model, model.decayed()), dict(model.named_parameters())
    kernels = {n for n, p in named.items() if p.dim() in (2, 4) and n in model.decayed()}
    assert {n.removeprefix("backbone.") for n in kernels - set(names)} == (
        {"root.weight", "head.weight"}
        if "BiT" in name
        else {"stem.root.weight", "patch_embedding.weight", "head.weight"}
    )
