"""State dicts of timm, Hugging Face and DINOv2, against formulae and transformers' own models."""

import errno
import hashlib
import json
import zipfile

import numpy as np
import pytest
import torch
from model_parts import random_model, randomised, same
from PIL import Image

from pipeline.base.errors import UserError
from pipeline.data.loading.views import write_eval_view
from pipeline.model import (
    load,
    read_weights,
    save,
    to_huggingface,
    to_timm,
)
from pipeline.model.convert import preprocessing as images_of
from pipeline.model.convert.layouts import NAMES, write_model
from pipeline.model.files import write_safetensors
from pipeline.settings.run import AugmentConfig

D, GRID = 16, 4
TIMM_CONFIG = {
    "architecture": "vit_base_patch16_224",
    "model_args": {"num_heads": 4, "img_size": 16},
    "pretrained_cfg": {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "input_size": [3, 16, 16],
        "crop_pct": 0.9,
        "interpolation": "bicubic",
    },
}


def folder(path, tensors, config=None, processor=None, name="model.safetensors"):
    """A folder as on the hub."""
    path.mkdir(exist_ok=True)
    if name.endswith(".safetensors"):
        write_safetensors({key: tensor.contiguous() for key, tensor in tensors.items()}, path / name)
    else:
        torch.save(tensors, path / name)
    for content, file in ((config, "config.json"), (processor, "preprocessor_config.json")):
        if content is not None:
            (path / file).write_text(json.dumps(content))
    return path


@torch.no_grad()
def run(model, images):
    return model.eval()(torch.as_tensor(images).float().permute(0, 3, 1, 2))


# ---------------------------------------------------------------------- timm


def timm_tensors(arrays):
    """Official arrays under timm's names, by the formulae of its layout, without code of the package."""
    a = {key: torch.from_numpy(array) for key, array in arrays.items()}
    tensors = {
        "cls_token": a["cls"],
        "pos_embed": a["Transformer/posembed_input/pos_embedding"],
        "patch_embed.proj.weight": a["embedding/kernel"].permute(3, 2, 0, 1),
        "patch_embed.proj.bias": a["embedding/bias"],
        "norm.weight": a["Transformer/encoder_norm/scale"],
        "norm.bias": a["Transformer/encoder_norm/bias"],
        "head.weight": a["head/kernel"].T,
        "head.bias": a["head/bias"],
    }
    for i in range(2):
        block, name = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        attention, mlp = f"{block}/MultiHeadDotProductAttention_1", f"{block}/MlpBlock_3"
        qkv = [a[f"{attention}/{part}/kernel"].reshape(D, D).T for part in ("query", "key", "value")]
        tensors |= {
            f"{name}.norm1.weight": a[f"{block}/LayerNorm_0/scale"],
            f"{name}.norm1.bias": a[f"{block}/LayerNorm_0/bias"],
            f"{name}.attn.qkv.weight": torch.cat(qkv),
            f"{name}.attn.qkv.bias": torch.cat(
                [a[f"{attention}/{p}/bias"].flatten() for p in ("query", "key", "value")]
            ),
            f"{name}.attn.proj.weight": a[f"{attention}/out/kernel"].reshape(D, D).T,
            f"{name}.attn.proj.bias": a[f"{attention}/out/bias"],
            f"{name}.norm2.weight": a[f"{block}/LayerNorm_2/scale"],
            f"{name}.norm2.bias": a[f"{block}/LayerNorm_2/bias"],
            f"{name}.mlp.fc1.weight": a[f"{mlp}/Dense_0/kernel"].T,
            f"{name}.mlp.fc1.bias": a[f"{mlp}/Dense_0/bias"],
            f"{name}.mlp.fc2.weight": a[f"{mlp}/Dense_1/kernel"].T,
            f"{name}.mlp.fc2.bias": a[f"{mlp}/Dense_1/bias"],
        }
    return tensors


@pytest.fixture(scope="module")
def timm_weights(random_arrays):
    return timm_tensors(random_arrays(representation=False))


def test_timms_logits_are_those_of_the_equations(tmp_path, timm_weights, random_arrays, equations, images):
    arrays = random_arrays(representation=False)
    model = load(folder(tmp_path, timm_weights, TIMM_CONFIG))
    np.testing.assert_allclose(run(model, images), equations(arrays, images, "erf"), atol=2e-5)
    tanh = {**TIMM_CONFIG, "model_args": {**TIMM_CONFIG["model_args"], "act_layer": "gelu_tanh"}}
    model = load(folder(tmp_path, timm_weights, tanh))
    np.testing.assert_allclose(run(model, images), equations(arrays, images, "tanh"), atol=2e-5)


