"""Export: the files, the other program's outputs for them, and errors that leave nothing behind."""

import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from model_parts import ALL_PARTS, randomised
from PIL import Image

from pipeline.architecture.pixels import Pixels
from pipeline.base.errors import UserError
from pipeline.data.loading.views import write_eval_view
from pipeline.evaluate import export, predict
from pipeline.evaluate.onnx_predict import EvaluationView
from pipeline.model import configure, create, load, read_weights, resample_positions, safetensors_metadata, save
from pipeline.model.files import write_safetensors
from pipeline.objectives.mae import Mae, MaeSettings
from pipeline.objectives.objective import stored_name
from pipeline.settings import schema
from pipeline.settings.commands.weights import ExportConfig, PredictConfig
from pipeline.settings.run import AugmentConfig


def random_weights(path, name="ViT-mu/4", size=16, classes=5, **changes):
    model = randomised(create(name, size, classes, **changes))
    save(model, path, {"classes": [f"class{i}" for i in range(classes)], "preprocessing": {"eval_crop": "resize"}})
    return model


def random_mae(path, normalise, pixels):
    settings = MaeSettings(decoder_width=16, decoder_depth=2, decoder_heads=2, normalise=normalise, pixels=pixels)
    model = randomised(Mae(create("ViT-mu/8", 32, 0, positions="sincos2d_mae", gelu="erf"), settings))
    tensors = {stored_name(name): tensor for name, tensor in model.state_dict().items()}
    write_safetensors(tensors, path, safetensors_metadata(model.backbone.config, model.extra()))
    return model


@pytest.fixture
def weights(tmp_path):
    random_weights(tmp_path / "model.pt")
    return tmp_path / "model.pt"


def run(weights, form, out, **settings):
    config = ExportConfig(weights=str(weights), format=form, out=str(out), **settings)
    config.check()
    return export.run(config)


FORMS = {"safetensors": "a.safetensors", "timm": "timm", "huggingface": "hf"}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_other_side_computes_the_same(weights, tmp_path, form, capsys):
    out = tmp_path / "new" / FORMS[form]
    difference = run(weights, form, out)
    assert difference.largest <= 1e-6
    assert difference.scale > 0.1
    back, model = load(out), load(weights)
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), model.state_dict().values(), strict=True))
    assert ("resize_filter = linear" in capsys.readouterr().out) == (form in ("huggingface", "timm"))
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, ALL_PARTS], ids=["plain", "all parts"])
def test_graphs_take_batches_of_any_size(tmp_path, changes, recwarn):
    """ONNX by onnxruntime: exported with two images, compared on four, run on seven here."""
    import onnxruntime

    random_weights(weights := tmp_path / "model.pt", **changes)
    images, model = torch.rand(7, 3, 16, 16), load(weights).eval()
    with torch.no_grad():
        expected = model(images)
    assert run(weights, "onnx", tmp_path / "a.onnx").largest < 1e-5
    assert FutureWarning not in {warning.category for warning in recwarn}
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    assert [i.name for i in (*session.get_inputs(), *session.get_outputs())] == ["images", "logits"]
    np.testing.assert_allclose(session.run(None, {"images": images.numpy()})[0], expected, atol=1e-5)
    # What a .safetensors of ours says, too: the configuration, the class names, and how images are read.
    described = session.get_modelmeta().custom_metadata_map["vit-weights"]
    assert described == safetensors_metadata(model.config, read_weights(weights)[2])["vit-weights"]


