"""Variants of the ViT from the paper's ablations and later work, each against its formula; and every model in
training.
"""

import copy
import math
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_parts import randomised

from pipeline.base.errors import UserError
from pipeline.model import build, config_from_dict, create, load, save
from pipeline.model.layers import kernel_names
from pipeline.model.vit import DropPath, SelfAttention

SIZE = (8, 12)  # 2 x 3 patches of 4


def tiny(name="ViT-mu/4", **changes):
    settings = {"width": 24, "depth": 3, "mlp_width": 40, "num_heads": 3}
    return create(name, SIZE, 5, **settings | changes)


def random_images(count=2, size=SIZE, seed=2):
    return torch.rand((count, 3, *size), generator=torch.Generator().manual_seed(seed)) * 2 - 1


def added(model):
    """What the model adds to the tokens before each block; the blocks are replaced by a recording identity."""
    seen = []
    for block in model.blocks:
        block.forward = lambda x, rotation: (seen.append(x), x)[1]
    model.encode(torch.zeros(1, math.prod(model.config.grid), model.config.width))
    start = torch.zeros_like(seen[0])
    if model.class_token is not None:
        start[:, 0] = model.class_token.detach()
    return [(after - before)[0] for before, after in zip([start, *seen], seen, strict=False)]


@torch.no_grad()
@pytest.mark.parametrize("pool", ["token", "gap"])
def test_learned_positions_once_in_every_block_or_shared(pool):
    stem, shared, blocks = (randomised(tiny(positions_at=at, pool=pool)) for at in ("stem", "shared", "blocks"))
    num_tokens = 6 + (pool == "token")
    assert stem.positions.shape == shared.positions.shape == (1, num_tokens, 24)
    assert blocks.positions.shape == (3, num_tokens, 24)
    for model, expected in (
        (stem, [stem.positions[0], torch.zeros(num_tokens, 24), torch.zeros(num_tokens, 24)]),
        (shared, [shared.positions[0]] * 3),
        (blocks, list(blocks.positions)),
    ):
        for found, table in zip(added(model), expected, strict=True):
            torch.testing.assert_close(found, table, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("pool", "at"), [("token", "stem"), ("gap", "stem"), ("token", "blocks")])
def test_2d_positions_are_one_vector_of_the_column_and_one_of_the_row(pool, at):
    """ViT paper, D.4: an X and a Y embedding of size D/2 each, concatenated."""
    model = randomised(tiny(positions="learned2d", positions_at=at, pool=pool))
    assert model.positions.shape == (3 if at == "blocks" else 1, 2 + 3, 12)
    for table, found in zip(model.positions, added(model), strict=False):
        rows, columns = table[:2], table[2:]
        patches = [torch.cat([columns[c], rows[r]]) for r in range(2) for c in range(3)]
        zero = [torch.zeros(24)] if pool == "token" else []
        torch.testing.assert_close(found, torch.stack(zero + patches), rtol=0, atol=1e-5)


@torch.no_grad()
def test_sine_cosine_positions_are_big_visions():
    """models/vit.py, posemb_sincos_2d: [sin x, cos x, sin y, cos y] of 1 / 10000^(i / (D/4 - 1))."""
    model = tiny(positions="sincos2d", pool="gap")
    omega = 1 / 10_000 ** (np.arange(6) / 5)
    expected = [
        np.concatenate([np.sin(x * omega), np.cos(x * omega), np.sin(y * omega), np.cos(y * omega)])
        for y in range(2)
        for x in range(3)
    ]
    np.testing.assert_allclose(added(model)[0], np.stack(expected), atol=1e-6)
    assert "positions" not in model.state_dict()
    assert not any("positions" in name for name, _ in model.named_parameters())
    assert not added(tiny(positions="sincos2d"))[0][0].any(), "the class token has no place"
    assert all(not table.any() for table in added(tiny(positions="none")))


