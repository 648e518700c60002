"""Weights as Hugging Face's tools store them: in several files with an index, and in their cache."""

import json

import pytest
import torch

from pipeline.base.errors import UserError
from pipeline.model import create, load, to_huggingface
from pipeline.model.files import write_safetensors


@pytest.fixture
def model():
    return create("ViT-mu/4", 16, 5, kernel="bicubic", seed=1)


@pytest.fixture
def sharded(tmp_path, monkeypatch, model):
    """A snapshot in a cache, its tensors in two files."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--google--vit-mu"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    (repository / "snapshots" / "newer").mkdir()
    tensors, config, processor = to_huggingface(model, None, {})
    names = sorted(tensors)
    places = {name: f"model-0000{1 + (i > 9)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        write_safetensors({name: tensors[name] for name in names if places[name] == file}, snapshot / file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    contents = {"model.safetensors.index": index, "config": config, "preprocessor_config": processor}
    for name, content in contents.items():
        (snapshot / f"{name}.json").write_text(json.dumps(content))
    return snapshot


def test_shards_are_read_by_index_folder_repository_and_name(sharded, model):
    index = sharded / "model.safetensors.index.json"
    shard = sharded / "model-00002-of-00002.safetensors"
    for path in (sharded, index, shard, sharded.parents[1], "hf://google/vit-mu"):
        read = load(path)
        assert read.config == model.config
        assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_what_is_missing_is_named(sharded):
    with pytest.raises(UserError, match=r"hf://google/vit is not in .*hf download google/vit$"):
        load("hf://google/vit")
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = min(content["weight_map"])
    index.write_text(json.dumps({"weight_map": content["weight_map"] | {"odd": content["weight_map"][first]}}))
    with pytest.raises(UserError, match=r'"odd" is in none of its shards \(1 such\)'):
        load(sharded)
    for name in ("../secret.safetensors", "model-00009-of-00002.safetensors"):
        index.write_text(json.dumps({"weight_map": content["weight_map"] | {first: name}}))
        with pytest.raises(UserError, match=r"shard .* is missing"):
            load(sharded)
    index.write_text("{}")
    with pytest.raises(UserError, match=r"index\.json: .*must be dict"):
        load(sharded)
