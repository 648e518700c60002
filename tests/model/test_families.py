"""Families of published ViTs, as random models of transformers: read, compared, written and read again."""

import json
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from pipeline.model import load, read_weights, to_huggingface
from pipeline.model.convert.names import NAMES, vit_entries
from pipeline.model.files import write_folder
from pipeline.model.position import sincos2d

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32, "patch_size": 8,
}  # fmt: skip


class Family(NamedTuple):
    model: str  # class of transformers
    config: dict[str, Any]  # fields of its configuration beside SIZES
    expected: dict[str, Any]  # fields of ours
    any_size: dict[str, Any] | None = None  # argument of their forward pass for another image size


INTERPOLATE = {"interpolate_pos_encoding": True}
LAYER_SCALE = {"layerscale_value": 0.5}
SWIGLU = {"use_swiglu_ffn": True, "mlp_ratio": 2}
NO_BIASES = {"query_bias": False, "value_bias": False, "mlp_bias": False, "proj_bias": False}
FAMILIES = {
    "ViT": Family("ViTModel", {}, {"representation": True}, INTERPOLATE),
    "MSN": Family("ViTMSNModel", {}, {"pool": "token"}, INTERPOLATE),
    "I-JEPA": Family("IJepaModel", {}, {"pool": "gap"}, INTERPOLATE),
    "DINOv2": Family("Dinov2Model", {"mlp_ratio": 2} | LAYER_SCALE, {"layer_scale": 0.5}, {}),
    "DINOv2 g": Family("Dinov2Model", SWIGLU, {"swiglu": True, "mlp_width": 48}, {}),
    "DINOv2 g with registers": Family("Dinov2WithRegistersModel", SWIGLU, {"swiglu": True, "registers": 4}, {}),
    "DINOv3": Family("DINOv3ViTModel", {"num_register_tokens": 4}, {"qkv_bias": "qv", "rope_base": 100.0, "registers": 4}, {}),
    "DINOv3, gated": Family(
        "DINOv3ViTModel", {"use_gated_mlp": True, "hidden_act": "silu", "rope_theta": 50.0} | NO_BIASES,
        {"swiglu": True, "qkv_bias": "none", "mlp_bias": False, "out_bias": False, "rope_base": 50.0}, {},
    ),
    "SigLIP": Family("SiglipVisionModel", {}, {"pool": "map", "gelu": "tanh"}, INTERPOLATE),
    "CLIP": Family("CLIPVisionModel", {}, {"embedding_norm": True, "gelu": "quick"}, INTERPOLATE),
    "MetaCLIP 2": Family("MetaClip2VisionModel", {"hidden_act": "gelu"}, {"embedding_norm": True, "gelu": "erf"}, INTERPOLATE),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    import transformers  # here, because it takes seconds

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def randomised(model):
    """The model with noise on every parameter, so that none is zero, one, or equal to another."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def random_family(transformers, family: Family, folder, **changes):
    """A random model of the family and its folder, with a processor that reads images in [-1, 1]."""
    cls = getattr(transformers, family.model)
    model = randomised(cls(cls.config_class(**SIZES | family.config | changes)))
    model.save_pretrained(folder)
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 32, "width": 32}, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


@torch.no_grad()
def difference(theirs, ours, size, **forward) -> float:
    """The largest difference of features and patch tokens, as a part of the largest."""
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(2)) * 2 - 1
    expected = theirs(images, **forward)
    tokens = expected.last_hidden_state
    pooled = expected.get("pooler_output")
    if pooled is None:
        pooled = tokens[:, 0] if ours.config.pool == "token" else tokens.mean(1)
    found, patches = ours.eval()(images, with_patches=True)
    pairs = [(found, pooled)]
    if not ours.config.embedding_norm:  # CLIP normalises the class token only
        pairs.append((patches, tokens[:, -patches.shape[1] :]))
    return max(float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs)


@pytest.mark.parametrize("name", FAMILIES)
def test_features_are_transformers(tmp_path, transformers, name):
    family = FAMILIES[name]
    theirs = random_family(transformers, family, tmp_path)
    ours = load(tmp_path)
    assert family.expected.items() <= vars(ours.config).items()
    assert difference(theirs, ours, (32, 32)) < 1e-5
    if family.any_size is not None:
        assert difference(theirs, load(tmp_path, image_size=(48, 24)), (48, 24), **family.any_size) < 1e-5
    assert read_weights(tmp_path)[2]["preprocessing"] == {
        "image_size": 32, "eval_crop": "resize", "resize_filter": "bicubic"
    }  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families_come_back_from_the_files_that_are_written(tmp_path, transformers, name):
    random_family(transformers, FAMILIES[name], tmp_path)
    ours = load(tmp_path)
    tensors, config, processor = to_huggingface(ours, None, read_weights(tmp_path)[2]["preprocessing"])
    write_folder(tmp_path / "written", tensors, {"config.json": config, "preprocessor_config.json": processor})
    cls = getattr(transformers, FAMILIES[name].model)
    theirs, said = cls.from_pretrained(tmp_path / "written", output_loading_info=True)
    assert not said["unexpected_keys"] | said["mismatched_keys"]
    unused = ("mask_token", "pooler.dense.weight", "pooler.dense.bias")
    empty = {} if ours.config.registers else {"embeddings.register_tokens"}
    assert {key for key in said["missing_keys"] if not key.endswith(unused)} <= set(empty)
    assert difference(theirs.eval(), ours, (32, 32)) < 1e-5
    again = load(tmp_path / "written")
    # CLIP has no bias of the patch embedding, and so it moves into the positions.
    assert again.config == ours.config
    moved = {"patch_embedding.bias", "positions"} if ours.config.embedding_norm else set()
    state = again.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in ours.state_dict().items() if key not in moved)
    assert read_weights(tmp_path)[2] == read_weights(tmp_path / "written")[2]


@torch.no_grad()
def test_siglips_tower_and_classifier_are_read(tmp_path, transformers):
    tower = random_family(transformers, FAMILIES["SigLIP"], tmp_path / "tower")
    whole = transformers.SiglipModel(
        transformers.SiglipConfig(vision_config=tower.config.to_dict(), text_config={**SIZES, "vocab_size": 9})
    )
    whole.vision_model.load_state_dict(tower.state_dict(), strict=False)
    whole.save_pretrained(tmp_path / "whole")
    said = []
    load(tmp_path / "whole", say=said.append)
    assert any("tensors outside of vision_model. left out" in line for line in said)
    assert difference(tower, load(tmp_path / "whole"), (32, 32)) < 1e-5

    config = {"vision_use_head": False, "id2label": {"0": "cat", "1": "dog", "2": "cow"}}
    cls = transformers.SiglipForImageClassification
    classifier = randomised(cls(transformers.SiglipConfig(vision_config=SIZES | config, **config)))
    classifier.save_pretrained(tmp_path / "classifier")
    images = torch.rand(2, 3, 32, 32) * 2 - 1
    logits = classifier(images).logits
    assert (load(tmp_path / "classifier").eval()(images) - logits).abs().max() < 1e-5 * logits.abs().max()
    assert read_weights(tmp_path / "classifier")[2]["classes"] == ["cat", "dog", "cow"]


def test_published_files_of_ijepa_and_msn(tmp_path, transformers):
    """They hold the target encoder under timm's names, MSN's with the head of pre-training."""
    for name in ("I-JEPA", "MSN"):
        sizes = {
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 128,
        }  # of ViT-mu, which is found by its sizes
        random_family(transformers, FAMILIES[name], tmp_path, **sizes)
        config, state, _ = read_weights(tmp_path)
        if name == "I-JEPA":
            state["positions"] = sincos2d(replace(config, positions="sincos2d_mae"))
        tensors = {f"module.{key}": tensor for key, tensor in vit_entries(config, NAMES["timm"]).write(state).items()}
        if name == "MSN":
            tensors |= {
                "module.fc.fc1.weight": torch.zeros(4, 32),
                "module.fc.bn1.num_batches_tracked": torch.tensor(3),
            }
        torch.save({"epoch": 300, "target_encoder": tensors, "opt": {"lr": 0.1}}, tmp_path / "published.pth")
        said = []
        found, again, _ = read_weights(tmp_path / "published.pth", said.append)
        assert (found.pool, found.num_heads) == (config.pool, 2)
        assert any("ean" in line and "0.485" in line for line in said)
        assert all(torch.equal(tensor, again[key]) for key, tensor in state.items() if "patch_embedding" not in key)
