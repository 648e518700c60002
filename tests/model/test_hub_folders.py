"""Weights as Hugging Face's tools store them, in several files with an index and in their cache, and the commands that
download published weights.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub.utils import validate_repo_id
from ranks import ROOT

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
    for path in (sharded, index, shard, "google/vit-mu", "hf://google/vit-mu"):
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
    assert find_file(Path("hf://google/vit-mu")) == file


def test_a_repository_that_is_not_in_the_cache_is_downloaded_by_the_command_in_the_error(sharded, monkeypatch):
    command = "hf download google/vit-mu"
    # As it is called, but what it finds is in the cache, so that it needs no network.
    hf = subprocess.run(
        [Path(sys.executable).with_name("hf"), *command.split()[1:], "--quiet"],
        env={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(sharded.parents[2]), "HOME": str(sharded.parents[2])},
        capture_output=True,
        text=True,
    )
    assert hf.returncode == 0, hf.stderr
    assert Path(hf.stdout.strip()) == sharded
    # Each file may be there without the other.
    for name in ("config.json", "model.safetensors.index.json"):
        (sharded / name).rename(sharded / "away")
        for weights in ("google/vit-mu", "hf://google/vit-mu"):
            with pytest.raises(UserError, match=f": {command}$"):
                load(weights)
        (sharded / "away").rename(sharded / name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # As where it is not installed.
    with pytest.raises(UserError, match=f": pip install huggingface_hub && {command}$"):
        load("google/vit-mu")
    Path("google").mkdir()  # The name is that of a path now.
    with pytest.raises(UserError, match="google/vit-mu: no such file") as error:
        load("google/vit-mu")
    assert command not in str(error.value)


def commands_in(text):
    return re.findall(r"\b(?:hf download|curl -fL) [^\n`]+", text)


def test_each_family_has_commands_in_the_documentation_and_its_files_in_the_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Their files may lie in the project's folder.
    documented = commands_in((ROOT / "docs" / "weights.md").read_text())
    for family in published.FAMILIES.values():
        assert published.hub_command(family["hub"]) in documented
        if "file" in family:
            with pytest.raises(UserError) as error:
                load(family["file"])
            assert str(error.value).startswith(f"{family['file']}: ")
            assert len(commands_in(str(error.value))) == 1
    for name, command in {
        "dinov2_vits14_reg4_pretrain.pth": "dinov2/dinov2_vits14/dinov2_vits14_reg4_pretrain.pth",
        "dino_deitsmall8_pretrain.pth": "hf download facebook/dino-vits8",
    }.items():
        assert published.remedy(Path("/nowhere", name)).endswith(command)


def test_documented_commands_have_the_form_that_their_programs_take():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").rglob("*.yaml")]
    commands = [shlex.split(found) for page in pages for found in commands_in(page.read_text())]
    assert len(commands) > 15
    hosts = r"storage\.googleapis\.com/(vit_models|big_vision|bit_models)|dl\.fbaipublicfiles\.com/\w+"
    for program, *words in commands:
        if program == "hf":
            validate_repo_id(words[1].rstrip(",;"))
        else:
            _, option, file, address = words
            assert option == "-o"
            assert file.endswith((".npz", ".pth", ".pth.tar"))
            assert re.fullmatch(rf"(https://({hosts})|\$url)/[\w./+-]+{Path(file).suffix}", address)


def test_weights_that_shipped_settings_begin_with_are_a_run_or_have_a_command():
    for file in (ROOT / "configs").rglob("*.yaml"):
        content = yaml.safe_load(file.read_text())
        if isinstance(content, dict) and (weights := (content.get("init") or {}).get("weights")):
            assert weights.startswith("runs/") or commands_in(published.remedy(Path(weights))), file


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
