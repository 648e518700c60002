"""The benchmark of the model on a CPU: the contestants do the same work."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_tools.bench.record import BenchRecord
from data_tools.bench.training.model_speed import MinimalViT, copy_parameters, run
from pipeline.base.errors import UserError
from pipeline.model import ViTConfig, build, configure
from pipeline.settings.commands.bench import ModelBenchConfig


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_the_minimal_model_computes_what_ours_does(gelu: str) -> None:
    config = configure("ViT-mu/16", 32, 10)
    assert isinstance(config, ViTConfig)
    config = replace(config, gelu=gelu)
    ours = build(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():  # Also the head, which is initialised to zero.
            parameter.normal_(0, 0.3, generator=generator)
        minimal = MinimalViT(config)
        copy_parameters(ours, minimal)
        images = torch.rand(2, 3, 32, 32, generator=generator)
        logits, other = ours.eval()(images), minimal.eval()(images)
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, other, rtol=0, atol=1e-4)


def test_every_contestant_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    config = ModelBenchConfig(
        models=["ViT-mu/16"], image_size=32, batch=2, rounds=1, precisions=["fp32"], json=str(file)
    )
    run(config, BenchRecord("model", config))
    shown = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    measured = [row for row in rows if "cpu_seconds_per_image" in row]
    is_installed = importlib.util.find_spec("transformers") is not None
    assert len(measured) == 2 * (1 + 2 * (3 if is_installed else 2)), (
        "two kinds of work; the product, and two forms of GELU"
    )
    assert all(row["cpu_seconds_per_image"] > 0 for row in measured)
    assert ("not measured: transformers is not installed" in shown) is not is_installed
    assert [row["name"] for row in rows[1:3]] == [
        "ViT-mu/16 fp32 training, ours, tanh",
        "ViT-mu/16 fp32 training, minimal, tanh",
    ]


def test_only_plain_vits() -> None:
    config = ModelBenchConfig(models=["BiT-R50x1"])
    with pytest.raises(UserError, match=r"models: BiT-R50x1 is not a plain Vision Transformer\."):
        run(config, BenchRecord("model", config))