def test_preprocessing_and_classes_of_timm_are_read(tmp_path, timm_weights):
    names = [f"n{i}" for i in range(16)]
    extra = read_weights(folder(tmp_path, timm_weights, {**TIMM_CONFIG, "label_names": names})).extra
    assert extra["classes"] == names
    assert extra["preprocessing"] == {
        "image_size": 16,
        "eval_crop": "center",
        "eval_resize": 17,
        "resize_filter": "bicubic",
    }


@pytest.mark.parametrize(
    "crop",
    [{"eval_crop": "resize"}, *({"eval_crop": crop, "eval_resize": 450} for crop in ("center", "resize_center"))],
)
def test_preprocessing_goes_out_and_comes_back(crop):
    """timm divides 384 by crop_pct = 384 / 450 and rounds down to 449."""
    view = {"image_size": 384, "resize_filter": "bicubic", **crop}
    assert images_of.from_timm(images_of.to_timm(view, (384, 384))).view == view
    assert images_of.from_huggingface(images_of.to_huggingface(view, 384)).view == view


@pytest.mark.parametrize("crop", ["resize", "center", "resize_center"])
@pytest.mark.parametrize(
    ("own", "is_there"), [("antialias", True), ("bicubic", True), ("linear", False), ("bilinear", False)]
)
def test_timm_makes_our_images_of_its_configuration_where_it_has_the_filter(crop, own, is_there):
    """The area filter was written as bilinear without a word, and the loss was another one there."""
    view = {"eval_crop": crop, "eval_resize": 40, "resize_filter": own}
    cfg = images_of.to_timm(view, (32, 32))
    resize, picture = int(32 / cfg["crop_pct"]), np.random.default_rng(0).integers(0, 256, (60, 84, 3), dtype=np.uint8)
    # timm's eval transforms: torchvision's Resize, CenterCrop and Normalize.
    width, height = (resize * 84 // 60, resize) if cfg["crop_mode"] == "center" else (resize, resize)
    resample = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}[cfg["interpolation"]]
    theirs = np.asarray(Image.fromarray(picture).resize((width, height), resample))
    top, left = round((height - 32) / 2), round((width - 32) / 2)
    found = np.zeros((32, 32, 3), np.uint8)
    write_eval_view(picture, found, AugmentConfig(**view))
    differences = np.abs(found - theirs[top : top + 32, left : left + 32].astype(int))
    assert (differences.max() <= 1) == is_there == (images_of.written_filter(view) == "")
    assert (cfg["mean"], cfg["std"]) == ([0.5] * 3, [0.5] * 3)


def test_no_position_of_the_class_token_and_no_biases_are_zeros(
    tmp_path, timm_weights, random_arrays, equations, images
):
    arrays = random_arrays(representation=False)
    for key in arrays:
        if "/query/bias" in key or "/key/bias" in key or "/value/bias" in key:
            arrays[key] = np.zeros_like(arrays[key])
    arrays["Transformer/posembed_input/pos_embedding"][:, 0] = 0
    tensors = {key: tensor for key, tensor in timm_weights.items() if not key.endswith("qkv.bias")}
    tensors["pos_embed"] = tensors["pos_embed"][:, 1:]
    path = folder(tmp_path, tensors, TIMM_CONFIG)
    np.testing.assert_allclose(run(load(path), images), equations(arrays, images, "erf"), atol=2e-5)
    assert notes_of(path) == ["the class token has no position in the file: zeros"]
    assert load(path).config.qkv_bias == "none"
    tensors["blocks.1.attn.qkv.bias"] = timm_weights[
        "blocks.1.attn.qkv.bias"
    ]  # if one layer has a bias, all must have one
    with pytest.raises(UserError, match=r'"blocks.0.attn.qkv.bias" \(48,\) is missing'):
        load(folder(tmp_path, tensors, TIMM_CONFIG))


def notes_of(path):
    said = []
    read_weights(path, said.append)
    return said


