"""launch/features.py tokens=patches: each image's features are the model's own, whole or not there at all."""

import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from given_images import images as images_given
from PIL import Image

from pipeline import model as models
from pipeline.architecture.pixels import Pixels
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import open_dataset
from pipeline.evaluate import features
from pipeline.evaluate.loaded_model import LoadedModel
from pipeline.process.outputs import try_outputs
from pipeline.settings import schema
from pipeline.settings.commands.weights import FeaturesConfig

SIDE, SIZES = 16, [(16, 16), (16, 24), (40, 16), (16, 16), (20, 31)]
BANDS = Pixels(("1", "2", "3", "4"), "uint16", (0.0,) * 4, (1000.0,) * 4, (0.3,) * 4, (0.2,) * 4)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images of several sizes, and between them a file that is not an image."""
    folder, rng = tmp_path / "photos", np.random.default_rng(0)
    folder.mkdir()
    for number, size in enumerate(SIZES):
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    (folder / "2b.png").write_bytes(b"junk")
    return folder


def save(path: Path, name: str = "ViT-mu/4", side: int = SIDE, **changes: Any) -> Path:
    models.save(models.create(name, side, 0, **changes), path, {"preprocessing": {"eval_crop": "resize"}})
    return path


def load(weights: Path, source: Path, out: Path, *more: str) -> FeaturesConfig:
    asked = [f"weights={weights}", images_given(source), f"out={out}", "device=cpu", "batch=2", "tokens=patches", *more]
    return schema.load(FeaturesConfig, None, asked)


def run(weights: Path, source: Path, out: Path, *more: str) -> Path:
    config = load(weights, source, out, *more)
    try_outputs(config)
    features.run(config)
    return out


def read(folder: Path) -> dict[str, np.ndarray]:
    index = pq.read_table(folder / "index.parquet").to_pylist()
    return {Path(row["key"]).stem: np.load(folder / row["file"]) for row in index}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ViT-mu/4", {}),
        ("ViT-mu/4", {"pool": "gap", "pool_norm": True, "registers": 2}),
        ("ViT-mu/4", {"positions": "none", "rope_base": 100.0}),
        ("ViT-mu/1", {"small_stem": (16, 32)}),
        ("ViT-mu/4", {"pixels": BANDS}),
    ],
)
def test_a_folder_has_what_the_model_says_of_each_patch(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Of arrays of the size that is read, 12 x 24, without any other code of the pipeline."""
    weights, source, rng = save(tmp_path / "w.pt", name, **changes), tmp_path / "images", np.random.default_rng(0)
    pixels = changes.get("pixels")
    images = rng.integers(0, 1001 if pixels else 256, (5, 12, 24, 4 if pixels else 3))
    source.mkdir()
    for number, image in enumerate(images):
        np.save(source / f"{number}.npy", image.astype(np.uint16 if pixels else np.uint8))
    found = read(run(weights, source, tmp_path / "out", "image_size=12x24"))

    values = (images / 1000 - 0.3) / 0.2 if pixels else images / 127.5 - 1
    model = models.load(weights, image_size=(12, 24))
    with torch.no_grad():
        tokens = model.encode(model.embed(torch.from_numpy(values).float().permute(0, 3, 1, 2)))
    rows, columns = model.config.grid
    assert (rows, columns) == (12 // model.config.patch_pixels, 24 // model.config.patch_pixels)
    expected = tokens[:, -rows * columns :].reshape(5, rows, columns, model.config.width)
    assert list(found) == ["0", "1", "2", "3", "4"]
    assert found["0"].dtype == np.float16
    np.testing.assert_allclose(np.stack([*found.values()]), expected, rtol=1e-3, atol=1e-3)


def test_what_cannot_be_read_is_left_out(photos: Path, tmp_path: Path, capsys) -> None:
    weights = save(tmp_path / "w.pt")
    folder = run(weights, photos, tmp_path / "new" / "folder")
    said = capsys.readouterr().out
    assert "6.14 kB" in said, "6 images x 4 x 4 patches x 32 features x 2 bytes"
    assert "left out: " in said
    assert "2b.png" in said
    assert list(read(folder)) == ["0", "1", "2", "3", "4"]
    index = pq.read_table(folder / "index.parquet")
    assert {path.name for path in folder.iterdir()} == {"index.parquet", *index["file"].to_pylist()}
    assert index.schema.metadata[b"eval_crop"] == b"resize"


def test_a_data_set_has_labels(dataset: Path, tmp_path: Path) -> None:
    out = run(save(tmp_path / "w.pt"), dataset, tmp_path / "out", "split=val")
    labels = pq.read_table(out / "index.parquet")["label"].to_pylist()
    assert len(labels) > 10
    assert {*labels} <= {*open_dataset(dataset).classes}


def test_a_kill_leaves_nothing_that_looks_complete(photos: Path, tmp_path: Path) -> None:
    weights, out = save(tmp_path / "w.pt"), tmp_path / "out" / "folder"
    out.parent.mkdir()
    if (pid := os.fork()) == 0:
        calls, compute = [], LoadedModel.patch_features

        def killed(self: LoadedModel, pixels: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return compute(self, pixels)

        LoadedModel.patch_features = killed  # type: ignore[method-assign]
        features.run(load(weights, photos, out))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert not out.exists()
    assert any(out.parent.rglob("*.npy")), "it had begun"
    run(weights, photos, out)
    assert [*out.parent.iterdir()] == [out]


def test_a_full_disk_is_named(photos: Path, tmp_path: Path) -> None:
    weights, out = save(tmp_path / "w.pt"), tmp_path / "out" / "folder"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
    try:
        with pytest.raises(OSError, match="large") as full:
            run(weights, photos, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.value.filename == str(out)
    assert not any(out.parent.iterdir())


def test_what_cannot_be_is_refused_before_anything_is_computed(photos: Path, tmp_path: Path, monkeypatch) -> None:
    weights, out = save(tmp_path / "w.pt"), tmp_path / "out"
    monkeypatch.setattr(LoadedModel, "patch_features", None)
    for more, word in (
        (["tokens=image"], r"\.parquet"),
        ([f"out={tmp_path / 't.parquet'}"], "folder"),
    ):
        with pytest.raises(UserError, match=word):
            run(weights, photos, out, *more)
    with pytest.raises(UserError, match="exists"):
        run(weights, photos, photos)
    with pytest.raises(UserError, match="ResNet"):
        run(save(tmp_path / "r.pt", "BiT-R50x1", 32), photos, out)
    assert not out.exists()


def test_features_that_are_not_finite_are_refused(photos: Path, tmp_path: Path) -> None:
    model = models.create("ViT-mu/4", SIDE, 0)
    with torch.no_grad():
        model.norm.bias[0] = 1e5  # More than float16 holds.
    models.save(model, tmp_path / "w.pt", {})
    with pytest.raises(UserError, match=r"infinity.*0\.png"):
        run(tmp_path / "w.pt", photos, tmp_path / "out" / "folder")
    assert not any((tmp_path / "out").iterdir())
