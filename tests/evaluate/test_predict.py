"""launch/predict.py: the probabilities are those of the evaluated model, for images from every kind of place."""

import csv
import io
import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from given_images import images as images_given
from PIL import Image
from ranks import ROOT

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import Dataset
from pipeline.evaluate import features, predict
from pipeline.evaluate.loaded_model import load_model
from pipeline.settings import schema
from pipeline.settings.commands.weights import FeaturesConfig, PredictConfig

SIDE = 8
CLASSES = ["ant", 'the "bee", small', "cat"]
LABELS = [[0], [2], [1], [1], [0, 2], []]
BAD = 3


@pytest.fixture
def data(make_dataset) -> Dataset:
    return make_dataset({"val": LABELS}, CLASSES, {"val": [BAD]})


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return save(tmp_path / "random.pt", loss="softmax", classes=CLASSES)


def save(path: Path, num_classes: int = 3, **extra: object) -> Path:
    model = models.create("ViT-mu/4", SIDE, num_classes)
    if num_classes:
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    models.save(model, path, {"preprocessing": {"image_size": SIDE, "eval_crop": "resize"}, **extra})
    return path


def run(weights: Path, images: object, *more: str) -> list[dict]:
    settings = [f"weights={weights}", images_given(images), "device=cpu", *more]
    return predict.run(schema.load(PredictConfig, None, settings)).to_pylist()


def files_of(data: Dataset) -> list[bytes]:
    split = data.split("val")
    content = Path(split.shard_paths[0]).read_bytes()
    return [content[split.place_of(i)[0] : split.place_of(i)[0] + split.place_of(i)[1]] for i in range(len(split))]


def test_table_of_a_data_set_is_what_the_model_says(weights: Path, data: Dataset, tmp_path: Path, capsys) -> None:
    settings = [f"weights={weights}", f"data={data.path}", "device=cpu", "top=2", f"out={tmp_path / 'table.csv'}"]
    predict.run(schema.load(PredictConfig, None, settings))
    assert str(tmp_path / "table.csv") in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))

    # Pillow's pixels, the model and a softmax, without any other code of the pipeline.
    model = models.load(weights).eval()
    expected = []
    for i, content in enumerate(files_of(data)):
        label = ";".join(CLASSES[c] for c in LABELS[i])
        if i == BAD:
            expected.append((f"val{i}", label, "", "", "", ""))
            continue
        pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(content)))).permute(2, 0, 1)[None]
        with torch.no_grad():
            shares = model(pixels.float() / 127.5 - 1).softmax(1)[0]
        for rank, number in enumerate(shares.argsort(descending=True)[:2].tolist(), start=1):
            share = pytest.approx(shares[number].item(), abs=1e-6)
            expected.append((f"val{i}", label, str(rank), CLASSES[number], str(number), share))
    names = ("image", "label", "rank", "class", "class_number", "probability")
    found = [tuple(row[name] for name in names) for row in rows]
    assert [(*row[:5], float(row[5]) if row[5] else "") for row in found] == expected
    assert len({row[3] for row in found}) > 2
    assert [row["problem"] for row in rows if row["problem"]] == ["no image: begins with b'no image'"]

    # The Parquet file holds the same values, bit for bit.
    run(weights, data.path, "top=2", f"out={tmp_path / 'table.parquet'}")
    for text, value in zip(rows, pq.read_table(tmp_path / "table.parquet").to_pylist(), strict=True):
        assert {k: "" if v is None else str(v) for k, v in value.items() if k != "probability"} == {
            k: v for k, v in text.items() if k != "probability"
        }
        assert text["probability"] == "" or np.float32(text["probability"]) == np.float32(value["probability"])


def test_files_and_folders_give_what_the_data_set_gives(weights: Path, data: Dataset, tmp_path: Path) -> None:
    expected = [(row["class"], row["probability"]) for row in run(weights, data.path)]
    folder = tmp_path / "pictures"
    for i, content in enumerate(files_of(data)):
        place = folder / (CLASSES[LABELS[i][0]] if LABELS[i] else "unsorted")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i}.png").write_bytes(content)
    (folder / "notes.txt").write_text("no picture")
    paths = {int(path.stem): path for path in folder.rglob("*.png")}

    of_files = run(weights, f"[{','.join(f'{str(paths[i])!r}' for i in range(6))}]")
    assert [(row["class"], row["probability"]) for row in of_files] == expected
    firsts = {row["image"]: row["label"] for row in of_files}
    assert firsts == {str(paths[i]): CLASSES[labels[0]] if labels else None for i, labels in enumerate(LABELS)}
    of_folder = {row["image"]: row["probability"] for row in run(weights, folder, "top=1")}
    assert of_folder == {row["image"]: row["probability"] for row in of_files if row["rank"] in (1, None)}
    assert list(of_folder) == sorted(of_folder)


def test_what_is_left_out_of_files_is_counted(weights: Path, data: Dataset, tmp_path: Path, capsys) -> None:
    for i, content in enumerate(files_of(data)[:BAD]):
        Image.open(io.BytesIO(content)).convert("RGBA" if i else "RGB").save(tmp_path / f"{i}.png")
    run(weights, tmp_path, "batch=2")
    features.run(
        schema.load(
            FeaturesConfig,
            None,
            [f"weights={weights}", f"source={tmp_path}", "device=cpu", f"out={tmp_path / 'f.parquet'}"],
        )
    )
    assert capsys.readouterr().out.count("2 images with an alpha") == 2