SMALL = {"width": 24, "depth": 2, "mlp_width": 41, "num_heads": 3}  # 24 * (41 / 24) is not 41 in floats


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ViT-mu/4", {"layer_scale": 0.1, "gelu": "quick", "qk_norm": True, "pool": "mean"}),
        ("ViT-mu/4", {**SMALL, "gelu": "erf"}),
        ("ViT-mu/4", {**SMALL, "pool": "map"}),
        ("ViT-mu/4", {"pool": "gap", "pool_norm": True}),
        ("ViT-mu/4", {"registers": 2, "pool": "gap"}),
        ("ViT-mu/4", {"classes": 0, "size": (16, 24)}),
        ("ViT-mu/4", {"pool": "gap", "size": (16, 24)}),
    ],
)
def test_out_to_timm_and_in_again_is_exact(tmp_path, name, changes):
    model = random_model(name, kernel="bicubic_antialias", **changes)
    tensors, config = to_timm(model, None, {})
    assert same(load(folder(tmp_path, tensors, config)), model)
    assert int(model.config.width * config["model_args"]["mlp_ratio"]) == model.config.mlp_width


def test_resnets_in_timms_names_come_back(tmp_path):
    hybrid = random_model(
        "R26+S/32",
        stem=(2, 1),
        patch_size=1,
        depth=1,
        width=24,
        num_heads=3,
        mlp_width=40,
        gelu="erf",
        kernel="bicubic_antialias",
    )
    tensors = write_model(hybrid.state_dict(), hybrid.config, NAMES["timm"])
    assert tensors["patch_embed.backbone.stages.1.blocks.0.downsample.norm.bias"].shape == (512,)
    assert same(load(folder(tmp_path, tensors, {"model_args": {"num_heads": 3}})), hybrid)
    of_hybrid, bit = tensors, random_model("BiT-R50x1", units=(2, 1), width=32)
    tensors = write_model(bit.state_dict(), bit.config, NAMES["timm_bit"])
    assert tensors["head.fc.weight"].shape == (5, 256, 1, 1)
    assert same(load(folder(tmp_path, tensors), image_size=16), bit)
    # timm's kernels have torch's axes, as ours have; a transposed one would not be equal.
    state = {**hybrid.state_dict(), **{f"bit.{name}": tensor for name, tensor in bit.state_dict().items()}}
    for i in (1, 2, 3):
        assert torch.equal(tensors[f"stages.0.blocks.1.conv{i}.weight"], state[f"bit.units.1.conv{i}.weight"])
        assert torch.equal(
            of_hybrid[f"patch_embed.backbone.stages.0.blocks.1.conv{i}.weight"], state[f"stem.units.1.conv{i}.weight"]
        )


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "wrap",
    [dict, lambda s: {"model": s, "epoch": 3}, lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}}],
)
def test_a_lone_file_of_a_known_size(tmp_path, wrap, legacy):
    model = random_model(gelu="erf", kernel="bicubic_antialias")
    content = wrap(to_timm(model, None, {})[0])
    torch.save(content, tmp_path / "weights.pth", _use_new_zipfile_serialization=not legacy)
    assert same(load(tmp_path / "weights.pth"), model)


def test_an_unknown_number_of_heads_is_asked_for(tmp_path, timm_weights):
    torch.save(timm_weights, tmp_path / "weights.pth")
    with pytest.raises(UserError, match=r"do not tell the number of heads.*config\.json"):
        load(tmp_path / "weights.pth")


def test_pickles_are_not_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "sprung"), "w")

    for name, legacy in (("weights.pth", True), ("pytorch_model.bin", False)):
        torch.save({"cls_token": Trap()}, tmp_path / name, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(UserError, match=f"{name}: not a readable weights file"):
            load(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_unknown_and_odd_tensors_are_named(tmp_path, timm_weights):
    for changes, message in (
        ({"blocks.0.attn.odd": torch.zeros(4)}, r'"blocks.0.attn.odd" \(4,\) is not part of this model'),
        ({"pos_embed": torch.zeros(1, 12, 16)}, '"pos_embed" has 12 rows'),
        (
            {"dist_token": torch.zeros(D)},
            "distillation token",
        ),
    ):
        tensors = {key: tensor for key, tensor in (timm_weights | changes).items() if tensor is not None}
        with pytest.raises(UserError, match=message):
            load(folder(tmp_path, tensors, TIMM_CONFIG))
    changed = {**TIMM_CONFIG, "model_args": {**TIMM_CONFIG["model_args"], "global_pool": "avgmax"}}
    with pytest.raises(UserError, match="global_pool = avgmax"):
        load(folder(tmp_path, timm_weights, changed))


@pytest.mark.parametrize("name", ["checksums.json", "weights.pth", "weights.npz"])
def test_weights_of_a_file_server_that_fails_are_not_called_damaged(tmp_path, monkeypatch, name):
    """That was exit code 2, after which no supervisor starts the run again, and advice to download a good file
    again.
    """
    path = tmp_path / ("a.safetensors" if name == "checksums.json" else name)
    if path.suffix == ".safetensors":
        save(random_model(), path)
        sums = {path.name: {"bytes": path.stat().st_size, "sha256": "0" * 64}}
        (tmp_path / name).write_text(json.dumps(sums))
        broken = (hashlib, "file_digest")
    else:
        path.write_bytes(b"")
        broken = (zipfile, "is_zipfile") if name == "weights.pth" else (np, "load")

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(*broken, fail)
    with pytest.raises(OSError, match="Input/output") as error:
        load(path)
    assert error.value.filename == str(path)


# ---------------------------------------------------------------------- Hugging Face


def hf_config(transformers, kind="ViT", **changes):
    sizes = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    cls = getattr(transformers, f"{kind}Config")
    return cls(**sizes | {"intermediate_size": D, "mlp_ratio": 1, "num_labels": D} | changes)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [{"hidden_act": "gelu_pytorch_tanh"}, {"qkv_bias": False}, {"image_size": [16, 24]}, {"layer_norm_eps": 1e-2}],
)
def test_logits_are_transformers(tmp_path, transformers, changes):
    theirs = randomised(transformers.ViTForImageClassification(hf_config(transformers, **changes)))
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path).eval()
    x = torch.rand(3, 3, *ours.config.image_size) * 2 - 1
    assert ours.config.layer_norm_eps == changes.get("layer_norm_eps", 1e-12)
    assert (theirs(x).logits - ours(x)).abs().max() < 5e-6
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")  # with its names in memory
    (tmp_path / "model.safetensors").unlink()
    assert same(load(tmp_path), ours)


