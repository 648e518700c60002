"""Weights as facebookresearch, open_clip and timm publish them, made from random models of transformers by the layouts'
formulae.
"""

import json
import math

import pytest
import torch
from model_parts import randomised

from pipeline.base.errors import UserError
from pipeline.model import create, load, read_weights
from pipeline.model.convert.layouts import NAMES, write_model

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
WIDE = {**SIZES, "intermediate_size": 128}  # ViT-mu, whose number of heads is known by its sizes
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def random_model(transformers, name, config):
    """(model, its tensors under the names of its files)."""
    cls = getattr(transformers, name)
    model = randomised(cls(cls.config_class(**config)))
    return model, {key.removeprefix("model."): tensor for key, tensor in model.state_dict().items()}


@torch.no_grad()
def check(theirs, path, images, size=(32, 32)):
    """The features of ours, which read images in [-1, 1], are those of theirs."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in images)
    pixels = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(2))
    expected = theirs((pixels - mean) / std).pooler_output
    found = load(path, image_size=size).eval()(pixels * 2 - 1)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def layer(tensors, key):
    return {part: tensors[f"{key}.{part}"] for part in ("weight", "bias") if f"{key}.{part}" in tensors}


def put(named, key, found):
    named |= {f"{key}.{part}": tensor for part, tensor in found.items()}


def timm_block(tensors, block, names, key_bias=0.0):
    """One block in the names of timm and facebookresearch. names: of the layers of the MLP, theirs -> file's."""
    named: dict[str, torch.Tensor] = {}
    qkv = [layer(tensors, f"{block}.attention.{part}_proj") for part in "qkv"]
    named["attn.qkv.weight"] = torch.cat([part["weight"] for part in qkv])
    if "bias" in qkv[0]:
        k = qkv[1].get("bias", torch.full_like(qkv[0]["bias"], key_bias))
        named["attn.qkv.bias"] = torch.cat([qkv[0]["bias"], k, qkv[2]["bias"]])
    put(named, "attn.proj", layer(tensors, f"{block}.attention.o_proj"))
    for i in (1, 2):
        put(named, f"norm{i}", layer(tensors, f"{block}.norm{i}"))
        named[f"ls{i}.gamma"] = tensors[f"{block}.layer_scale{i}.lambda1"]
    for theirs, ours in names.items():
        put(named, f"mlp.{ours}", layer(tensors, f"{block}.mlp.{theirs}"))
    return named


def dinov3_file(tensors, names, registers="storage_tokens"):
    named = {"cls_token": tensors["embeddings.cls_token"], registers: tensors["embeddings.register_tokens"]}
    put(named, "patch_embed.proj", layer(tensors, "embeddings.patch_embeddings"))
    put(named, "norm", layer(tensors, "norm"))
    return named | {f"blocks.0.{key}": tensor for key, tensor in timm_block(tensors, "layer.0", names, 7.0).items()}


def write(path, tensors, config=None):
    path.mkdir(exist_ok=True)
    torch.save(tensors, path / "pytorch_model.bin")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


PLAIN, GATED = {"up_proj": "fc1", "down_proj": "fc2"}, {"gate_proj": "w1", "up_proj": "w2", "down_proj": "w3"}


def test_dinov3_as_published(tmp_path, transformers):
    theirs, tensors = random_model(transformers, "DINOv3ViTModel", {**WIDE, "num_register_tokens": 4})
    file = dinov3_file(tensors, PLAIN) | {
        "mask_token": torch.zeros(1, 32),
        "rope_embed.periods": 100 ** (torch.arange(4) / 4),
        "local_cls_norm.weight": torch.ones(32),
        "blocks.0.attn.qkv.bias_mask": torch.full((96,), math.nan),
    }
    torch.save(file, tmp_path / "dinov3.pth")
    for size in ((32, 32), (48, 24)):
        check(theirs, tmp_path / "dinov3.pth", IMAGENET, size)
    gated = {**SIZES, "intermediate_size": 48, "use_gated_mlp": True, "hidden_act": "silu", "num_register_tokens": 4}
    theirs, tensors = random_model(transformers, "DINOv3ViTModel", gated)
    heads = {"model_args": {"num_heads": 2}}
    check(theirs, write(tmp_path / "gated", dinov3_file(tensors, GATED), heads), IMAGENET)
    timms = {"gate_proj": "fc1_g", "up_proj": "fc1_x", "down_proj": "fc2"}  # S+ and H+ of timm
    check(theirs, write(tmp_path / "timm", dinov3_file(tensors, timms), heads), IMAGENET)


def test_dinov3_of_timm(tmp_path, transformers):
    """Its models have no bias of query, key and value, or those of query and value apart; and gamma for LayerScale."""
    theirs, tensors = random_model(transformers, "DINOv3ViTModel", {**WIDE, "num_register_tokens": 4})
    file = dinov3_file(tensors, PLAIN, "reg_token")
    q, _, v = file.pop("blocks.0.attn.qkv.bias").chunk(3)
    file |= {"blocks.0.attn.q_bias": q, "blocks.0.attn.v_bias": v}
    file |= {f"blocks.0.gamma_{i}": file.pop(f"blocks.0.ls{i}.gamma") for i in (1, 2)}
    images = {"mean": IMAGENET[0], "std": IMAGENET[1], "input_size": [3, 32, 32]}
    check(
        theirs, write(tmp_path, file, {"architecture": "vit_mu_patch8_dinov3_qkvb", "pretrained_cfg": images}), IMAGENET
    )


