"""The attention weights are those that the model uses; rollout and distances follow their formulae."""

import itertools
import math

import numpy as np
import pytest
import torch
from model_parts import randomised
from torch import Tensor

from pipeline import model as models
from pipeline.explain.attention import POOLING, compute_attention, forward_with_attention, patch_distances
from pipeline.model import VisionTransformer

SIDE = 16
SMALL = {"width": 24, "depth": 3, "mlp_width": 24, "num_heads": 2}
KINDS = {
    "token": {},
    "map": {"pool": "map"},
    "attentive": {"pool": "attentive", "registers": 2},
    "registers": {"registers": 3, "pool": "gap"},
    "relative": {"positions": "relative", "pool": "gap"},
    "blocks": {"positions": "learned2d", "positions_at": "blocks"},
    "both": {"pool": "both", "qk_norm": True},
    "mean": {"pool": "mean"},
    "rope": {
        "positions": "none",
        "rope_base": 20.0,
        "registers": 2,
        "qkv_bias": "qv",
        "layer_scale": 1.0,
        "embedding_norm": True,
    },
}


def vit(name: str = "ViT-mu/4", size: tuple[int, int] = (SIDE, SIDE), **changes: object) -> VisionTransformer:
    """A small model with random weights, so that attention differs between tokens."""
    model = randomised(models.create(name, size, 5, **{**SMALL, **changes}), 0.3)
    return model


def random_images(size: tuple[int, int] = (SIDE, SIDE), count: int = 2) -> Tensor:
    return torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(1)) * 2 - 1


def seen(model: VisionTransformer, images: Tensor) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    forward_with_attention(model, images, weights.__setitem__)
    return weights


def uniform(**changes: object) -> VisionTransformer:
    """A model in which every token attends to all tokens equally."""
    model = vit(**changes)
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.qkv.weight)
        torch.nn.init.zeros_(block.attention.qkv.bias)
    return model


@pytest.mark.parametrize("kind", [*KINDS, "axial", "hybrid"])
def test_weights_are_those_that_the_model_mixes_values_with(kind: str) -> None:
    names = {"axial": ("Axial-ViT-B/16", (32, 48)), "hybrid": ("R+Ti/16", (64, 64))}
    name, size = names.get(kind, ("ViT-mu/4", (SIDE, 24)))
    model, images = vit(name, size, **KINDS.get(kind, {})), random_images(size)
    mixed: list[tuple[Tensor, Tensor]] = []
    handles = [
        block.attention.register_forward_hook(lambda module, inputs, output: mixed.append((inputs[0], output)))
        for block in model.blocks
    ]
    with torch.no_grad():
        logits = model(images)
    for handle in handles:
        handle.remove()
    weights = seen(model, images)
    assert (
        list(weights)
        == [f"block {i + 1}" for i in range(len(model.blocks))] + [POOLING] * model.config.pools_by_attention
    )
    B, N = 2, model.config.num_tokens
    for block, (x, expected), w in zip(model.blocks, mixed, weights.values(), strict=False):
        assert w.shape == (B, 2, N, N)
        assert torch.allclose(w.sum(3), torch.ones(B, 2, N))
        v = block.attention.qkv(x).view(B, N, 3, 2, -1)[:, :, 2].transpose(1, 2)
        output = block.attention.out((w @ v).transpose(1, 2).reshape(B, N, -1))
        assert torch.allclose(output, expected, atol=1e-4)
        assert w.std() > 1e-3
    if model.pool is not None:
        pool, tokens = model.pool, model.encode(model.embed(images))
        v = pool.key_value(tokens).view(B, N, 2, 2, -1)[:, :, 1].transpose(1, 2)
        read = pool.out((weights[POOLING] @ v).transpose(1, 2).reshape(B, -1))
        assert torch.allclose(model.head(read + pool.mlp(pool.mlp_norm(read))), logits, atol=1e-4)


def test_the_output_is_unchanged_and_no_hook_remains() -> None:
    model, images = vit(), random_images()
    with torch.no_grad():
        before = model(images)
        assert torch.equal(forward_with_attention(model, images, lambda name, weights: None), before)
    compute_attention(model, images, 8)
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="images are"):
        compute_attention(model, images[:, :2], 8)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("changes", [{}, {"pool": "gap"}], ids=["token", "gap"])
def test_mean_distance_of_uniform_attention(changes: dict[str, object]) -> None:
    """By hand: the mean over all pairs of patches, reduced by the share of the class token."""
    model = uniform(size=(8, 12), **changes)
    rows, columns = model.config.grid
    places = list(itertools.product(range(rows), range(columns)))
    apart = [math.hypot(a[0] - b[0], a[1] - b[1]) * 4 for a in places for b in places]
    expected = sum(apart) / len(places) / model.config.num_tokens
    found = compute_attention(model, random_images((8, 12)), 8).distances
    assert found.shape == (2, 3, 2)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(patch_distances(model.config).mean(), sum(apart) / len(apart), rtol=1e-5)


@pytest.mark.parametrize("kind", list(KINDS))
def test_rollout_is_the_product_of_all_layers(kind: str) -> None:
    model, images = vit(**KINDS[kind]), random_images()
    found, weights = compute_attention(model, images, 8), seen(model, images)
    pooling = weights.pop(POOLING, None)
    N, (h, w) = model.config.num_tokens, model.config.grid
    for image in range(2):
        of_patches = (np.arange(N) >= N - h * w) / (h * w)  # the head does not read registers, which come first
        row = of_patches if pooling is None else pooling[image].mean((0, 1)).double().numpy()
        if model.config.pool in ("token", "both"):
            row = np.eye(N)[0] if model.config.pool == "token" else (np.eye(N)[0] + of_patches) / 2
        for attention in reversed(weights.values()):
            row = row @ (np.eye(N) + attention[image].double().numpy().mean(0)) / 2
        np.testing.assert_allclose(found.rollout[image].flatten(), row[N - h * w :], atol=1e-6)


def test_maps_are_the_row_of_the_class_token_or_the_mean_of_all() -> None:
    for kind in ("token", "map"):
        model, images = vit(**KINDS[kind]), random_images()
        found, weights = compute_attention(model, images, 8), seen(model, images)
        assert found.layers == list(weights)
        for layer, attention in enumerate(weights.values()):
            row = attention[:, :, 0, 1:] if kind == "token" else attention.mean(2)
            assert torch.allclose(found.maps[:, layer].flatten(2), row, atol=1e-6)


def test_parts_that_fit_into_memory_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = vit(), random_images(count=5)
    whole = compute_attention(model, images, 8)
    monkeypatch.setattr("pipeline.explain.attention._MAX_WEIGHTS", 2 * 2 * 17**2)
    in_parts = compute_attention(model, images, 8)
    for name in ("maps", "rollout", "distances"):
        assert torch.allclose(getattr(in_parts, name), getattr(whole, name), atol=1e-6)
