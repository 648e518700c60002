"""Random weights of DINOv2 and DINOv3, in folders of transformers, go through every command that takes weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import NUM_CLASSES, make_dataset
from tiny_vtab import job_of

from pipeline import model as models
from pipeline import objectives
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.data.loading.loader import Batch
from pipeline.evaluate import export, predict, report
from pipeline.experiment.vtab import settings_of
from pipeline.experiment.vtab_cell import VtabCell, run_cell
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.explain import explain
from pipeline.objectives.parameters import optimizers
from pipeline.settings import schema
from pipeline.settings.commands.transfer import VtabConfig
from pipeline.settings.commands.weights import ExplainConfig, ExportConfig, PredictConfig, ScoreConfig
from pipeline.settings.run import RunConfig

SIDE = 32
TASK = TASKS[2]
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": SIDE, "patch_size": 8}
BACKBONES = {
    "Dinov2WithRegistersModel": {"use_swiglu_ffn": True, "mlp_ratio": 2},
    "DINOv3ViTModel": {"intermediate_size": 64, "num_register_tokens": 4},
}


@pytest.fixture(scope="module", params=BACKBONES)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers  # Here, because it takes seconds.

    cls = getattr(transformers, request.param)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    cls(cls.config_class(**SIZES | BACKBONES[request.param])).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("tasks") / TASK.name
    return open_dataset(make_dataset(folder, {"train800val200": 32, "train": 32, "test": 16}, size=SIDE))


def fine_tuned(weights: Path, data: Dataset, freeze: str) -> models.Model:
    """After one step, as `launch/finetune.py` loads, freezes and updates it."""
    config = schema.load(
        RunConfig,
        None,
        [
            "name=x",
            f"data.path={data.path}",
            f"init.weights={weights}",
            f"model.image_size={SIDE}",
            "train.length=10 steps",
            "train.loss=softmax",
            "train.global_batch=4",
            "train.micro_batch=4",
            "engine.precision=fp32",
            "data.streams=4",
            f"train.freeze={freeze}",
        ],
    )
    model = models.load(weights, image_size=SIDE, num_classes=NUM_CLASSES, new_head=True)
    objective = objectives.create(config, model).train()
    labels = torch.arange(4).view(4, 1)
    pixels = torch.randint(0, 256, (1, 4, SIDE, SIDE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    batch = Batch((pixels,), labels, torch.ones(4, dtype=torch.bool), np.arange(4), np.zeros(4, np.int64))
    optimizer = torch.optim.AdamW(
        optimizers.parameter_groups(objective, objective.decayed(), config.optimizer), lr=0.01
    )
    for _ in range(2):  # The new head is zero, so the first step trains it alone.
        optimizer.zero_grad()
        objective(*objective.inputs(batch, torch.device("cpu"), None))[0].backward()
        optimizer.step()
    return model


@pytest.mark.slow
def test_a_published_backbone_goes_through_every_command(weights: Path, data: Dataset, tmp_path: Path) -> None:
    scores = report.run(
        schema.load(
            ScoreConfig,
            None,
            [
                f"weights={weights}",
                f"data={data.path}",
                "split=test",
                "device=cpu",
                f"out={tmp_path / 'report'}",
                "classify=false",
                "shots=[1]",
                "neighbours=3",
                "train_split=train",
            ],
        )
    )
    assert scores

    before = models.load(weights).state_dict()
    for freeze in ("backbone", "none"):
        model = fine_tuned(weights, data, freeze)
        changed = {
            name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before.get(name, tensor[:0]))
        }
        assert (changed == {"head.weight", "head.bias"}) == (freeze == "backbone")
        # Nothing else is left without a gradient, LayerScale and the biases of the projection included.
        assert freeze == "backbone" or changed == model.state_dict().keys()
    tuned = tmp_path / "tuned.pt"
    models.save(model, tuned, {"classes": [f"class{i}" for i in range(NUM_CLASSES)], "loss": "softmax"})

    table = predict.run(
        schema.load(PredictConfig, None, [f"weights={tuned}", f"images={data.path}", "split=test", "device=cpu"])
    )
    assert len(table) == 16 * NUM_CLASSES
    settings = [
        f"weights={tuned}",
        f"out={tmp_path / 'explained'}",
        "device=cpu",
        f"images={data.path}",
        "split=test",
        "num_drawn=1",
        "draw=[attention,gradcam,rollout]",
    ]
    explain.run(schema.load(ExplainConfig, None, settings))
    assert {"attention.png", "gradcam.png", "rollout.png"} <= {path.name for path in (tmp_path / "explained").iterdir()}
    # Which compare logits or features. tests/evaluate/test_export.py has the graph of a ViT with all parts of DINOv3, but not
    # that of one with learned positions and registers.
    graph = [("onnx", "model.onnx")] if weights.name.startswith("Dinov2") else []
    for form, out in (*graph, ("huggingface", "folder")):
        config = schema.load(
            ExportConfig,
            None,
            [f"weights={tuned}", f"format={form}", f"out={tmp_path / out}", f"head={out != 'folder'}"],
        )
        assert export.run(config).scale > 0
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["num_register_tokens"] == 4

    # The folder has no preprocessor_config.json, so the comparison with transformers normalises as was assumed.
    config = schema.load(
        ExportConfig, None, [f"weights={weights}", "format=safetensors", f"out={tmp_path / 'ours.safetensors'}"]
    )
    assert export.run(config).scale > 0

    sweep = schema.load(
        VtabConfig,
        None,
        [
            f"weights={weights}",
            f"data={Path(str(data.path)).parent}",
            "protocol.name=test",
            f"protocol.image_size={SIDE}",
            "protocol.batch=16",
            "protocol.length=[2 steps]",
            "protocol.lr=[0.01]",
            "protocol.schedule.warmup=1 steps",
            "micro_batch=16",
            "threads=1",
        ],
    )
    cell = VtabCell(TASK, "final", settings_of(sweep.protocol)[0], 0, data.fingerprint)  # type: ignore[arg-type]
    assert run_cell(job_of(cell, sweep))["num_images"] == 16