@torch.no_grad()
@pytest.mark.parametrize("size", [(24, 32), (8, 12)])
@pytest.mark.parametrize(
    ("kind", "kernel"),
    [("ViT", "bicubic"), ("Dinov2", "bicubic"), ("Dinov2WithRegisters", "bicubic_antialias")],
)
def test_positions_of_another_size_are_transformers(tmp_path, transformers, kind, kernel, size):
    theirs = randomised(getattr(transformers, f"{kind}Model")(hf_config(transformers, kind)))
    theirs.save_pretrained(tmp_path)
    write_halves(tmp_path)
    x = torch.rand(2, 3, *size) * 2 - 1
    expected = theirs(x, **({"interpolate_pos_encoding": True} if kind == "ViT" else {})).last_hidden_state

    def difference(path):
        ours = load(path, image_size=size).eval()
        return float((ours.encode(ours.embed(x)) - expected).abs().max() / expected.abs().max())

    assert difference(tmp_path) < 1e-5
    save(load(tmp_path), tmp_path / "ours.safetensors")
    assert read_weights(tmp_path / "ours.safetensors")[0].kernel == kernel
    assert difference(tmp_path / "ours.safetensors") < 1e-5


def test_the_kernel_is_that_of_the_project_whose_names_a_file_has(tmp_path, timm_weights):
    """DINOv2 and DeiT III as published resample without antialiasing, but for DINOv2 with registers."""
    mask, registers = {"mask_token": torch.zeros(1, D)}, {"register_tokens": torch.zeros(1, 3, D)}
    of_deit = {f"blocks.{i}.gamma_{j}": torch.ones(D) for i in (0, 1) for j in (1, 2)}
    for added, kernel in (
        ({}, "bicubic_antialias"),
        (mask, "bicubic"),
        (of_deit, "bicubic"),
        (mask | registers, "bicubic_antialias"),
    ):
        path = folder(tmp_path, timm_weights | added, TIMM_CONFIG)
        assert read_weights(path).config.kernel == kernel


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "preprocessing"),
    [
        ({}, {"eval_crop": "resize", "resize_filter": "bicubic"}),
        ({}, {"eval_crop": "resize_center", "eval_resize": 20, "image_size": 16}),
        ({"gelu": "erf", **SMALL}, {"eval_crop": "center", "eval_resize": 20, "image_size": 16}),
        ({"classes": 0, "representation": True}, {"eval_crop": "resize"}),
    ],
)
def test_out_to_transformers_and_in_again(tmp_path, transformers, changes, preprocessing):
    model, x = random_model(kernel="bicubic", **changes), torch.rand(2, 3, 16, 16)
    classes = list("abcde") if model.config.num_classes else None
    path = folder(tmp_path / "hf", *to_huggingface(model, classes, preprocessing))
    assert same(load(path), model)
    extra = read_weights(path)[2]
    assert extra.get("classes") == classes
    assert preprocessing.items() <= extra["preprocessing"].items()
    if classes:
        theirs = transformers.AutoModelForImageClassification.from_pretrained(path).eval()
        assert theirs.config.id2label[2] == "c"
        logits = theirs(x).logits
    else:
        logits = transformers.AutoModel.from_pretrained(path).eval()(x).pooler_output
    assert (logits - model(x)).abs().max() < 5e-6
    picture = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    pixels = transformers.AutoImageProcessor.from_pretrained(path)(picture, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 16, 16)
    if preprocessing["eval_crop"] == "center":
        assert np.allclose(pixels[0].permute(1, 2, 0), picture[2:18, 2:18] / 127.5 - 1, atol=1e-5)