@torch.no_grad()
def test_relative_attention_adds_a_key_for_each_offset_to_the_logits():
    """ViT paper, D.4, one token, one key and one head at a time."""
    attention = tiny(positions="relative").blocks[0].attention
    randomised(attention)
    table = attention.relative.table
    assert table.shape == (2 * 7 - 1, 8)
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0))
    q, k, v = (part.view(2, 7, 3, 8) for part in attention.qkv(x).chunk(3, dim=2))
    mixed = torch.zeros(2, 7, 3, 8)
    for b, place, head in np.ndindex(2, 7, 3):
        query = q[b, place, head]
        logits = [query @ (k[b, other, head] + table[place - other + 6]) / math.sqrt(8) for other in range(7)]
        mixed[b, place, head] = torch.stack(logits).softmax(0) @ v[b, :, head]
    torch.testing.assert_close(attention(x), attention.out(mixed.reshape(2, 7, 24)), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_axial_attention_sees_its_row_then_its_column():
    model = randomised(tiny("Axial-ViT-mu/4"))
    assert len(model.blocks) == 6
    tokens = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(0))

    def reached(blocks, changed):
        other = tokens.clone()
        other[0, changed] += 1
        a, b = tokens, other
        for block in blocks:
            a, b = block(a), block(b)
        return {(i // 3, i % 3) for i in range(6) if not torch.equal(a[0, i], b[0, i])}

    assert reached(model.blocks[:1], 4) == {(1, 0), (1, 1), (1, 2)}
    assert reached(model.blocks[1:2], 4) == {(0, 1), (1, 1)}
    assert len(reached(model.blocks[:2], 4)) == 6

    attention, plain = model.blocks[1].attention, SelfAttention(model.config, 2)
    plain.load_state_dict(attention.state_dict())
    cells = tokens.view(2, 3, 24)
    for column in range(3):
        torch.testing.assert_close(attention(tokens).view(2, 3, 24)[:, column], plain(cells[None, :, column])[0])


def test_drop_path_skips_samples_and_keeps_the_mean():
    skip = DropPath(0.25)
    branch = torch.ones(4000, 2, 3)
    torch.manual_seed(0)
    first = skip(branch)
    assert first.unique().tolist() == [0, pytest.approx(4 / 3)]
    assert torch.equal(first, first[:, :1, :1].expand_as(first)), "a sample's branch is skipped as a whole"
    assert first.mean().item() == pytest.approx(1, abs=0.05)
    torch.manual_seed(0)
    assert torch.equal(skip(branch), first)
    assert skip.eval()(branch) is branch

    model = tiny(drop_path=0.5)
    assert [block.drop_path.rate for block in model.blocks] == [0.0, 0.25, 0.5]
    assert [block.drop_path.rate for block in tiny("Axial-ViT-mu/4", drop_path=0.5).blocks][-1] == 0.5


# A small model of each kind: its name, with changes that make it fast.
SMALL = {"width": 32, "depth": 2, "mlp_width": 48, "num_heads": 2}
PLACES = [
    *product(("learned", "learned2d", "sincos2d"), ("stem", "blocks", "shared")),
    ("relative", "stem"),
    ("none", "stem"),
]
EVERY = {
    "ViT-g/14": {"image_size": (28, 42)},
    # With and without a class token, which has positions of its own; the pool itself knows none.
    **{
        f"{positions}, {at}, {pool}": {"name": "ViT-B/16", "positions": positions, "positions_at": at, "pool": pool}
        for (positions, at), pool in product(PLACES, ("token", "gap"))
    },
    "map": {"name": "ViT-B/16", "pool": "map"},
    "attentive": {"name": "ViT-B/16", "pool": "attentive", "registers": 2},
    "drop path": {"name": "ViT-B/16", "drop_path": 0.3},
    "Axial-ViT-B/16": {"drop_path": 0.1},
    "registers, token": {"name": "ViT-B/16", "registers": 2},
    "registers, gap": {"name": "ViT-B/16", "registers": 2, "pool": "gap", "positions": "sincos2d"},
    "DINOv3": {
        "name": "ViT-B/16",
        "registers": 2,
        "positions": "none",
        "rope_base": 100.0,
        "qkv_bias": "qv",
        "layer_scale": 0.1,
    },
    "DINOv2-g": {
        "name": "ViT-B/16",
        "swiglu": True,
        "layer_scale": 0.1,
        "qkv_bias": "none",
        "out_bias": False,
        "mlp_bias": False,
    },
    "ViT-22B": {"name": "ViT-B/16", "qk_norm": True, "pool": "both"},
    "mean of patches": {"name": "ViT-B/16", "pool": "mean"},
    "CLIP": {"name": "ViT-B/16", "embedding_norm": True, "gelu": "quick"},
    "R+Ti/16": {"patch_size": 4},
    "R26+S/32": {"stem": (1, 1), "image_size": (16, 24)},
    "R50+ViT-B/16": {"stem": (2,), "pool": "gap", "patch_size": 2},
    "R50+ViT-B/32": {"stem": (1, 1), "pool": "map", "image_size": (16, 24)},
    "R50+ViT-L/16": {"stem": (2,), "patch_size": 2},
    "R50+ViT-L/32": {"stem": (1, 1), "positions": "relative", "image_size": (16, 24)},
    **{
        f"BiT-R{name}": {"units": units, "width": 32}
        for name, units in (("50x1", (1, 2)), ("101x3", (2,)), ("152x4", (1,)), ("200x3", (1, 1)))
    },
}


def small(case, **more):
    changes = dict(EVERY[case]) | more
    name, size = changes.pop("name", case), changes.pop("image_size", (32, 48))
    return create(name, size, 3, seed=1, **(changes if name.startswith("BiT") else SMALL | changes))


@pytest.mark.parametrize("case", EVERY)
def test_every_model_takes_a_step_comes_back_from_disk_and_goes_on(case, tmp_path):
    model = small(case)
    images, labels = random_images(4, model.config.image_size), torch.tensor([0, 1, 2, 0])
    decayed = kernel_names(model)
    assert decayed <= dict(model.named_parameters()).keys()
    assert all(p.ndim == 1 for n, p in model.named_parameters() if n.endswith(".bias") or "norm" in n)
    assert not decayed & {n for n, p in model.named_parameters() if p.ndim == 1}

    def step(model, optimizer):
        torch.manual_seed(0)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters()), "every parameter takes part"
        optimizer.step()
        return loss.item()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    assert step(model, optimizer) == pytest.approx(math.log(3), abs=1e-5), "a new head is zero"
    save(model, tmp_path / "model.pt")
    moments = copy.deepcopy(optimizer.state_dict())
    second = step(model, optimizer)
    assert second < math.log(3)

    resumed = load(tmp_path / "model.pt").train()
    optimizer = torch.optim.AdamW(resumed.parameters())
    optimizer.load_state_dict(moments)
    assert step(resumed, optimizer) == second
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), model.parameters(), strict=True))

    save(model, tmp_path / "model.pt")
    again = load(tmp_path / "model.pt").eval()
    assert again.config == model.config == config_from_dict(model.config.to_dict())
    with torch.no_grad():
        assert torch.equal(again(images), model.eval()(images))
    assert {n: t.shape for n, t in build(model.config).state_dict().items()} == {
        n: t.shape for n, t in again.state_dict().items()
    }