@pytest.mark.parametrize(
    "names", [{"weights_in": "w12", "weights_out": "w3"}, {"weights_in": "fc1", "weights_out": "fc2"}]
)
def test_dinov2_g_as_published_and_of_timm(tmp_path, transformers, names):
    config = {**SIZES, "use_swiglu_ffn": True, "mlp_ratio": 2, "num_register_tokens": 4}
    theirs, tensors = random_model(transformers, "Dinov2WithRegistersModel", config)
    block = "encoder.layer.0"
    for part in ("weight", "bias"):
        gate = [tensors[f"{block}.mlp.{name}_proj.{part}"] for name in ("gate", "up")]
        tensors |= {f"{block}.mlp.weights_in.{part}": torch.cat(gate)}
        tensors |= {f"{block}.mlp.weights_out.{part}": tensors[f"{block}.mlp.down_proj.{part}"]}
    is_timm = "fc1" in names.values()
    table, token = tensors["embeddings.position_embeddings"], tensors["embeddings.cls_token"]
    file = (
        {"pos_embed": table[:, 1:], "cls_token": token + table[:, :1]}
        if is_timm
        else {"pos_embed": table, "cls_token": token}
    )
    file["reg_token" if is_timm else "register_tokens"] = tensors["embeddings.register_tokens"]
    put(file, "patch_embed.proj", layer(tensors, "embeddings.patch_embeddings.projection"))
    put(file, "norm", layer(tensors, "layernorm"))
    file |= {f"blocks.0.{key}": tensor for key, tensor in timm_block(tensors, block, names).items()}
    path = write(tmp_path, file, {"model_args": {"num_heads": 2}})
    check(theirs, path, IMAGENET)
    config = read_weights(path)[0]
    assert (config.swiglu, config.registers, config.kernel) == (True, 4, "bicubic_antialias")


def timm_file(**changes):
    model = create("ViT-mu/8", 32, 0, **changes)
    return write_model(model.state_dict(), model.config, NAMES["timm"])


