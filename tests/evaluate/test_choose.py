"""launch/choose.py: the choice is the greedy one, and the new folder is all or nothing."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from given_images import images as images_given
from PIL import Image

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.evaluate import choose, coverage
from pipeline.settings import schema
from pipeline.settings.commands.weights import ChooseConfig

SIDE = 8
COLOURS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}


def directions(num: int, width: int = 5) -> np.ndarray:
    return coverage.directions(np.random.default_rng(0).normal(size=(num, width)))


def test_each_image_adds_most_to_those_before() -> None:
    images = directions(60)
    chosen = coverage.choose(images, 12).tolist()
    for count, image in enumerate(chosen):
        sums = [(images @ images[[*chosen[:count], other]].T).max(1).sum() for other in range(len(images))]
        assert sums[image] == pytest.approx(max(sums), abs=1e-4)
    assert len(set(chosen)) == 12
    assert coverage.choose(images, 5).tolist() == chosen[:5]


def test_copies_come_last() -> None:
    images = directions(10)
    twice = np.concatenate([images, images])
    assert sorted(coverage.choose(twice, 10) % 10) == list(range(10))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve red, six green and three blue images, each with some noise, in one folder."""
    rng, folder = np.random.default_rng(0), tmp_path / "photos"
    folder.mkdir()
    for (name, colour), num in zip(COLOURS.items(), (12, 6, 3), strict=True):
        for number in range(num):
            pixels = np.clip(np.array(colour) + rng.integers(-20, 20, (SIDE, SIDE, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{name}_{number:02}.png")
    return folder


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = models.create("ViT-mu/4", SIDE, 0)
    models.save(model, tmp_path / "random.pt", {"preprocessing": {"image_size": SIDE, "eval_crop": "resize"}})
    return tmp_path / "random.pt"


def run(weights: Path, images: Path, out: Path, num: int, *more: str) -> list[str]:
    given = [f"weights={weights}", images_given(images), f"out={out}", f"num={num}", "device=cpu", "batch=8", *more]
    return choose.run(schema.load(ChooseConfig, None, given))


def colours(keys: list[str]) -> list[str]:
    return [Path(key).stem.partition("_")[0] for key in keys]


def test_the_folder_has_the_images_their_table_and_their_sheet(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "broken.png").write_bytes(b"junk")
    out = tmp_path / "new" / "to_label"
    keys = run(weights, photos, out, 3)
    assert sorted(colours(keys)) == ["blue", "green", "red"]
    assert sorted(os.listdir(out)) == ["choice.csv", "images", "sheet.png"]
    assert sorted(os.listdir(out / "images")) == ["1.png", "2.png", "3.png"]
    with (out / "choice.csv").open() as text:
        table = list(csv.DictReader(text))
    assert [list(row) for row in table] == [["path", "label", "key"]] * 3
    assert [row["key"] for row in table] == keys
    assert {row["label"] for row in table} == {""}
    for row in table:
        assert (out / row["path"]).read_bytes() == Path(row["key"]).read_bytes()
    said = capsys.readouterr().out
    assert "broken.png" in said
    assert "3 of 21 candidates" in said
    with Image.open(out / "sheet.png") as sheet:
        assert sheet.width > 300


def test_groups_are_in_the_table(
    weights: Path, make_dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset({"train": [[]] * 4}, ["cat"], groups=lambda row: f"p{row}")
    keys = run(weights, data.path, tmp_path / "out", 3, "split=train")
    with (tmp_path / "out" / "choice.csv").open() as text:
        assert [row["group"] for row in csv.DictReader(text)] == [key.replace("train", "p") for key in keys]
    assert f"shard.py source={tmp_path}/out/choice.csv group_column=group out=..." in capsys.readouterr().out


def test_candidates_are_a_random_part_by_the_seed(weights: Path, photos: Path, tmp_path: Path) -> None:
    few = [
        run(weights, photos, tmp_path / str(number), 4, "candidates=4", f"seed={seed}")
        for number, seed in enumerate((0, 0, 1))
    ]
    assert few[0] == few[1]
    assert set(few[0]) != set(few[2])


@pytest.mark.parametrize(
    ("num", "more", "message"),
    [
        (5, "candidates=4", r"num = 5 is more than candidates = 4\. Raise candidates, too\."),
        (22, "", r"of 22 candidates 21 can be read, fewer than num = 22\. Raise candidates"),
    ],
)
def test_mistakes_leave_nothing(num: int, more: str, message: str, weights: Path, photos: Path, tmp_path: Path) -> None:
    (photos / "broken.png").write_bytes(b"junk")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UserError, match=message):
        run(weights, photos, tmp_path / "new" / "out", num, *more.split())
    assert sorted(os.listdir(tmp_path)) == before


def test_the_table_has_the_classes(weights: Path, make_dataset, tmp_path: Path) -> None:
    """A data set that is made of the table has the same classes."""
    data = make_dataset({"train": [[0], [1], [], [0, 1]]}, ["n01", "n02"])
    run(weights, data.path, tmp_path / "out", 4, "split=train")
    with (tmp_path / "out" / "choice.csv").open() as text:
        assert sorted(row["label"] for row in csv.DictReader(text)) == ["", "n01", "n01;n02", "n02"]
