"""Families of published ViTs, as random models of transformers: read, compared, written and read again."""

from dataclasses import replace

import pytest
import torch
from families import FAMILIES, SIZES, difference, random_family, randomised

from pipeline.model import load, read_weights, to_huggingface
from pipeline.model.convert.layouts import NAMES, write_model
from pipeline.model.files import write_folder
from pipeline.model.position import sincos2d


@pytest.mark.parametrize("name", FAMILIES)
def test_features_are_transformers_in_both_directions(tmp_path, transformers, name):
    family = FAMILIES[name]
    theirs = random_family(transformers, family, tmp_path)
    ours = load(tmp_path)
    assert family.expected.items() <= vars(ours.config).items()
    assert difference(theirs, ours, (32, 32)) < 1e-5
    if family.any_size is not None:
        assert difference(theirs, load(tmp_path, image_size=(48, 24)), (48, 24), **family.any_size) < 1e-5
    assert read_weights(tmp_path)[2]["preprocessing"] == {
        "image_size": 32,
        "eval_crop": "resize",
        "resize_filter": "bicubic",
    }

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
        config, state = read_weights(tmp_path)[:2]
        if name == "I-JEPA":
            state["positions"] = sincos2d(replace(config, positions="sincos2d_mae"))
        tensors = {f"module.{key}": tensor for key, tensor in write_model(state, config, NAMES["timm"]).items()}
        if name == "MSN":
            tensors |= {
                "module.fc.fc1.weight": torch.zeros(4, 32),
                "module.fc.bn1.num_batches_tracked": torch.tensor(3),
            }
        torch.save({"epoch": 300, "target_encoder": tensors, "opt": {"lr": 0.1}}, tmp_path / "published.pth")
        said = []
        found, again = read_weights(tmp_path / "published.pth", said.append)[:2]
        assert (found.pool, found.num_heads) == (config.pool, 2)
        assert any("ean" in line and "0.485" in line for line in said)
        assert all(torch.equal(tensor, again[key]) for key, tensor in state.items() if "patch_embedding" not in key)