def clip_file(tensors):
    """CLIP's model for images as OpenAI and open_clip write it."""
    named = {
        f"visual.{name}": tensors[f"embeddings.{key}"]
        for name, key in (
            ("class_embedding", "class_embedding"),
            ("positional_embedding", "position_embedding.weight"),
            ("conv1.weight", "patch_embedding.weight"),
        )
    }
    put(named, "visual.ln_pre", layer(tensors, "pre_layrnorm"))
    put(named, "visual.ln_post", layer(tensors, "post_layernorm"))
    block, name = "encoder.layers.0", "visual.transformer.resblocks.0"
    for part in ("weight", "bias"):
        qkv = [tensors[f"{block}.self_attn.{letter}_proj.{part}"] for letter in "qkv"]
        named[f"{name}.attn.in_proj_{part}"] = torch.cat(qkv)
    layers = {
        "self_attn.out_proj": "attn.out_proj",
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
    for theirs, ours in layers.items():
        put(named, f"{name}.{ours}", layer(tensors, f"{block}.{theirs}"))
    texts = {
        "positional_embedding": torch.zeros(77, 8),
        "logit_scale": torch.zeros(()),
        "ln_final.weight": torch.ones(8),
    }
    return named | texts | {"visual.proj": torch.zeros(32, 8)}


def test_open_clip_with_and_without_its_configuration(tmp_path, transformers):
    theirs, tensors = random_model(transformers, "CLIPVisionModel", {**WIDE, "hidden_act": "gelu"})
    torch.save(
        {"state_dict": {f"module.{key}": tensor for key, tensor in clip_file(tensors).items()}}, tmp_path / "laion.pt"
    )
    check(theirs, tmp_path / "laion.pt", CLIP)
    said = []
    read_weights(tmp_path / "laion.pt", said.append)
    assert any("3 tensors outside of visual. left out" in line for line in said)
    assert any("quick_gelu" in line for line in said)

    theirs, tensors = random_model(
        transformers, "CLIPVisionModel", {**SIZES, "intermediate_size": 48, "num_attention_heads": 4}
    )
    folder = tmp_path / "openai"
    folder.mkdir()
    torch.save(clip_file(tensors), folder / "open_clip_pytorch_model.bin")
    config = {"quick_gelu": True, "vision_cfg": {"head_width": 8, "image_size": 32}}
    images = {
        "mean": [0.4] * 3,
        "std": [0.2] * 3,
        "interpolation": "bicubic",
        "resize_mode": "shortest",
        "size": [32, 32],
    }
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": images}))
    check(theirs, folder, ((0.4,) * 3, (0.2,) * 3))
    view = {"image_size": 32, "eval_crop": "center", "eval_resize": 32, "resize_filter": "bicubic"}
    assert read_weights(folder)[2]["preprocessing"] == view
    torch.save(
        clip_file(tensors) | {"visual.attn_pool.in_proj_weight": torch.zeros(3)}, folder / "open_clip_pytorch_model.bin"
    )
    with pytest.raises(UserError, match="it has CoCa's attention pooling"):
        load(folder)


def test_clip_of_timm(tmp_path, transformers):
    theirs, tensors = random_model(transformers, "CLIPVisionModel", WIDE)
    clip = {
        key.removeprefix("visual."): tensor for key, tensor in clip_file(tensors).items() if key.startswith("visual.")
    }
    names = [
        ("transformer.resblocks", "blocks"),
        ("in_proj_", "qkv."),
        ("out_proj", "proj"),
        ("ln_1", "norm1"),
        ("ln_2", "norm2"),
    ]
    names += [
        ("c_fc", "fc1"),
        ("c_proj", "fc2"),
        ("ln_pre", "norm_pre"),
        ("ln_post", "norm"),
        ("conv1", "patch_embed.proj"),
    ]
    file = {}
    for key, tensor in clip.items():
        for theirs_name, timms in names:
            key = key.replace(theirs_name, timms)
        file[key] = tensor
    file |= {
        "cls_token": file.pop("class_embedding").view(1, 1, 32),
        "pos_embed": file.pop("positional_embedding")[None],
    }
    del file["proj"]
    images = {"mean": CLIP[0], "std": CLIP[1], "input_size": [3, 32, 32]}
    check(
        theirs,
        write(tmp_path, file, {"architecture": "vit_mu_patch8_clip_quickgelu_32", "pretrained_cfg": images}),
        CLIP,
    )


# Name of a timm model -> base, patches of a side that the coordinates are stretched to (0: none), whether x comes
# before y.
ROPES = {
    "vit_mu_patch8_rope_reg1_gap_32": (10000.0, 16, False),
    "eva02_mu_patch8_32": (10000.0, 16, False),
    "vit_mu_patch8_rope_32": (100.0, 0, True),
    "vit_mu_patch8_rope_ape_32": (100.0, 0, True),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ROPES)
def test_axial_rope_of_timm(tmp_path, name):
    """Queries times keys are those of neighbouring channels as complex numbers, turned by the numbers of row and
    column.
    """
    base, side, has_x_first = ROPES[name]
    positions = "learned" if "ape" in name or "eva" in name else "none"
    file = timm_file(positions=positions)
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.randn(tensor.shape, generator=generator) for key, tensor in file.items()}
    if "gap" in name:
        tensors |= {f"fc_norm.{part}": tensors.pop(f"norm.{part}") for part in ("weight", "bias")}
    model = load(write(tmp_path, tensors, {"architecture": name}), image_size=(16, 24))
    assert (model.config.pool_norm, model.config.pool) == (("gap" in name), "mean" if "gap" in name else "token")
    x = torch.randn(1, 1 + 2 * 3, 32, generator=generator)
    attention = model.blocks[0].attention
    q, k, v = attention.split(attention.qkv(x), model.rotation(x.device))

    theirs = x @ tensors["blocks.0.attn.qkv.weight"].T + tensors["blocks.0.attn.qkv.bias"]
    pairs = torch.view_as_complex(theirs.view(7, 3, 2, 8, 2)[:, :2])  # token, q or k, head, pair
    periods = base ** (torch.arange(4) / 4)
    for row in range(2):
        for column in range(3):
            place = [row / 2 * side, column / 3 * side] if side else [row, column]
            angles = torch.cat([number / periods for number in (place[::-1] if has_x_first else place)])
            pairs[1 + row * 3 + column] *= torch.polar(torch.ones(8), angles)
    expected = torch.einsum("nhp,mhp->hnm", pairs[:, 0], pairs[:, 1].conj()).real
    torch.testing.assert_close((q @ k.mT)[0], expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(v[0].transpose(0, 1).flatten(1), theirs[:, :, 64:][0])


def test_parts_that_the_names_of_timms_models_tell(tmp_path):
    tensors = {key: torch.ones(tensor.shape) for key, tensor in timm_file().items()}
    for name, part in (
        ("vit_mu_patch8_rpn_32", "res-post-norm"),
        ("vit_pe_core_mu_patch8_32", "Perception Encoder's rotation"),
    ):
        with pytest.raises(UserError, match=part):
            load(write(tmp_path, tensors, {"architecture": name}))
    with_registers = tensors | {
        "reg_token": torch.ones(1, 2, 32),
        "pos_embed": torch.arange(19.0)[None, :, None].repeat(1, 1, 32),
    }
    config = {"architecture": "vit_mu_patch8_32", "model_args": {"img_size": 32}}
    state = read_weights(write(tmp_path, with_registers, config)).state
    assert state["registers"][0, :, 0].tolist() == [2, 3], "1, and the positions 1 and 2"
    assert state["positions"][0, :, 0].tolist() == [0, *range(3, 19)]
