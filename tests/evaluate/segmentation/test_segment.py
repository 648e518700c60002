"""launch/segment.py as a whole: what it writes, that it goes on after a kill, and what it refuses."""

import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from block_pairs import COLOURS, Write, settings
from mlflow.tracking import MlflowClient
from PIL import Image
from safetensors import safe_open

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.base.locks import only_writer
from pipeline.base.trained_on import TrainedSet
from pipeline.data.dataset.manifest import Dataset
from pipeline.evaluate.segmentation import apply, linear, run
from pipeline.evaluate.segmentation.counts import parse_counts
from pipeline.evaluate.segmentation.pairs import open_pairs
from pipeline.process.outputs import holding_outputs
from pipeline.review import compare, statistics
from pipeline.review.budgets import curves
from pipeline.review.reader import read
from pipeline.settings import schema
from pipeline.settings.commands.segment import SegmentConfig


def command(weights: Path, places: tuple[Path, Path], out: Path, *more: str) -> SegmentConfig:
    return settings(*places, f"weights={weights}", f"out={out}", "val_share=0.3", *more)


@pytest.mark.slow
def test_from_images_to_mlflow(
    write_pairs: Write, weights: Path, database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random features of patches of 4 px tell blocks of three colours apart."""
    places, out, uri = write_pairs(24), tmp_path / "out", f"sqlite:///{tmp_path / 'mlflow.db'}"
    (tmp_path / "mlflow.db").write_bytes(database.read_bytes())
    (tmp_path / "names.txt").write_text("red\ngreen\nblue\n")
    (places[0] / "part.1/1.png").write_bytes(b"no image")
    given = command(
        weights, places, out, f"mlflow={uri}", f"class_names={tmp_path / 'names.txt'}", "num_drawn=2", "steps=60"
    )
    scores = run.run(given)
    said = capsys.readouterr().out
    assert "3 classes; " in said
    assert "part.1/1 cannot be read (no image" in said
    assert scores["miou"] > 0.7
    assert scores["interval"][0] <= scores["miou"] <= scores["interval"][1]
    assert scores["largest_class_alone"]["miou"] < 0.2 < scores["largest_class_alone"]["pixel_accuracy"]
    assert scores["num_learnt"] + len(scores["unreadable_learnt"]) + scores["num_samples"] == 24
    assert [bad["name"] for bad in scores["unreadable_learnt"]] == ["part.1/1"]
    written = {path.name for path in out.iterdir()}
    assert {"head.safetensors", "per_class.csv", "report.md", "segmentation.json", "sheet.png"} <= written
    assert "unfinished.pt" not in written
    assert json.loads((out / "segmentation.json").read_text())["miou"] == scores["miou"]
    report = (out / "report.md").read_text()
    assert "| green |" in report
    assert f"{scores['miou']:.2%}" in report
    with safe_open(out / "head.safetensors", "pt") as head:
        assert json.loads(head.metadata()["segmentation"])["classes"] == ["red", "green", "blue"]
        assert head.get_tensor("classify.weight").shape == (3, 32, 1, 1)

    client = MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("vit").experiment_id])
    assert found.data.metrics["eval/held-out_miou"] == scores["miou"]
    assert found.data.tags["dataset"] == tmp_path.name
    record = read(str(out))
    assert (record.scored, record.last_score.name, record.last_score.value) == (
        "held-out_miou",
        "held-out mIoU",
        scores["miou"],
    )
    assert {"sheet.png", "report.md"} <= {file.path for file in client.list_artifacts(found.info.run_id)}
    assert [record.last_score.interval.low, record.last_score.interval.high] == scores["interval"]

    # Another layer, scored on the same masks, is compared image by image.
    other = run.run(command(weights, places, tmp_path / "other", f"mlflow={uri}", "num_drawn=0", "steps=1"))
    records = compare.named([read(str(tmp_path / "other")), read(str(out))])
    (group,) = compare.groups_of(records)
    assert not curves(records), "each has one point at step 0"
    rows = {name: set(values) for name, *values in compare.differences(compare.settings_of(records))}
    assert rows["length"] == {"1 steps of 4", "60 steps of 4"}
    (pair,) = group.pairs
    assert pair.difference.method == statistics.BOOTSTRAP
    assert pair.difference.value == scores["miou"] - other["miou"]
    assert pair.corrected < 0.001
    (out / "pixel_counts.npz").write_bytes(b"PK damaged")
    with pytest.raises(UserError, match=r"pixel_counts\.npz: not a readable \.npz"):
        parse_counts((out / "pixel_counts.npz").read_bytes(), "pixel_counts.npz")


def test_a_killed_command_goes_on_with_the_same_bits(
    write_pairs: Write,
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = write_pairs(12)
    whole = run.run(command(weights, places, tmp_path / "whole", "num_drawn=0"))
    assert not (tmp_path / "whole/sheet.png").exists()
    monkeypatch.setattr(run, "_SECONDS_BETWEEN_SAVES", -1.0)
    monkeypatch.setattr(run, "_STEPS_BETWEEN_LOOKS", 7)
    run_all = linear.HeadTraining.run

    def killed(training: linear.HeadTraining, batches: object) -> object:
        for loss in run_all(training, batches):
            yield loss
            if training.step == 17:
                raise KeyboardInterrupt

    def kill(name: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(linear.HeadTraining, "run", killed)
            run.run(command(weights, places, tmp_path / name, "num_drawn=0"))

    with pytest.raises(KeyboardInterrupt):
        kill("parts")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["unfinished.pt"]
    capsys.readouterr()
    # Other threads are the same training; another rate is not.
    parts = run.run(command(weights, places, tmp_path / "parts", "num_drawn=0", "threads=1"))
    assert "continues at step 14 of 30\n" in capsys.readouterr().out
    different = {name for name in whole if whole[name] != parts[name]}
    assert different <= {"seconds_training", "seconds_scoring"}
    files = [(tmp_path / folder / "head.safetensors").read_bytes() for folder in ("whole", "parts")]
    assert files[0] == files[1]

    with pytest.raises(KeyboardInterrupt):
        kill("other")
    run.run(command(weights, places, tmp_path / "other", "num_drawn=0", "lr=0.01"))
    assert "is of other settings or damaged: it is trained from its beginning" in capsys.readouterr().out
    assert not (tmp_path / "other/unfinished.pt").exists()


@pytest.mark.parametrize("colours", [False, True])
def test_a_trained_layer_is_applied_to_other_images(
    colours: bool, write_pairs: Write, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their masks have the values of the masks learnt from; the layer is not trained again."""
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
    capsys.readouterr()
    again = run.run(command(weights, (images, masks), tmp_path / "out", ignore, f"apply={others}", "num_drawn=1"))
    said = capsys.readouterr().out
    assert "earlier commands" not in said
    assert f"trained already: {tmp_path / 'out/head.safetensors'}" in said
    assert "no mask: " in said
    assert f"4 masks: {tmp_path / 'out/predicted_masks'}" in said
    assert (again["miou"], again["loss"]) == (first["miou"], first["loss"])
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
    # What a killed command left is removed, and masks that are not of this command are counted.
    others, _ = write_pairs(1, "fewer")
    (tmp_path / "out/predicted_masks/part.0/.0.png.0123abcd.tmp").touch()
    run.run(command(weights, (images, masks), tmp_path / "out", ignore, f"apply={others}"))
    assert f"{tmp_path / 'out/predicted_masks'} also has 3 masks of earlier commands" in capsys.readouterr().out
    assert not list((tmp_path / "out/predicted_masks").rglob("*.tmp"))
    run.run(command(weights, (images, masks), tmp_path / "out", ignore, "seed=1"))
    assert "is of other settings or damaged: it is trained from its beginning" in capsys.readouterr().out


def test_masks_are_not_written_over_masks_that_are_read(write_pairs: Write, tmp_path: Path) -> None:
    images, masks = write_pairs(3)
    others, _ = write_pairs(2, "others")
    given = settings(images, masks, f"apply={others}")
    assert list(apply.open_others(given, tmp_path / "out").names) == ["part.0/0", "part.1/1"]
    for folder in (masks, masks.parent, masks / "predicted", others, images):
        with pytest.raises(UserError, match=rf"apply writes masks into {folder}, where .* is read. Set another out"):
            apply.open_others(given, folder)
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        tar.add(others / "part.0/0.png", "a/../../../x.png")
    with pytest.raises(UserError, match=r"'a/../../../x' would be written outside of .*. Rename it"):
        apply.open_others(settings(images, masks, f"apply={tmp_path / 'evil.tar'}"), tmp_path / "out")


def test_changed_files_are_other_pairs(write_pairs: Write) -> None:
    """A layer that was trained on masks which were corrected since is another one."""
    images, masks = write_pairs(6)

    def content() -> str:
        return open_pairs(settings(images, masks, "val_share=0.3"))[0].content()

    before = content()
    assert content() == before
    train, _ = open_pairs(settings(images, masks, "val_share=0.3"))
    file = masks / f"{train.names[0]}.png"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert content() != before


def test_a_layer_of_other_classes_is_another_one(
    write_pairs: Write, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many classes, of which only the masks that are scored on have one: numbers of classes mean others."""
    images, masks = write_pairs(4)
    others, their_masks = write_pairs(2, "val")
    given = [
        f"val_images={others}",
        f"val_masks={their_masks}",
        f"weights={weights}",
        f"out={tmp_path / 'out'}",
        "steps=2",
    ]
    for file in masks.rglob("*.png"):
        classes = np.asarray(Image.open(file))
        Image.fromarray(np.where(classes == 1, 100, classes).astype(np.uint8)).save(file)
    Image.new("L", (32, 24), 100).save(their_masks / "part.1/1.png")
    for value, is_known in (
        (3, False),
        (3, True),
        (200, False),
    ):  # Below 100, so that it changes the number of that class, or above it.
        Image.new("L", (32, 24), value).save(their_masks / "part.0/0.png")
        capsys.readouterr()
        scores = run.run(settings(images, masks, *given))
        assert [row["class"] for row in scores["per_class"]] == sorted(["0", "2", "100", str(value)], key=int)
        assert ("trained already" in capsys.readouterr().out) == is_known


def test_what_is_refused_before_anything_is_written(
    write_pairs: Write, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, out = write_pairs(12), tmp_path / "out"
    models.save(models.build(models.ResNetConfig((1,), 32, (16, 16), 3)), tmp_path / "bit.pt")
    with pytest.raises(UserError, match="a ResNet has no patch tokens"):
        run.run(command(tmp_path / "bit.pt", places, out))
    with pytest.raises(UserError, match=r"layers = 3, but .* has 2 blocks"):
        run.run(command(weights, places, out, "layers=3"))
    with pytest.raises(UserError, match="short_side = 12 is smaller than image_size = 16, the side of the windows"):
        run.run(command(weights, places, out, "short_side=12"))
    for given in ("split=val", "val_split=test", "exclude=none"):
        with pytest.raises(UserError, match=rf"{given.replace('=', ' = ')} has no effect: it selects from a data set"):
            run.run(command(weights, places, out, given))
    with pytest.raises(UserError, match="unknown setting eval_crop"):
        schema.load(SegmentConfig, None, ["weights=w", "images=i", "masks=m", "eval_crop=resize"])
    with pytest.raises(UserError, match=r"scale_min = 3.0 is larger than scale_max = 2.0"):
        settings("i", "m", "scale_min=3")
    with monkeypatch.context() as patch:
        patch.setattr(linear.HeadTraining, "run", lambda *given: pytest.fail("trained"))
        for number in range(12):
            Image.new("L", (5, 5), number % 3).save(places[1] / f"part.{number % 2}/{number}.png")
        with pytest.raises(
            UserError, match=r"none of the first \d pairs? can be read; part.*: 32 x 24 pixels, its mask 5 x 5"
        ):
            run.run(command(weights, places, out))
    assert not out.exists()
    places = write_pairs(12, "others")
    for number in range(1, 12, 2):
        (places[0] / f"part.1/{number}.png").write_bytes(b"no image")
    with pytest.raises(
        UserError,
        match=r"samples of \d+ cannot be read, more than max_bad_share = 0.001 allows \(1\); the first is .*part.*no image",
    ):
        run.run(command(weights, places, out))
    assert not list(out.iterdir())


def test_masks_that_nothing_tells_to_be_upright_are_counted(
    write_pairs: Write, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, masks = write_pairs(4)
    (exif := Image.Exif())[0x0112] = 3
    for file in images.glob("part.1/*.png"):
        Image.open(file).save(file, exif=exif)
    given = [f"weights={weights}", f"out={tmp_path / 'out'}", "steps=1", f"val_images={images}", f"val_masks={masks}"]
    assert run.run(settings(images, masks, *given))["num_turned"] == 2
    said = capsys.readouterr().out
    for what in ("learnt from", "scored on"):
        assert f"warning: EXIF turns 2 images {what}, such as part.1/1: " in said
    assert "| images turned by EXIF, masks taken as upright | 2 |" in (tmp_path / "out/report.md").read_text()


def test_images_that_are_scored_on_twice_are_told(
    write_pairs: Write, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, masks = write_pairs(4)
    one = images / "part.0/0.png"
    scores = run.run(
        settings(
            images,
            masks,
            f"weights={weights}",
            f"out={tmp_path / 'out'}",
            "steps=1",
            f"val_images={one}",
            f"val_masks={masks / 'part.0/0.png'}",
        )
    )
    said = capsys.readouterr().out
    assert "warning: 1 image is learnt from and scored on" in said
    assert "none of one" in said
    assert json.loads((tmp_path / "out/segmentation.json").read_text())["interval"] == [None, None]
    assert scores["num_samples"] == 1


def test_groups_on_both_sides_are_told(
    write_pairs: Write, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The group is the first digit of 0, 2, 4, ..., 22, which are learnt from, and of 1, 3, ..., 23, which are scored on."""
    images, masks = write_pairs(24)
    other = (f"val_images={images / 'part.1'}", f"val_masks={masks / 'part.1'}", "group_pattern=^[0-9]")
    given = (images / "part.0", masks / "part.0", *other, f"weights={weights}", f"out={tmp_path / 'out'}", "steps=1")
    scores = run.run(settings(*given))
    said = capsys.readouterr().out
    assert "warning: 2 groups, such as '1', have images that are learnt from and others that are scored on" in said
    assert "its 95 % interval over 6 groups" in said
    assert scores["num_groups"] == 6


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
        scores = run.run(settings(*places, f"weights={weights}", f"out={tmp_path / 'out'}", "steps=1", "num_drawn=0"))
        assert scores["trained_by"] == by
        assert ("trained on by base" in (tmp_path / "out/report.md").read_text()) == bool(by)


@pytest.mark.parametrize(
    ("images", "name"),
    [
        ("CamVid/test", ("CamVid", "test")), ("photos", ("photos", "val")), ("./a/photos/*.png", ("photos", "val")), ("test", ("test", "val")),
        ("/x/ADE/images/validation/", ("ADE", "validation")), ("ti/x.tar", ("x", "val")), ("images", ("images", "val")), ("/images/val", ("val", "val")), ("a/v1.2", ("v1.2", "val")),
    ],
)  # fmt: skip
def test_names_of_data(images: str, name: tuple[str, str]) -> None:
    assert run._scored_on(settings("i", "m", f"val_images={images}", "val_masks=v")) == name
    assert run._scored_on(settings(images, "m")) == (name[0], "held-out")


def test_a_second_command_for_the_same_folder_is_refused(write_pairs: Write, weights: Path, tmp_path: Path) -> None:
    given = command(weights, write_pairs(6), tmp_path / "out", "steps=1")
    with only_writer(tmp_path / "out"), holding_outputs(), pytest.raises(UserError, match="out is being written by"):
        run.run(given)


def test_a_long_training_says_how_long(
    write_pairs: Write,
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Windows of 4096 px took minutes, without a word."""
    for limit, said in ((0.0, True), (1e9, False)):
        monkeypatch.setattr(run, "_LONG_SECONDS", limit)
        run.run(command(weights, write_pairs(6, f"{said}"), tmp_path / f"out-{said}", "steps=2", "num_drawn=0"))
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line.startswith("2 steps of") and line.endswith(" tokens each")]
        assert any(line.startswith("a step takes") for line in lines) == said
