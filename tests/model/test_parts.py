"""Parts of later ViTs, against transformers' own models with random weights and against their formulae."""

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from model_parts import ALL_PARTS, CHANGES, randomised

from pipeline.base.errors import UserError
from pipeline.model import ViTConfig, build, configure, create, load, num_parameters, save
from pipeline.model.layers import kernel_names
from pipeline.model.rope import draw, rotated, rotation

SIZES = {"width": 16, "depth": 2, "mlp_width": 24, "num_heads": 2}
THEIR_SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
}  # fmt: skip
DINOV3 = {
    "registers": 3, "positions": "none", "rope_base": 100.0, "qkv_bias": "qv", "layer_scale": 1.0, "gelu": "erf", "layer_norm_eps": 1e-5,
}  # fmt: skip
# Class of transformers -> (fields of its configuration, of ours).
THEIRS = {
    "DINOv3ViTModel": ({"num_register_tokens": 3}, DINOV3),
    "DINOv3ViTModel, gated": (
        {"use_gated_mlp": True, "hidden_act": "silu", "query_bias": False, "value_bias": False, "mlp_bias": False, "proj_bias": False},
        DINOV3 | {"registers": 0, "swiglu": True, "qkv_bias": "none", "mlp_bias": False, "out_bias": False},
    ),
    "Dinov2Model": (
        {"use_swiglu_ffn": True, "mlp_ratio": 2},
        {"layer_scale": 1.0, "swiglu": True, "layer_norm_eps": 1e-6, "mlp_width": 24},
    ),
    "SiglipVisionModel": ({}, {"pool": "map"}),
    "CLIPVisionModel": ({}, {"embedding_norm": True, "gelu": "quick", "layer_norm_eps": 1e-5}),
}  # fmt: skip
NAMES = [
    (r".*layers?\.(\d+)\.", r"blocks.\1."), (r"^embeddings\.", ""), ("patch_embedding(s.projection|s)?", "patch_embedding"),
    ("(cls_token|class_embedding)", "class_token"), ("register_tokens", "registers"),
    (r"position_embedding(s|\.weight)", "positions"), (r"(layer_)?norm1\.", "attention_norm."), (r"(layer_)?norm2\.", "mlp_norm."),
    (r"(self_attn|attention)\.[qkv]_proj", "attention.qkv"), (r"(self_attn|attention)\.o(ut)?_proj", "attention.out"),
    (r"layer_scale1\.lambda1", "attention.out.scale"), (r"layer_scale2\.lambda1", "mlp.down.scale"),
    (r"mlp\.(gate_proj|up_proj|fc1)", "mlp.up"), (r"mlp\.(down_proj|fc2)", "mlp.down"), ("pre_layrnorm", "embedding_norm"),
    (r"^(post_)?layernorm", "norm"), (r"head\.", "pool."), (r"pool\.attention\.out", "pool.out"), (r"pool\.layernorm", "pool.mlp_norm"),
]  # fmt: skip
IN_ORDER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # parts of one of our parameters


def our_state(tensors, like):
    """A state dict of transformers under our names, in our shapes."""
    found = {}
    for key in sorted(tensors, key=lambda key: next((i for i, part in enumerate(IN_ORDER) if part in key), 0)):
        name, tensor = key, tensors[key]
        for pattern, ours in NAMES:
            name = re.sub(pattern, ours, name)
        if "in_proj_" in name:  # q, k and v of the attention pooling
            end = name.rpartition("_")[2]
            found |= {f"pool.query.{end}": tensor[:16], f"pool.key_value.{end}": tensor[16:]}
        elif name != "mask_token" and tensor.numel():
            found[name] = torch.cat([found[name], tensor]) if name in found else tensor
    found.setdefault("patch_embedding.bias", torch.zeros(16))
    return {name: tensor.reshape(like[name].shape) for name, tensor in found.items()}


def images(*size, count=2):
    return torch.rand((count, 3, *size), generator=torch.Generator().manual_seed(2)) * 2 - 1


@torch.no_grad()
@pytest.mark.parametrize("case", THEIRS)
def test_features_are_transformers(transformers, case):
    name = case.partition(",")[0]
    theirs, ours = THEIRS[case]
    cls = getattr(transformers, name.replace("Model", "Config"))
    oracle = randomised(getattr(transformers, name)(cls(**THEIR_SIZES | theirs)))
    model = create("ViT-mu/4", 16, 0, **SIZES | {"gelu": "tanh" if "Siglip" in name else "erf"} | ours).eval()
    model.load_state_dict(our_state(oracle.state_dict(), model.state_dict()))
    sizes = [(16, 16), (24, 16), (12, 36)] if "rope_base" in ours else [(16, 16)]
    for size in sizes:  # with RoPE the weights of one size read any other, and nothing is resampled
        x = images(*size)
        expected = oracle(x)
        pooled, patches = model(x, any_size=True, with_patches=True)
        largest = expected.pooler_output.abs().max()
        assert (pooled - expected.pooler_output).abs().max() < 1e-5 * largest, size
        if "CLIP" not in name:  # whose patches are not normalised
            tokens = expected.last_hidden_state[:, -patches.shape[1] :]
            assert (patches - tokens).abs().max() < 1e-5 * tokens.abs().max(), size


