"""Data sets, run folders and YAML files of earlier versions still work.

made_2026-11-22.tar.xz was made by commit a2925dc: `old.yaml`, its data set (24 + 6 images of 8 px), and the folder of its run on two
ranks, as a kill after step 8 would have left it with one checkpoint, of step 3. metrics.jsonl has the losses of all 8 steps.
"""

import json
import tarfile
from pathlib import Path

import pytest
import torch
from forked import Forge
from ranks import metrics

from data_tools.check import verify
from pipeline.checkpoint.store import Checkpoints
from pipeline.data.dataset.manifest import open_dataset
from pipeline.evaluate.loaded_model import load_model
from pipeline.settings import schema
from pipeline.settings.commands.data import VerifyConfig
from pipeline.settings.commands.weights import WeightsConfig
from pipeline.settings.run import RunConfig

ARCHIVE = Path(__file__).with_name("made_2026-11-22.tar.xz")
FINGERPRINT = "17839809249480c4"


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The unpacked archive, and the current folder: its files name each other by relative paths."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_data_set_opens_and_its_images_are_read(old: Path) -> None:
    dataset = open_dataset("datasets/old")
    assert dataset.fingerprint.startswith(FINGERPRINT)
    assert {name: len(dataset.split(name)) for name in ("train", "val")} == {"train": 24, "val": 6}


def test_verification_finds_a_data_set_intact(old: Path, ray_cluster: int) -> None:
    report = verify.run(VerifyConfig(data=str(old / "datasets/old")))
    assert report["is_whole"]
    assert report["decoded"] == 30


def test_a_run_and_a_checkpoint_load_as_weights(old: Path) -> None:
    for weights in ("runs/old", "runs/old/checkpoints/step-00000003"):
        loaded = load_model(WeightsConfig(weights=weights))
        assert loaded.model(torch.zeros(2, 3, 8, 8)).shape == (2, 4)


def train_from_yaml(arguments: tuple[str, list[str]]) -> None:
    """In a rank."""
    from pipeline.train.run import run_training

    file, overrides = arguments
    run_training(schema.load(RunConfig, Path(file), overrides))


@pytest.mark.parametrize("world_size", [2, 1])
def test_a_run_resumes_with_the_losses_that_it_had(world_size: int, old: Path, forge: Forge) -> None:
    before = metrics(old / "runs/old")
    assert sorted(before) == list(range(1, 9))
    overrides = [f"out={old}/runs", f"data.path={old}/datasets/old", "track.enabled=false", "track.figures=false"]
    run = forge.start_work(world_size, "test_old_versions:train_from_yaml", [str(old / "old.yaml"), overrides])
    assert run.wait() == [0] * world_size, run.said()
    assert "step 4/8" in run.said()
    assert "step 3/8" not in run.said()
    after = metrics(old / "runs/old")
    assert after == pytest.approx(before, rel=1e-4)
    assert Checkpoints(old / "runs/old/checkpoints").candidates()[0].name == "step-00000008"
    assert json.loads((old / "runs/old/status.json").read_text())["status"] == "finished"