def test_another_data_set_and_other_names(weights: Path, data: Dataset, make_dataset, tmp_path: Path, capsys) -> None:
    """Labels of classes that the weights do not have are shown, and not used for the loss."""
    data.path.rename(tmp_path / "first")
    other = make_dataset({"val": [[7], [0]]}, list("abcdefgh"))
    rows = run(weights, other.path, "top=1")
    assert [row["label"] for row in rows] == ["h", "a"]
    assert {row["class"] for row in rows} <= set(CLASSES)
    nameless = save(tmp_path / "nameless.pt")
    assert {row["class"] for row in run(nameless, other.path, "top=3")} == {"class 0", "class 1", "class 2"}
    assert "0 to 2" in capsys.readouterr().out  # What the numbers are: those of the head.
    assert {row["class"] for row in run(nameless, tmp_path / "first")} == {*CLASSES, None}
    assert "0 is 'ant', 2 is 'cat'" in capsys.readouterr().out  # Which order of names was assumed.
    (tmp_path / "names.txt").write_text("one\ntwo\nthree\n", encoding="utf-8-sig")
    named = run(nameless, other.path, f"class_names={tmp_path / 'names.txt'}")
    assert {row["class"] for row in named} == {"one", "two", "three"}


def test_true_classes_are_those_of_the_same_name(weights: Path, make_dataset, tmp_path: Path) -> None:
    """Of a set of a mixture, say, which has some of the weights' classes in another order."""
    part = make_dataset({"val": [[1], [0], []]}, [CLASSES[2], CLASSES[0]])
    for own, expected in ((CLASSES, [[0], [2], []]), ([*CLASSES[:2], CLASSES[0], CLASSES[2]], [[], [], []])):
        path = save(tmp_path / "some.pt", len(own), classes=own)
        config = schema.load(PredictConfig, None, [f"weights={path}", f"data={part.path}", "device=cpu"])
        images, names = predict.open_images(config, load_model(config))
        true = images.true_classes(names).split
        assert [true.labels_of(row).tolist() for row in range(3)] == expected
        assert images.labels(range(3)) == [CLASSES[0], CLASSES[2], None]


def test_readable_names_are_shown(data: Dataset, tmp_path: Path, make_dataset) -> None:
    """Of the weights, else of the data set; the classes themselves are what is compared."""
    readable = [f"the {name}" for name in CLASSES]
    named = save(tmp_path / "named.pt", classes=CLASSES, class_names=readable)
    plain = save(tmp_path / "plain.pt", classes=CLASSES)
    for weights in (named, plain):
        if weights == plain:
            info = {name: value for name, value in data.info.items() if name != "checksum"}
            (data.path / "dataset.json").write_text(json.dumps({**info, "class_names": readable}))
        rows = run(weights, data.path, "top=1")
        assert {row["class"] for row in rows} <= {*readable, None}
        assert rows[0]["label"] == ";".join(readable[c] for c in LABELS[0])


def test_mistakes_are_one_line(weights: Path, data: Dataset, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"junk")
    (tmp_path / "photos.zip").write_bytes(b"junk")
    for said, images, *more in (
        ("nowhere: no such file or folder", "nowhere"),
        (r"photos.zip can be read.*no image: begins with b'junk'", tmp_path / "photos.zip"),
        ("has no split 'test'. It has: val", data.path, "split=test"),
        ("none of the 1 image of .*bad.jpg can be read; the first is .*bad.jpg: no image", tmp_path / "bad.jpg"),
    ):
        with pytest.raises(UserError, match=said):
            run(weights, images, *more)
    config = schema.load(PredictConfig, None, [f"weights={weights}", f"data={tmp_path}"])
    with pytest.raises(UserError, match=f"{tmp_path}.*dataset.json"):
        predict.run(config)
    with pytest.raises(UserError, match=r"launch/finetune.py .* launch/features.py"):
        run(save(tmp_path / "headless.pt", 0), data.path)


def test_a_small_folder_may_have_some_unreadable_images(weights: Path, data: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "holiday"
    folder.mkdir()
    (folder / "00.png").write_bytes(files_of(data)[0])
    for number in range(1, 11):
        (folder / f"{number:02d}.png").write_bytes(b"junk")
    first, *others = run(weights, folder, "top=1")
    assert first["class"] is not None
    assert [row["problem"] for row in others] == ["no image: begins with b'junk'"] * 10
    (folder / "11.png").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"max_bad_share = 0.001 .*\(10\)"):
        run(weights, folder)


def test_names_that_are_no_utf_8_are_shown_and_written(
    weights: Path, data: Dataset, tmp_path: Path, monkeypatch
) -> None:
    """A photo named in Latin-1 ended in a UnicodeEncodeError; escape codes in a name reached the terminal."""
    name = os.fsdecode(b"caf\xe9.jpg")
    (folder := tmp_path / "odd").mkdir()
    for each in (name, "red\x1b[31m.jpg"):
        (folder / each).write_bytes(files_of(data)[0])
    out, stdout = tmp_path / "out.csv", io.TextIOWrapper(io.BytesIO(), "utf-8", "strict")  # As of a locale in UTF-8.
    command = [
        str(ROOT / "launch" / "predict.py"),
        f"weights={weights}",
        f"out={out}",
        f"source={folder}",
        "device=cpu",
    ]
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(command[0], run_name="__main__")
    stdout.flush()
    assert b"caf\\udce9.jpg  " in stdout.buffer.getvalue()
    assert b"\x1b" not in stdout.buffer.getvalue()
    assert "caf\\udce9.jpg" in out.read_text()
