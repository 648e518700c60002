"""launch/segment.py as a whole: what it reads, writes and refuses."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from block_pairs import COLOURS, Write, settings
from PIL import Image
from safetensors import safe_open

from pipeline import model as models
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.base.locks import only_writer
from pipeline.base.trained_on import TrainedSet
from pipeline.data.dataset.manifest import Dataset
from pipeline.evaluate.segmentation import run
from pipeline.monitor.mlflow.connection import connect
from pipeline.process.outputs import holding_outputs
from pipeline.settings.commands.segment import SegmentConfig


def command(weights: Path, places: tuple[Path, Path], out: Path, *more: str) -> SegmentConfig:
    return settings(*places, f"weights={weights}", f"out={out}", "val_share=0.3", *more)


@pytest.mark.slow
def test_from_images_to_mlflow(write_pairs: Write, weights: Path, database: Path, tmp_path: Path) -> None:
    """Random features of patches of 4 px tell blocks of three colours apart."""
    places, out, uri = write_pairs(24), tmp_path / "out", f"sqlite:///{tmp_path / 'mlflow.db'}"
    (tmp_path / "mlflow.db").write_bytes(database.read_bytes())
    (places[0] / "part.1/1.png").write_bytes(b"no image")
    scores = run.run(command(weights, places, out, f"mlflow={uri}", f"apply={places[0]}", "steps=60"))
    assert scores["miou"] > 0.7
    assert scores["interval"][0] <= scores["miou"] <= scores["interval"][1]
    assert scores["num_learnt"] + len(scores["unreadable_learnt"]) + scores["num_samples"] == 24
    assert list(scores["unreadable_learnt"]) == ["part.1/1"]
    (sent,) = connect(uri).search_runs(["1"])
    assert all(f"{value:.2%}" in sent.data.tags["mlflow.note.content"] for value in scores["interval"])
    files = {"head.safetensors", "segmentation.json", "sheet.png"}
    assert files <= {path.name for path in out.iterdir()}
    assert json.loads((out / "segmentation.json").read_text())["miou"] == scores["miou"]
    with safe_open(out / "head.safetensors", "pt") as head:
        assert json.loads(head.metadata()["classes"]) == ["0", "1", "2"]
        assert head.get_tensor("classify.weight").shape == (3, 32, 1, 1)


def test_the_same_command_gives_the_same_bits(write_pairs: Write, weights: Path, tmp_path: Path) -> None:
    places = write_pairs(12)
    first = run.run(command(weights, places, tmp_path / "first"))
    assert run.run(command(weights, places, tmp_path / "again", "threads=1")) == first
    files = [(tmp_path / folder / "head.safetensors").read_bytes() for folder in ("first", "again")]
    assert files[0] == files[1]


def test_images_of_other_channels_and_type(
    write_pairs: Write, make_dataset: Callable[..., Dataset], tmp_path: Path
) -> None:
    images, masks = write_pairs(24)
    for file in images.rglob("*.png"):
        classes = np.asarray(Image.open(file)).argmax(-1)[..., None]
        np.save(file.with_suffix(".npy"), (300 + 1900 * ((classes + np.arange(4)) % 3)).astype(np.uint16))
        file.unlink()
    pixels = Pixels(tuple("abcd"), "uint16", (300.0,) * 4, (4100.0,) * 4, (0.5,) * 4, (0.5,) * 4)
    model = models.create("ViT-mu/4", 16, 0, depth=2, pixels=pixels)
    models.save(model, tmp_path / "w.pt", {"preprocessing": {"image_size": 16}})
    config = command(tmp_path / "w.pt", (images, masks), tmp_path / "out", f"apply={images}", "steps=60", "num_drawn=9")
    assert run.run(config)["miou"] > 0.6
    assert len(list((tmp_path / "out/predicted_masks").rglob("*.png"))) == 24
    assert np.asarray(Image.open(tmp_path / "out/sheet.png")).std() > 30
    data = make_dataset({"train": [[0]] * 4, "val": [[0]] * 3}, ["any"]).path
    with pytest.raises(UserError, match=r"uint16.*uint8"):
        run.run(settings(data, data, f"weights={tmp_path / 'w.pt'}", f"out={tmp_path / 'other'}"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("colours", [False, True])
def test_the_layer_is_applied_to_other_images(colours: bool, write_pairs: Write, weights: Path, tmp_path: Path) -> None:
    """Their masks have the values of the masks learnt from."""
    images, masks = write_pairs(12)
    if colours:
        for file in masks.rglob("*.png"):
            values = np.asarray(Image.open(file))
            Image.fromarray(np.where((values == 255)[..., None], 0, COLOURS[values.clip(max=2)]).astype(np.uint8)).save(
                file
            )
    ignore = "ignore=['#000000']" if colours else "ignore=[255]"
    first = run.run(command(weights, (images, masks), tmp_path / "out", ignore))
    assert not (tmp_path / "out/predicted_masks").exists()
    others, their_masks = write_pairs(5, "others", (40, 24))
    (others / "part.1/3.png").write_bytes(b"no image")
    again = run.run(command(weights, (images, masks), tmp_path / "out", ignore, f"apply={others}", "num_drawn=1"))
    assert again == first
    written = sorted(
        path.relative_to(tmp_path / "out/predicted_masks") for path in (tmp_path / "out/predicted_masks").rglob("*.png")
    )
    assert [str(path) for path in written] == ["part.0/0.png", "part.0/2.png", "part.0/4.png", "part.1/1.png"]
    right = []
    for name in written:
        found, true = (
            np.asarray(Image.open(tmp_path / "out/predicted_masks" / name)),
            np.asarray(Image.open(their_masks / name)),
        )
        assert found.shape[:2] == true.shape
        known = true != 255
        expected = COLOURS[true.clip(max=2)] if colours else true[..., None]
        right.append((found.reshape(*true.shape, -1) == expected)[known].all(-1).mean())
    assert np.mean(right) > 0.6
    # What a killed command left is removed.
    others, _ = write_pairs(1, "fewer")
    (tmp_path / "out/predicted_masks/part.0/.0.png.0123abcd.tmp").touch()
    run.run(command(weights, (images, masks), tmp_path / "out", ignore, f"apply={others}"))
    assert not list((tmp_path / "out/predicted_masks").rglob("*.tmp"))


def test_masks_are_not_written_over_masks_that_are_read(write_pairs: Write, tmp_path: Path) -> None:
    images, masks = write_pairs(3)
    others, _ = write_pairs(2, "others")
    given = settings(images, masks, f"apply={others}")
    assert list(run.open_others(given, tmp_path / "out", RGB8)[1]) == ["part.0/0", "part.1/1"]
    for folder in (masks, masks.parent, others, images):
        with pytest.raises(UserError, match=rf"apply writes masks into {folder}, where .* is read. Set another out"):
            run.open_others(given, folder, RGB8)


def test_classes_that_only_the_masks_scored_on_have(write_pairs: Write, weights: Path, tmp_path: Path) -> None:
    places, (others, their_masks) = write_pairs(4), write_pairs(2, "val")
    Image.new("L", (32, 24), 100).save(their_masks / "part.1/1.png")
    given = settings(*places, f"val_source={others}", f"val_masks={their_masks}", f"weights={weights}", "steps=2")
    assert run.run(replace(given, out=str(tmp_path / "out")))["classes"] == ["0", "1", "2", "100"]


def test_what_is_refused_before_anything_is_written(write_pairs: Write, weights: Path, tmp_path: Path) -> None:
    places, out = write_pairs(12), tmp_path / "out"
    models.save(models.build(models.ResNetConfig((1,), 32, (16, 16), 3)), tmp_path / "bit.pt")
    with pytest.raises(UserError, match="a ResNet has no patch tokens"):
        run.run(command(tmp_path / "bit.pt", places, out))
    with pytest.raises(UserError, match=r"short_side = 12 .*image_size = 16"):
        run.run(command(weights, places, out, "short_side=12"))
    for number in range(12):
        Image.new("L", (5, 5), number % 3).save(places[1] / f"part.{number % 2}/{number}.png")
    with pytest.raises(UserError, match=r"max_bad_share.*32 x 24 pixels, its mask 5 x 5"):
        run.run(command(weights, places, out))
    assert not out.exists()


def test_scores_of_images_that_weights_were_trained_on_are_marked(
    make_dataset: Callable[..., Dataset], weights: Path, tmp_path: Path
) -> None:
    data = make_dataset({"train": [[0]] * 4, "val": [[0]] * 3}, ["any"])
    (tmp_path / "masks").mkdir()
    for key in [*data.split("train").keys(range(4)), *data.split("val").keys(range(3))]:
        Image.fromarray(np.eye(8, dtype=np.uint8)).save(tmp_path / f"masks/{key}.png")
    places = data.path, tmp_path / "masks"
    for split, by in (("val", "base"), ("train", "")):
        sets = [asdict(TrainedSet("photos", data.fingerprint, split, "base"))]
        models.save(models.load(weights), weights, {"preprocessing": {"image_size": 16}, "trained_on": sets})
        scores = run.run(settings(*places, f"weights={weights}", f"out={tmp_path / 'out'}", "steps=1"))
        assert scores["trained_by"] == by


def test_a_second_command_for_the_same_folder_is_refused(write_pairs: Write, weights: Path, tmp_path: Path) -> None:
    given = command(weights, write_pairs(6), tmp_path / "out", "steps=1")
    with only_writer(tmp_path / "out"), holding_outputs(), pytest.raises(UserError, match="out is being written by"):
        run.run(given)
