"""`preprocess` of a loaded model: the input that evaluation computes for the same image, bit for bit."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from pipeline import model as models
from pipeline.architecture.pixels import Pixels
from pipeline.base.errors import UserError
from pipeline.evaluate.adhoc_split import open_adhoc_split
from pipeline.evaluate.loaded_model import load_model
from pipeline.settings.commands.weights import PredictConfig

INFRARED = Pixels(("near", "far"), "uint16", (0.0, 100.0), (5000.0, 4000.0), (0.4, 0.5), (0.2, 0.3))


def saved(path: Path, pixels: Pixels | None = None, **view: Any) -> Path:
    changes = {} if pixels is None else {"pixels": pixels}
    models.save(models.create("ViT-mu/4", 16, 2, **changes), path, {"preprocessing": view, "classes": ["cat", "dog"]})
    return path


def as_evaluated(weights: Path, image: Path, image_size: int) -> torch.Tensor:
    """The input that a command computes for a file."""
    config = PredictConfig(weights=str(weights), source=[str(image)], image_size=image_size, device="cpu")
    loaded = load_model(config)
    split = open_adhoc_split([str(image)], "val", "all", (), pixels=loaded.pixels).split
    requests = [(np.zeros(1, np.int64), np.zeros(1, np.int64))]
    with loaded.reading(split, config) as reader, reader.open(requests, 1) as (batches, bad):
        (batch,) = batches
        assert not bad
        return loaded.images(batch.images)[0]


@pytest.mark.parametrize(
    ("view", "image_size"),
    [
        ({"eval_crop": "resize", "resize_filter": "bicubic"}, 0),
        ({"eval_crop": "center", "eval_resize": 20, "image_size": 16, "resize_filter": "antialias"}, 32),
    ],
)
@pytest.mark.parametrize("kind", ["turned.jpg", "gray.png", "alpha.webp"])
def test_files_pillow_images_and_arrays_are_read_as_evaluation_does(
    tmp_path: Path, view: dict[str, Any], image_size: int, kind: str
) -> None:
    coarse = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6 if kind == "turned.jpg" else 1
    mode = {"turned.jpg": "RGB", "gray.png": "L", "alpha.webp": "RGBA"}[kind]
    coarse.resize((90, 50), Image.Resampling.BICUBIC).convert(mode).save(file := tmp_path / kind, exif=exif)
    weights = saved(tmp_path / "model.safetensors", **view)
    expected = as_evaluated(weights, file, image_size)

    model = models.load(weights, image_size or None)
    assert expected.shape == (3, *model.config.image_size)
    assert torch.equal(model.preprocess(file), expected)
    with Image.open(file) as image:
        assert torch.equal(model.preprocess(image), expected)
        pixels = np.asarray(image.convert("L" if mode == "L" else "RGB"))
    assert torch.equal(model.preprocess(np.rot90(pixels, -1) if kind == "turned.jpg" else pixels), expected)


def test_other_images_are_read_by_the_range_of_the_weights(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 6000, (20, 30, 2), dtype=np.uint16)
    np.save(tmp_path / "image.npy", values)
    model = models.load(weights := saved(tmp_path / "model.safetensors", INFRARED))
    expected = as_evaluated(weights, tmp_path / "image.npy", 0)
    assert torch.equal(model.preprocess(values), expected)
    assert torch.equal(model.preprocess(tmp_path / "image.npy"), expected)


def test_what_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.create("ViT-mu/4", 16, 2)
    (tmp_path / "text.jpg").write_text("no image")
    cv2.imwrite(str(tmp_path / "16_bits.png"), np.zeros((9, 9), np.uint16))
    for image in (tmp_path / "text.jpg", tmp_path / "16_bits.png", np.zeros((9, 9, 3)), Image.new("I;16", (9, 9))):
        with pytest.raises(UserError, match="cannot be read"):
            model.preprocess(image)