def test_rope_turns_pairs_by_the_angles_of_the_centre():
    """One token, one head and one pair at a time, in complex numbers."""
    config = configure("ViT-mu/4", (8, 12), 0, **SIZES, positions="none", rope_base=50.0, registers=1)
    x = torch.randn(1, 2, 2 + 6, 8, generator=torch.Generator().manual_seed(0))
    found = rotated(x, rotation(config, config.grid))
    assert torch.equal(found[:, :, :2], x[:, :, :2]), "class token and register have no place"
    for place in range(6):
        y, column = (place // 3 + 0.5) / 2 * 2 - 1, (place % 3 + 0.5) / 3 * 2 - 1
        for i in range(4):
            angle = 2 * math.pi * (y, column)[i // 2] / 50 ** ((i % 2) / 2)
            pair = torch.complex(x[0, :, 2 + place, i], x[0, :, 2 + place, i + 4]) * complex(
                math.cos(angle), math.sin(angle)
            )
            torch.testing.assert_close(found[0, :, 2 + place, i], pair.real, rtol=0, atol=1e-6)
            torch.testing.assert_close(found[0, :, 2 + place, i + 4], pair.imag, rtol=0, atol=1e-6)
    assert rotated(x.bfloat16(), rotation(config, config.grid)).dtype == torch.bfloat16


def test_rope_of_every_width_of_a_head():
    """A step of 4/196 gave 50 periods of the 49, and the first batch a RuntimeError."""
    for width in range(4, 516, 4):
        config = configure("ViT-mu/4", 8, 0, width=width, num_heads=1, positions="none", rope_base=100.0)
        assert rotation(config, config.grid)[0].shape == (5, width)


@torch.no_grad()
def test_swiglu_and_layer_scale_are_their_formulae():
    mlp = randomised(create("ViT-mu/4", 8, 0, **SIZES, swiglu=True, layer_scale=0.5)).blocks[0].mlp
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    (gate, value), (gate_bias, value_bias) = mlp.up.weight.split(24), mlp.up.bias.split(24)
    hidden = F.silu(x @ gate.T + gate_bias) * (x @ value.T + value_bias)
    expected = (hidden @ mlp.down.weight.T + mlp.down.bias) * mlp.down.scale
    torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5)
    new = create("ViT-mu/4", 8, 0, **SIZES, layer_scale=1e-5).blocks[0]
    assert (new.attention.out.scale == 1e-5).all()
    assert (new.mlp.down.scale == 1e-5).all()


@torch.no_grad()
def test_norms_of_queries_and_keys_and_of_the_class_token():
    model = randomised(create("ViT-mu/4", 8, 0, **SIZES, qk_norm=True, class_norm=True, registers=2, positions="none"))
    attention, x = model.blocks[0].attention, torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in attention.qkv(x).chunk(3, dim=2))
    q, k = attention.query_norm(q), attention.key_norm(k)
    mixed = (q @ k.transpose(2, 3) / math.sqrt(8)).softmax(3) @ v
    torch.testing.assert_close(attention(x), attention.out(mixed.transpose(1, 2).flatten(2)), rtol=1e-4, atol=1e-4)
    seen = []
    model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.class_norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    tokens = model.encode(model.embed(images(8, 8)))
    first, patches = sorted(seen, key=lambda part: part.shape[1])
    assert (first.shape[1], patches.shape[1]) == (3, 4)
    torch.testing.assert_close(tokens, torch.cat([model.class_norm(first), model.norm(patches)], dim=1))


@torch.no_grad()
def test_features_are_class_token_mean_of_patches_or_both():
    models = {pool: create("ViT-mu/4", 16, 5, **SIZES, pool=pool, registers=2) for pool in ("token", "mean", "both")}
    state = randomised(create("ViT-mu/4", 16, 0, **SIZES, registers=2)).state_dict()
    x = images(16, 16)
    for model in models.values():
        model.load_state_dict({name: state.get(name, tensor) for name, tensor in model.state_dict().items()})
    token, mean, both = (model.eval().features(x) for model in models.values())
    patches = models["token"](x, with_patches=True)[1]
    torch.testing.assert_close(mean, patches.mean(1))
    assert torch.equal(both, torch.cat([token, mean], dim=1))
    assert [model.config.num_features for model in models.values()] == [16, 16, 32]
    assert models["both"](x).shape == (2, 5)
    assert create("ViT-mu/4", 16, 5, **SIZES, pool="both", representation=True)(x).shape == (2, 5)


