"""What is done with a trained model gives on a GPU what it gives on a CPU: drawings, a segmentation, a task of VTAB."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from block_pairs import write_block_pairs
from given_images import images as images_given
from tiny import make_dataset
from tiny_vtab import job_of

from pipeline import model as models
from pipeline.data.dataset.manifest import open_dataset
from pipeline.evaluate.segmentation import run as segmentation
from pipeline.experiment.vtab import settings_of
from pipeline.experiment.vtab_cell import VtabCell, run_cell
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.explain import explain
from pipeline.settings import schema
from pipeline.settings.commands.segment import SegmentConfig
from pipeline.settings.commands.transfer import VtabConfig
from pipeline.settings.commands.weights import ExplainConfig

TASK = TASKS[2]
SPLITS = {"train800": 32, "val200": 16, "train800val200": 48, "test": 40}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = models.create("ViT-mu/4", 16, 4, seed=3, depth=2)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    path = tmp_path_factory.mktemp("gpu_weights") / "random.pt"
    models.save(model, path, {"classes": [f"class{i}" for i in range(4)], "loss": "softmax", "run": "try", "step": 7})
    return path


def test_drawings(weights: Path, dataset: Path, tmp_path: Path, device: torch.device) -> None:
    numbers = []
    for kind in {device.type, "cpu"}:
        out = tmp_path / kind
        given = [f"weights={weights}", f"data={dataset}", "split=val", f"out={out}", f"device={kind}", "num_drawn=2"]
        explain.run(schema.load(ExplainConfig, None, given))
        numbers.append(json.loads((out / "explain.json").read_text()))
        assert len(list(out.glob("*.png"))) == 7
    distances = [found["mean_attention_distance"] for found in numbers]
    np.testing.assert_allclose(distances[0], distances[-1], rtol=1e-3)
    assert len(numbers) == (1 if device.type == "cpu" else 2)


def test_segmentation(weights: Path, tmp_path: Path, device: torch.device) -> None:
    """The same bits each time, and the score of a CPU."""
    images, masks = write_block_pairs(tmp_path / "blocks", 16)
    scores, layers = [], []
    for kind, out in ((device.type, "first"), (device.type, "again"), ("cpu", "cpu")):
        given = [
            f"weights={weights}",
            images_given(images),
            f"masks={masks}",
            f"out={tmp_path / out}",
            f"device={kind}",
            "steps=30",
            "train_batch=4",
            "lr=0.05",
            "val_share=0.3",
        ]
        scores.append(segmentation.run(schema.load(SegmentConfig, None, given))["miou"])
        layers.append((tmp_path / out / "head.safetensors").read_bytes())
    assert layers[0] == layers[1]
    assert scores == pytest.approx([scores[-1]] * 3, abs=0.02)
    assert scores[0] > 0.4


@pytest.mark.parametrize("precision", ["fp32", "bf16"] if torch.cuda.is_available() else ["fp32"])
def test_a_cell_of_vtab(weights: Path, tmp_path: Path, device: torch.device, precision: str) -> None:
    """Learns four colours, the same bits each time."""
    data = open_dataset(make_dataset(tmp_path / "tasks" / TASK.name, SPLITS, per_shard=20))
    given = [
        f"weights={weights}",
        f"data={tmp_path / 'tasks'}",
        "protocol.name=test",
        "protocol.image_size=16",
        "protocol.batch=16",
        "protocol.length=[40 epochs]",
        "protocol.lr=[0.05]",
        "protocol.schedule.decay=cosine",
        "protocol.schedule.warmup=2 steps",
        "protocol.augment.crop=inception",
        "protocol.augment.eval_crop=resize",
        "protocol.clip=1",
        "micro_batch=16",
        "threads=1",
        f"precision={precision}",
    ]
    config = schema.load(VtabConfig, None, given)
    cell = VtabCell(TASK, "search", settings_of(config.protocol)[0], 0, data.fingerprint)
    first, again = ({**run_cell(job_of(cell, config)), "seconds": 0} for _ in range(2))
    assert first == again
    assert first["accuracy"] > 0.9
    assert (first["device"] == "cpu") == (device.type == "cpu")
