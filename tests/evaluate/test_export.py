"""Export: the files, the other program's outputs for them, and errors that leave nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.base.errors import UserError
from pipeline.evaluate import export
from pipeline.model import create, load, resample_positions, save
from pipeline.settings.commands.weights import ExportConfig

ROOT = Path(__file__).parents[2]


def random_weights(path, name="ViT-mu/4", size=16, classes=5, **changes):
    model = create(name, size, classes, **changes).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    save(model, path, {"classes": [f"class{i}" for i in range(classes)], "preprocessing": {"eval_crop": "resize"}})
    return model


@pytest.fixture
def weights(tmp_path):
    random_weights(tmp_path / "model.pt")
    return tmp_path / "model.pt"


def run(weights, form, out, **settings):
    config = ExportConfig(weights=str(weights), format=form, out=str(out), **settings)
    config.check()
    return export.run(config)


FORMS = {"safetensors": "a.safetensors", "npz": "a.npz", "big_vision": "b.npz", "timm": "timm", "huggingface": "hf"}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_other_side_computes_the_same(weights, tmp_path, form, capsys):
    out = tmp_path / "new" / FORMS[form]
    difference = run(weights, form, out)
    assert difference.largest <= 1e-6
    assert difference.scale > 0.1
    back, model = load(out), load(weights)
    if form != "big_vision":  # which adds the class token's position to the token
        assert all(
            torch.equal(a, b) for a, b in zip(back.state_dict().values(), model.state_dict().values(), strict=True)
        )
    said = capsys.readouterr().out
    assert "GELU tanh" in said
    assert {"huggingface": "transformers ", "timm": "timm"}.get(form, "our own reader") in said
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.slow
def test_graphs_take_batches_of_any_size(weights, tmp_path):
    """ONNX by onnxruntime, and torch.export: exported with two images, compared on four, run on seven here."""
    import onnxruntime

    images, model = torch.rand(7, 3, 16, 16), load(weights).eval()
    with torch.no_grad():
        expected = model(images)
    assert run(weights, "onnx", tmp_path / "a.onnx").largest < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    assert [i.name for i in (*session.get_inputs(), *session.get_outputs())] == ["images", "logits"]
    np.testing.assert_allclose(session.run(None, {"images": images.numpy()})[0], expected, atol=1e-5)
    assert run(weights, "torch_export", tmp_path / "a.pt2").largest < 1e-5
    assert torch.allclose(torch.export.load(tmp_path / "a.pt2").module()(images), expected, atol=1e-5)


def test_another_size_and_no_head(weights, tmp_path, capsys):
    run(weights, "safetensors", tmp_path / "a.safetensors", image_size=24, kernel="bicubic", head=False)
    back = load(tmp_path / "a.safetensors")
    assert (back.config.num_classes, back.config.image_size) == (0, (24, 24))
    assert torch.equal(back.positions, resample_positions(load(weights).positions.detach(), (6, 6), "bicubic"))
    assert "positions: 4 x 4 resampled to 6 x 6 by the kernel bicubic" in capsys.readouterr().out


def test_of_hugging_face_into_ours_asks_transformers_first(weights, tmp_path, capsys):
    run(weights, "huggingface", tmp_path / "hf")
    processor = json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())
    processor |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (tmp_path / "hf" / "preprocessor_config.json").write_text(json.dumps(processor))
    capsys.readouterr()
    run(tmp_path / "hf", "safetensors", tmp_path / "a.safetensors")
    said = capsys.readouterr().out
    assert "transformers" in said
    assert "the program of these weights" in said
    assert "folded into the patch embedding" in said


@pytest.mark.parametrize(
    ("changes", "form", "out", "message"),
    [
        # vision_transformer uses tanh: for weights of this size the logits change by 0.001.
        ({"gelu": "erf"}, "npz", "a.npz", "our own reader differs from ours by more than tolerance = 0.0001"),
        ({"representation": True}, "timm", "timm", "cannot hold a representation layer .*head=false"),
        ({"positions": "relative"}, "huggingface", "hf", "cannot hold relative positions"),
        ({"name": "BiT-R50x1", "units": (1,), "width": 32}, "onnx", "a.onnx", "Use format=torch_export"),
        ({}, "onnx", "a.bin", r"out = .*a\.bin of format = onnx must end in \.onnx"),
        ({}, "timm", "", "is an existing folder"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_stays(tmp_path, changes, form, out, message):
    (tmp_path / "out").mkdir()
    random_weights(tmp_path / "model.pt", **changes)
    with pytest.raises(UserError, match=message):
        run(tmp_path / "model.pt", form, tmp_path / "out" / out)
    assert not any((tmp_path / "out").iterdir())


def test_a_head_that_is_not_trained_is_said(tmp_path, capsys):
    save(create("ViT-mu/4", 16, 5), tmp_path / "model.pt")
    run(tmp_path / "model.pt", "safetensors", tmp_path / "a.safetensors")
    assert "so the comparison shows little" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_says_a_mistake_in_one_line(tmp_path):
    command = [sys.executable, ROOT / "launch" / "export.py", "weights=absent", "format=npz", f"out={tmp_path}/a.npz"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "error: absent: no such file or folder.\n")
