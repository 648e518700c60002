"""Parts of later ViTs, against transformers' own models with random weights and against their formulae."""

import math

import pytest
import torch
from model_parts import ALL_PARTS, randomised

from pipeline.model import configure, create, load, save
from pipeline.model.rope import rotation

SIZES = {"width": 16, "depth": 2, "mlp_width": 24, "num_heads": 2}


def images(*size, count=2):
    return torch.rand((count, 3, *size), generator=torch.Generator().manual_seed(2)) * 2 - 1


def test_rope_of_every_width_of_a_head():
    """A step of 4/196 gave 50 periods of the 49, and the first batch a RuntimeError."""
    for width in range(4, 516, 4):
        config = configure("ViT-mu/4", 8, 0, width=width, num_heads=1, positions="none", rope_base=100.0)
        assert rotation(config, config.grid)[0].shape == (5, width)


@torch.no_grad()
def test_norms_of_queries_and_keys():
    model = randomised(create("ViT-mu/4", 8, 0, **SIZES, qk_norm=True, positions="none"))
    attention, x = model.blocks[0].attention, torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in attention.qkv(x).chunk(3, dim=2))
    q, k = attention.query_norm(q), attention.key_norm(k)
    mixed = (q @ k.transpose(2, 3) / math.sqrt(8)).softmax(3) @ v
    torch.testing.assert_close(attention(x), attention.out(mixed.transpose(1, 2).flatten(2)), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_all_parts_are_compiled_in_one_graph_and_recomputed():
    model = randomised(create("ViT-mu/4", 16, 3, **SIZES | ALL_PARTS)).train()
    graphs = []
    compiled = torch.compile(
        model, fullgraph=True, backend=lambda graph, inputs: (graphs.append(graph), graph.forward)[1]
    )
    expected = model(images(16, 16))
    torch.testing.assert_close(compiled(images(16, 16)), expected)
    expected.sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.activation_checkpointing = True
    model(images(16, 16)).sum().backward()
    assert all(torch.equal(parameter.grad, before) for parameter, before in zip(model.parameters(), plain, strict=True))
    assert len(graphs) == 1


def test_rope_reads_any_size_of_image_without_resampling(tmp_path):
    """Trained at 16 x 16, evaluated at 24 x 16."""
    model = randomised(create("ViT-mu/4", 16, 3, **SIZES, positions="none", rope_base=100.0))
    save(model, tmp_path / "model.pt")
    said = []
    larger = load(tmp_path / "model.pt", image_size=(24, 16), say=said.append).eval()
    assert not said
    with torch.no_grad():
        assert torch.equal(larger(images(24, 16)), model(images(24, 16), any_size=True))
        assert not torch.equal(larger(images(24, 16)), larger(images(24, 16).flip(3)))