SQUARE, CROP = {"height": 40, "width": 40}, {"height": 32, "width": 32}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ViT", {"size": CROP}),
        ("CLIP", {"size": 40, "crop_size": 32, "do_center_crop": True}),  # as in the files of OpenAI's models
        ("Bit", {"size": {"shortest_edge": 40}, "crop_size": CROP, "do_center_crop": True}),
        ("Bit", {"size": SQUARE, "crop_size": CROP, "do_center_crop": True}),
    ],
)
def test_images_are_read_as_transformers_reads_them(transformers, kind, settings):
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    picture = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    processor = getattr(transformers, f"{kind}ImageProcessor")(**settings, **halves)
    expected = np.asarray(processor(picture, return_tensors="pt")["pixel_values"][0]).transpose(1, 2, 0)
    view = dict(images_of.from_huggingface(settings | halves).view)
    assert view.pop("image_size") == 32
    found = np.zeros((32, 32, 3), np.uint8)
    write_eval_view(picture, found, AugmentConfig(**view))
    assert np.abs(found / 127.5 - 1 - expected).mean() < 0.001  # a level is 0.008


@torch.no_grad()
def test_the_mean_of_a_processor_is_folded_in(tmp_path, transformers):
    theirs = randomised(transformers.ViTForImageClassification(hf_config(transformers)))
    theirs.save_pretrained(tmp_path)
    processor = transformers.ViTImageProcessor(
        size={"height": 16, "width": 16}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
    )
    processor.save_pretrained(tmp_path)
    picture = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    expected = theirs(processor(picture, return_tensors="pt")["pixel_values"]).logits
    assert (run(load(tmp_path), picture[None] / 127.5 - 1) - expected).abs().max() < 1e-5


# ---------------------------------------------------------------------- DINOv2


def test_a_lone_dinov2_is_taken_to_read_imagenets_statistics(tmp_path):
    model = random_model(gelu="erf", classes=0)
    tensors, _ = to_timm(model, None, {})
    ones = {f"blocks.0.ls{i}.gamma": torch.ones(32) for i in (1, 2)}
    torch.save(tensors | ones | {"mask_token": torch.zeros(1, 32)}, tmp_path / "dinov2.pth")
    pixels = torch.rand(2, 3, 16, 16)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.no_grad():
        expected = model((pixels - mean) / std)
        assert (load(tmp_path / "dinov2.pth").eval()(pixels * 2 - 1) - expected).abs().max() < 2e-5


def write_halves(folder):
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(halves))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Dinov2", "Dinov2WithRegisters"])
def test_dinov2s_classifier_reads_the_class_token_and_the_mean_of_patches(tmp_path, transformers, kind):
    theirs = randomised(getattr(transformers, f"{kind}ForImageClassification")(hf_config(transformers, kind)))
    theirs.save_pretrained(tmp_path)
    write_halves(tmp_path)
    ours = load(tmp_path).eval()
    x = torch.rand(3, 3, 16, 16) * 2 - 1
    logits = theirs(x).logits
    assert ours.config.pool == "both"
    assert (ours(x) - logits).abs().max() < 1e-5 * logits.abs().max()
    tokens, expected = ours.encode(ours.embed(x)), theirs.base_model(x).last_hidden_state
    assert tokens.shape == expected.shape
    assert (tokens - expected).abs().max() < 1e-5
    assert load(tmp_path, num_classes=7).head.weight.shape == (7, 2 * D)
    path = folder(tmp_path / "written", *to_huggingface(ours, None, {}))
    assert same(load(path), ours)
    again = transformers.AutoModelForImageClassification.from_pretrained(path).eval()
    assert (again(x).logits - logits).abs().max() < 1e-5 * logits.abs().max()


def test_a_model_of_another_kind_is_named(tmp_path, timm_weights):
    with pytest.raises(UserError, match="swin"):
        load(folder(tmp_path, timm_weights, {"model_type": "swin"}))
