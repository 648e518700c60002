"""Weights as Hugging Face's tools store them, in several files with an index and in their cache."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.base.errors import UserError
from pipeline.model import create, load, published, to_huggingface
from pipeline.model.files import find_file, write_safetensors
from pipeline.monitor.origin import find_origin


@pytest.fixture
def model():
    return create("ViT-mu/4", 16, 5, kernel="bicubic", seed=1)


@pytest.fixture
def sharded(tmp_path, monkeypatch, model):
    """A snapshot in a cache, its tensors in two files."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
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
    for path in (sharded, index, shard, "google/vit-mu"):
        read = load(path)
        assert read.config == model.config
        assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_path_comes_before_a_repository_of_its_name(sharded, tmp_path):
    file = find_file(Path("google/vit-mu"))
    assert file.parent == sharded
    assert find_origin(file, "google/vit-mu").path == str(file)  # What a run records, and reads again.
    assert published.is_of_hub("google/vit-mu")  # A job of Ray does not take it for a path that its nodes share.
    shutil.copytree(sharded, "google/vit-mu")
    assert not published.is_of_hub("google/vit-mu")
    assert find_file(Path("google/vit-mu")) == Path("google/vit-mu", file.name)


def test_a_repository_that_is_not_in_the_cache_is_downloaded_by_the_command_in_the_error(sharded):
    # Each file may be there without the other.
    for name in ("config.json", "model.safetensors.index.json"):
        (sharded / name).rename(sharded / "away")
        with pytest.raises(UserError, match="hf download OWNER/NAME"):
            load("google/vit-mu")
        (sharded / "away").rename(sharded / name)
    Path("google").mkdir()  # The name is that of a path now.
    (sharded / "config.json").unlink()
    with pytest.raises(UserError, match=r"google/vit-mu: no such file.*docs/weights\.md"):
        load("google/vit-mu")


def test_what_is_missing_is_named(sharded):
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
