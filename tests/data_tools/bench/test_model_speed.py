"""The benchmark of the model on a CPU: the contestants do the same work."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from data_tools.bench.model_speed import make_contestants, run
from data_tools.bench.record import Record
from pipeline.errors import UserError
from pipeline.model import ViTConfig, configure
from pipeline.settings.bench import ModelBenchConfig, RecordConfig


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_the_minimal_model_computes_what_ours_does(gelu: str) -> None:
    config = configure("ViT-mu/16", 32, 10)
    assert isinstance(config, ViTConfig)
    found = make_contestants(config, Record("model", RecordConfig()))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for ours, minimal in zip(found["ours", gelu].parameters(), found["minimal", gelu].parameters(), strict=True):
            minimal.copy_(ours.normal_(0, 0.3, generator=generator))  # Also the head, which is initialised to zero.
        images = torch.rand(2, 3, 32, 32, generator=generator)
        logits, other = (found[name, gelu].eval()(images) for name in ("ours", "minimal"))
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, other, rtol=0, atol=1e-4)


def test_every_contestant_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    config = ModelBenchConfig(models=["ViT-mu/16"], image_size=32, batch=2, rounds=2, json=str(file))
    run(config, Record("model", config))
    shown = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    measured = [row for row in rows if "cpu_seconds" in row]
    is_installed = importlib.util.find_spec("transformers") is not None
    assert len(measured) == 2 * 2 * 2 * (3 if is_installed else 2), (
        "two precisions, two kinds of work, two forms of GELU"
    )
    assert all(row["cpu_seconds"] > 0 for row in measured)
    assert ("transformers: not measured, No module named 'transformers'\n" in shown) is not is_installed
    assert shown.count("\n| ViT-mu/16 |") == len(measured)


def test_only_plain_vits() -> None:
    config = ModelBenchConfig(models=["BiT-R50x1"])
    with pytest.raises(UserError, match=r"models: BiT-R50x1 is not a plain Vision Transformer\."):
        run(config, Record("model", config))