@torch.no_grad()
@pytest.mark.parametrize("case", EVERY)
def test_every_model_is_fine_tuned_at_another_size(case, tmp_path):
    model = small(case)
    save(model, tmp_path / "model.pt")
    height, width = model.config.image_size
    if getattr(model.config, "positions", "") == "relative":
        with pytest.raises(UserError, match="relative positions of a 2 x 3 grid cannot be used on 4 x 3"):
            load(tmp_path / "model.pt", image_size=(2 * height, width))
        return
    larger = load(tmp_path / "model.pt", image_size=(2 * height, width), num_classes=7).eval()
    assert larger(random_images(1, (2 * height, width))).shape == (1, 7)
    assert not larger.head.weight.any()
    torch.testing.assert_close(
        {n: t for n, t in larger.state_dict().items() if n != "positions" and not n.startswith("head.")},
        {n: t for n, t in model.state_dict().items() if n != "positions" and not n.startswith("head.")},
        rtol=0,
        atol=0,
    )


@torch.no_grad()
def test_2d_positions_are_resampled_line_by_line(tmp_path):
    model = randomised(tiny(positions="learned2d", positions_at="blocks"))
    save(model, tmp_path / "model.pt")
    positions = load(tmp_path / "model.pt", image_size=(12, 12)).positions
    rows = model.positions[:, :2]
    assert positions.shape == (3, 3 + 3, 12)
    torch.testing.assert_close(positions[:, :3], torch.stack([rows[:, 0], rows.mean(1), rows[:, 1]], dim=1))
    assert torch.equal(positions[:, 3:], model.positions[:, 2:])


@pytest.mark.parametrize("case", ["drop path", "BiT-R50x1"])
def test_activation_checkpointing_changes_no_gradient(case):
    images, gradients = random_images(4, (32, 48)), []
    for switch in (False, True):
        model = randomised(small(case)).train()
        model.activation_checkpointing = switch
        torch.manual_seed(0)
        model(images).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_default_model_is_as_it_was():
    """The last two values of some tensors, as they were before any variant existed."""
    model = create("ViT-mu/4", (8, 12), 5, width=24, depth=2, mlp_width=40, num_heads=3, representation=True, seed=3)
    golden = {
        "positions": (0.018317154, 0.012929708),
        "patch_embedding.weight": (-0.021211391, -0.112849027),
        "blocks.0.attention.qkv.weight": (0.127189919, -0.113501459),
        "blocks.0.mlp.up.bias": (-3.37e-07, 1.146e-06),
        "blocks.1.attention.out.weight": (-0.187005565, -0.020892488),
        "blocks.1.mlp.down.weight": (0.152112171, -0.150997743),
        "blocks.1.mlp.down.bias": (-1.251e-06, 1.691e-06),
        "representation.weight": (0.183802426, -0.154177472),
    }
    state = model.state_dict()
    for name, values in golden.items():
        assert state[name].flatten()[-2:].tolist() == pytest.approx(values, rel=1e-3), name