def test_ropes_coordinates_change_in_training_by_seed_and_step():
    changes = {"rope_shift": 0.5, "rope_jitter": 2.0, "rope_rescale": 3.0}
    model = randomised(create("ViT-mu/4", 16, 3, **SIZES, positions="none", rope_base=100.0, **changes))
    x, drawn = images(16, 16), []
    before = model(x)
    for step in range(200):
        draw(model, 5, step)
        drawn.append(model.rope_change.clone())
    assert torch.equal(model(x), before), "only training is changed"
    assert not torch.allclose(model.train()(x), before)
    draw(model, 5, 7)
    assert torch.equal(model.rope_change, drawn[7])
    draw(model, 6, 7)
    assert not torch.equal(model.rope_change, drawn[7])
    shifts, logarithms = torch.stack(drawn)[:, 0], torch.stack(drawn)[:, 1].log()
    assert shifts.abs().max() <= 0.5
    assert shifts.std() == pytest.approx(0.5 / math.sqrt(3), rel=0.15)
    assert (logarithms[:, 0] - logarithms[:, 1]).abs().max() <= 2 * math.log(2), "of each axis"
    assert 1 < logarithms.mean(1).abs().max() <= math.log(6)
    config, grid = model.config, model.config.grid
    moved = rotation(config, grid, None, torch.tensor([[2.0, 2.0], [1.0, 1.0]]))
    one, last = rotation(config, (1, 1), None, torch.tensor([[2.75, 2.75], [1.0, 1.0]]))[0], moved[0][-1]
    torch.testing.assert_close(one[-1], last, msg="the centre of the last of 4 x 4 patches is 0.75")
    assert "rope_change" not in model.state_dict()
    draw(create("ViT-mu/4", 16, 3, **SIZES), 0, 0)


@pytest.mark.slow
def test_all_parts_are_compiled_in_one_graph_and_recomputed():
    """And another step's coordinates, which are a tensor, need no second graph."""
    model = randomised(create("ViT-mu/4", 16, 3, **SIZES | ALL_PARTS | CHANGES)).train()
    graphs = []
    compiled = torch.compile(
        model, fullgraph=True, backend=lambda graph, inputs: (graphs.append(graph), graph.forward)[1]
    )
    for step in range(3):
        draw(model, 0, step)
        model.activation_checkpointing = False
        expected = model(images(16, 16))
        torch.testing.assert_close(compiled(images(16, 16)), expected)
        expected.sum().backward()
        plain = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        model.activation_checkpointing = True
        model(images(16, 16)).sum().backward()
        assert all(
            torch.equal(parameter.grad, before) for parameter, before in zip(model.parameters(), plain, strict=True)
        )
        model.zero_grad()
    assert len(graphs) == 1


def test_a_new_models_kernels_are_those_without_the_parts():
    """LayerScale, RoPE, biases that are left out and a norm draw no random numbers."""
    plain = create("ViT-mu/4", 16, 3, **SIZES, mlp_bias=False).state_dict()
    more = {"layer_scale": 0.1, "rope_base": 100.0, "qkv_bias": "qv", "out_bias": False, "embedding_norm": True}
    model = create("ViT-mu/4", 16, 3, **SIZES, mlp_bias=False, **more)
    shared = {name for name in plain.keys() & model.state_dict().keys() if not name.endswith("qkv.bias")}
    assert plain.keys() - shared == {f"blocks.{i}.attention.{name}.bias" for i in range(2) for name in ("qkv", "out")}
    assert all(torch.equal(plain[name], model.state_dict()[name]) for name in shared)
    assert not {name for name in kernel_names(model) if "scale" in name}


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_base": 100.0, "axial": True, "pool": "gap"}, "rope_base rotates queries and keys by their place in the grid"),
        ({"rope_base": 100.0, "positions": "relative"}, "rope_base rotates queries and keys by their place in the grid"),
        ({"rope_base": 100.0, "num_heads": 8}, r"heads whose width is divisible by 4, not 16 / 8 = 2"),
        ({"rope_base": 1.0}, "rope_base = 1.0 must be above 1"),
        ({"rope_rescale": 2.0}, "rope_side, rope_shift, rope_jitter and rope_rescale change RoPE, which this model does not have"),
        ({"class_norm": True, "pool": "gap"}, "class_norm normalises a class token, and pool = gap has none"),
        ({"qkv_bias": "k"}, "qkv_bias = 'k' must be one of"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        configure("ViT-mu/4", 16, 3, **SIZES | changes)


def test_parts_count_their_parameters():
    plain: ViTConfig = configure("ViT-mu/4", 16, 0, **SIZES)
    assert num_parameters(replace(plain, layer_scale=1.0)) == num_parameters(plain) + 2 * 2 * 16
    assert num_parameters(replace(plain, qkv_bias="qv")) == num_parameters(plain) - 2 * 16
    assert num_parameters(replace(plain, swiglu=True)) == num_parameters(plain) + 2 * (16 + 1) * 24
    assert "layer_scale" not in build(plain).config.to_dict(), "files of the plain ViT stay as they are"
