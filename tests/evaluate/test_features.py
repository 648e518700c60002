"""launch/features.py: the vectors are the model's own, for any place of images."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from given_images import images as images_given
from PIL import Image
from raw_images import encoded

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.evaluate import features
from pipeline.settings import schema
from pipeline.settings.commands.weights import FeaturesConfig

SIDE, NUM_IMAGES, BAD = 8, 9, 4
CLASSES = ["ant", "bee"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images in folders of their classes and one without, and a file that is not an image."""
    rng = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        place = tmp_path / "photos" / ("unsorted" if number == 8 else CLASSES[number % 2])
        place.mkdir(parents=True, exist_ok=True)
        image = encoded(Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)), "PNG")
        (place / f"{number}.png").write_bytes(b"junk" if number == BAD else image)
    return tmp_path / "photos"


def save(path: Path, num_classes: int = 2, **changes: object) -> Path:
    model = models.create("ViT-mu/4", SIDE, num_classes, **changes)
    own = {"classes": CLASSES} if num_classes else {}
    of_run = {"run": "try", "step": 1200}
    models.save(model, path, {"preprocessing": {"image_size": SIDE, "eval_crop": "resize"}, **of_run, **own})
    return path


def settings(weights: Path, images: object, out: Path, *more: str) -> list[str]:
    return [f"weights={weights}", images_given(images), f"out={out}", "device=cpu", "batch=2", *more]


def run(weights: Path, images: object, out: Path, *more: str) -> None:
    features.run(schema.load(FeaturesConfig, None, settings(weights, images, out, *more)))


def expected(weights: Path, keys: list[str], **changes: object) -> np.ndarray:
    """Pillow's pixels and the model, without any other code of the pipeline."""
    model = models.load(weights, **changes).eval()
    pixels = [np.array(Image.open(key)) for key in keys]
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    with torch.no_grad():
        return model.features(images.float() / 127.5 - 1).numpy()


@pytest.mark.filterwarnings("error")  # A table that is given up ended in a traceback when it was collected.
def test_the_table_has_what_the_head_reads(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, out = save(tmp_path / "random.pt", representation=True), tmp_path / "table.parquet"
    features.run(schema.load(FeaturesConfig, None, settings(weights, photos, out)))

    table = pq.read_table(out)
    rows = {Path(row["key"]).stem: row for row in table.to_pylist()}
    assert list(rows) == [
        "0",
        "2",
        "4",
        "6",
        "1",
        "3",
        "5",
        "7",
        "8",
    ]  # the folders of ants, of bees, and the other one
    assert [rows[str(n)]["label"] for n in range(NUM_IMAGES)] == [*(CLASSES[n % 2] for n in range(8)), None]
    assert [(row["vector"], row["problem"]) for row in rows.values() if row["problem"]] == [
        (None, "no image: begins with b'junk'")
    ]
    vectors = np.stack(table["vector"].drop_null().to_numpy())  # as --help says
    keys = [row["key"] for row in rows.values() if row["vector"] is not None]
    np.testing.assert_allclose(vectors, expected(weights, keys), atol=1e-6)
    assert vectors.dtype == np.float32
    assert table.schema.metadata[b"weights"] == str(weights).encode()
    assert table.schema.metadata[b"checkpoint"] == b"weights of step 1,200 of run try"

    # The same bytes again, and the same rows in parts of one batch each.
    run(weights, photos, tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == out.read_bytes()
    monkeypatch.setattr(features, "_PART", 2)
    run(weights, photos, tmp_path / "parts.parquet")
    assert pq.read_table(tmp_path / "parts.parquet").equals(table)
    assert pq.read_metadata(tmp_path / "parts.parquet").num_row_groups == 5

    # The budget is a share of all images, wherever the unreadable ones are: here eleven of the last thirteen.
    for number in range(9, 20):
        (photos / "unsorted" / f"{number}.png").write_bytes(b"junk")
    next(photos.rglob("4.png")).unlink()
    monkeypatch.setattr(features, "_PART", 4)
    run(weights, photos, tmp_path / "eleven.parquet", "max_bad_share=0.6")
    said = r"11 samples of 19 cannot be read, more than max_bad_share = 0.2 allows \(10\)"
    with pytest.raises(UserError, match=said):
        run(weights, photos, tmp_path / "none.parquet", "max_bad_share=0.2")
    assert not (tmp_path / "none.parquet").exists()


def test_weights_without_a_head_and_a_data_set(dataset: Path, tmp_path: Path) -> None:
    weights, out = save(tmp_path / "headless.pt", 0), tmp_path / "table.parquet"
    run(weights, dataset, out, "split=val")
    table = pq.read_table(out).to_pylist()
    assert len(table) > 10
    assert all(row["label"] and len(row["vector"]) == 32 for row in table)

    # Readable names of the data set, as launch/predict.py writes them.
    named = shutil.copytree(dataset, tmp_path / "named") / "dataset.json"
    info = json.loads(named.read_text())
    del info["checksum"]
    named.write_text(json.dumps({**info, "class_names": [f"the {name}" for name in info["classes"]]}))
    run(weights, named.parent, out, "split=val")
    assert [row["label"] for row in pq.read_table(out).to_pylist()] == [f"the {row['label']}" for row in table]


def test_another_size_is_read_by_the_kernel_of_the_weights(photos: Path, tmp_path: Path, capsys) -> None:
    weights, out = save(tmp_path / "bicubic.pt", kernel="bicubic"), tmp_path / "table.parquet"
    keys = [str(tmp_path / "large.png")]
    Image.open(photos / "bee" / "1.png").resize((16, 16)).save(keys[0])
    run(weights, keys[0], out, "image_size=16")
    found = np.array(pq.read_table(out)["vector"].to_pylist())
    np.testing.assert_allclose(found, expected(weights, keys, image_size=16), atol=1e-5)
    zoom = save(tmp_path / "zoom.pt")
    assert np.abs(found - expected(zoom, keys, image_size=16)).max() > 1e-3