def photographs(folder, count=50):
    """Smooth colours of many sizes, in the formats, modes and orientations that cameras and editors write."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (5, 7, 3), dtype=np.uint8))
        image = coarse.resize([int(side) for side in random.integers(9, 300, 2)], Image.Resampling.BICUBIC)
        mode = ("RGB", "L", "RGBA", "P", "LA")[number % 5]
        suffix = "png" if mode in ("RGBA", "P", "LA") else "jpg" if number % 2 else "webp"
        exif = Image.Exif()
        exif[0x0112] = 1 + number % 8
        image.convert(mode).save(folder / f"{number:02}.{suffix}", exif=exif)


@pytest.mark.slow
def test_the_script_beside_a_graph_predicts_as_predict_does(tmp_path):
    """On photographs, without this project; probabilities are equal to 1e-4."""
    import onnx

    photographs(tmp_path / "photos")
    weights, view = tmp_path / "model.pt", {"image_size": 16, "eval_resize": 20, "resize_filter": "linear"}
    extra = {"classes": [f"class{i}" for i in range(5)], "preprocessing": view, "loss": "softmax"}
    save(randomised(create("ViT-mu/4", 16, 5)), weights, extra)
    run(weights, "auto", tmp_path / "out" / "a.onnx", image_size=32)
    script = tmp_path / "moved" / "a_predict.py"  # Both together, to a place that knows nothing of this project.
    shutil.move(tmp_path / "out", script.parent)

    arguments = [f"weights={weights}", f"source=[{tmp_path}/photos]", "image_size=32", "device=cpu"]
    graph, classifier = script.with_name("a.onnx"), runpy.run_path(str(script))["Predictor"]
    for loss in ("sigmoid", "softmax"):
        content = onnx.load(graph)
        (metadata,) = (prop for prop in content.metadata_props if prop.key == "vit-weights")
        metadata.value = metadata.value.replace('"softmax"', f'"{loss}"')
        onnx.save(content, other := script.with_name(f"{loss}.onnx"))
        model, expected = classifier(other), {}
        for row in predict.run(schema.load(PredictConfig, None, [*arguments, f"loss={loss}"])).to_pylist():
            expected.setdefault(row["image"], []).append((row["class"], row["probability"]))
        assert len(expected) == 50
        for image, classes in expected.items():
            found = model.predict(image)
            assert [name for name, _ in found] == [name for name, _ in classes]
            np.testing.assert_allclose([share for _, share in found], [share for _, share in classes], atol=1e-4)
    assert not re.search(r"^ *(?:import|from) (?:pipeline|torch)", script.read_text(), re.MULTILINE)

    cv2.imwrite(str(deep := tmp_path / "photos" / "deep.png"), np.full((20, 20), 300, np.uint16))
    command = [sys.executable, "-I", script, tmp_path / "photos"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 1
    lines = dict(line.split("  ", 1) for line in ended.stdout.splitlines())
    assert lines.keys() - expected.keys() == {str(deep)}
    assert "8 bits" in lines[str(deep)]
    assert {image: lines[image].split()[0] for image in expected} == {name: c[0][0] for name, c in expected.items()}


@pytest.mark.parametrize("crop", ["center", "resize", "resize_center"])
@pytest.mark.parametrize("name", ["linear", "bilinear", "antialias", "bicubic"])
def test_the_script_resizes_as_evaluation_does(name, crop):
    """Smaller, larger, by whole factors, images far from square; filters of torch are nearly those of Pillow."""
    random = np.random.default_rng(0)
    sides = [(64, 64), (96, 96), (20, 30), (33, 300), (2, 700), (100, 56), (59, 57), (56, 56), (112, 112), (60, 28)]
    for size in ((28, 28), (24, 40)):
        resize = 0 if crop == "resize" else 32
        view = {"eval_crop": crop, "resize_filter": name, "eval_resize": resize, "image_size": min(size)}
        config = AugmentConfig(eval_crop=crop, resize_filter=name, eval_resize=resize)
        script = EvaluationView({"image_size": size}, view)
        for shape in sides:
            image, expected = random.integers(0, 256, (*shape, 3), dtype=np.uint8), np.empty((*size, 3), np.uint8)
            write_eval_view(image, expected, config)
            differences = np.abs(script.resized(image).astype(int) - expected)
            assert differences.mean() <= (0.6 if name in ("antialias", "bicubic") else 0), (size, shape)


def test_no_script_is_written_for_what_it_cannot_do(tmp_path, capsys):
    pixels = Pixels(("near", "far"), "uint16", (0, 0), (9, 9), (0.5, 0.5), (0.5, 0.5))
    for config in (configure("ViT-mu/4", 16, 0), configure("ViT-mu/4", 16, 5, pixels=pixels)):
        export._write_script(tmp_path / "a.onnx", config)
        assert "no script" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("out", "form", "found"),
    [
        ("a.onnx", "auto", "onnx"),
        ("vit.v2", "timm", "timm"),
        ("a.pt", "auto", ""),
        ("a.onnx", "timm", "timm"),
        ("a", "onnx", ""),
    ],
)
def test_the_suffix_says_the_format(out, form, found):
    config = ExportConfig(weights="w", format=form, out=out)
    if found:
        config.check()
        assert config.written_format == found
        return
    with pytest.raises(UserError, match=r"\bout = .*(?=.*format)"):
        config.check()


@pytest.mark.slow
@pytest.mark.parametrize(("normalise", "pixels"), [(True, "half"), (True, "imagenet"), (False, "half")])
def test_mae_with_its_decoder(tmp_path, normalise, pixels, capsys):
    """Compared by transformers; read again, it is the same."""
    model = random_mae(tmp_path / "model.safetensors", normalise, pixels)
    difference = run(tmp_path / "model.safetensors", "huggingface_mae", out := tmp_path / "hf")
    assert difference.largest <= 1e-5 * difference.scale
    assert difference.scale > 0.1
    losses = re.search(r"transformers \S+: loss (\S+), ours (\S+)", capsys.readouterr().out)
    assert float(losses[1]) == pytest.approx(float(losses[2]), rel=1e-5)
    run(out, "safetensors", tmp_path / "encoder.safetensors")
    assert Mae.from_weights(read_weights(out), print).facts == model.facts


def test_another_size_and_no_head(weights, tmp_path):
    run(weights, "safetensors", tmp_path / "a.safetensors", image_size=26, head=False)
    back = load(tmp_path / "a.safetensors")
    assert (back.config.num_classes, back.config.image_size) == (0, (26, 26))
    assert torch.equal(back.positions, resample_positions(load(weights).positions.detach(), (6, 6), "zoom", (4, 4)))


@pytest.mark.parametrize(("loss", "problem_type"), [("softmax", None), ("sigmoid", "multi_label_classification")])
def test_hugging_face_is_told_of_sigmoids(tmp_path, loss, problem_type):
    """Its image-classification pipeline divides by the sum over all classes otherwise, and so would predict.py of the
    folder.
    """
    save(create("ViT-mu/4", 16, 5), tmp_path / "model.pt", {"loss": loss})
    run(tmp_path / "model.pt", "huggingface", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text()).get("problem_type") == problem_type
    assert read_weights(tmp_path / "hf")[2].get("loss", "softmax") == loss


@pytest.mark.parametrize(
    ("changes", "form", "out", "message"),
    [
        ({"representation": True}, "timm", "timm", "cannot hold a representation layer .*head=false"),
        (
            {"layer_norm_eps": 1e-3},
            "timm",
            "timm",
            "differs from ours .*Not written",
        ),
        ({"name": "BiT-R50x1", "units": (1,), "width": 32}, "onnx", "a.onnx", "max pooling"),
        ({"size": (16, 24)}, "huggingface", "hf", "cannot hold images of 16 x 24 px"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_stays(tmp_path, changes, form, out, message):
    (tmp_path / "out").mkdir()
    random_weights(tmp_path / "model.pt", **changes)
    with pytest.raises(UserError, match=message):
        run(tmp_path / "model.pt", form, tmp_path / "out" / out)
    assert not any((tmp_path / "out").iterdir())


def test_a_full_disk_is_named_and_nothing_stays(weights, tmp_path):
    out = tmp_path / "out" / "timm"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as full:
            run(weights, "timm", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.value.filename == str(out)
    assert not any(out.parent.iterdir())


@pytest.mark.parametrize(("form", "name"), [("safetensors", "a.safetensors"), ("timm", "timm")])
def test_all_of_it_is_on_the_disk_before_it_has_its_name(weights, tmp_path, monkeypatch, form, name):
    """Else a file of the right name and size may be zeros after a power failure."""
    out, done, flush, rename = tmp_path / "out" / name, [], os.fsync, os.replace

    def flushed(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        flush(descriptor)

    def renamed(source, target):
        done.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    run(weights, form, out)
    before = {path.name for path in done[: done.index(out)]}
    assert before >= {name, *os.listdir(out if out.is_dir() else out.parent)}
    assert done[-1] == out.parent


def test_the_second_of_two_at_once_is_refused(weights, tmp_path, monkeypatch):
    write, out = export._write, tmp_path / "out" / "timm"

    def write_slowly(*arguments):
        write(*arguments)
        (out / "model.safetensors").mkdir(parents=True)

    monkeypatch.setattr(export, "_write", write_slowly)
    with pytest.raises(UserError, match=r"timm was made by another process meanwhile\. Choose another path"):
        run(weights, "timm", out)
    assert [path.name for path in out.parent.iterdir()] == ["timm"]
