"""Generated pictures: the same every time, and of forms that differ."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_tools.demo import SHAPES, make_digits, make_shapes
from launch.demo import DemoConfig, demo
from pipeline.base.errors import UserError


def pixels(folder: Path) -> dict[str, np.ndarray]:
    return {path.relative_to(folder).as_posix(): np.asarray(Image.open(path)) for path in sorted(folder.rglob("*.png"))}


def test_shapes_are_deterministic_and_more_of_them_change_none(tmp_path: Path) -> None:
    make_shapes(tmp_path / "few", 3, seed=1)
    make_shapes(tmp_path / "more", 4, seed=1)
    make_shapes(tmp_path / "other", 3, seed=2)
    few, more, other = (pixels(tmp_path / name) for name in ("few", "more", "other"))
    assert len(few) == 3 * len(SHAPES)
    assert all(image.shape == (32, 32, 3) for image in few.values())
    assert all(np.array_equal(image, more[name]) for name, image in few.items())
    assert not any(np.array_equal(image, other[name]) for name, image in few.items())
    assert len({image.tobytes() for image in few.values()}) == len(few)


def test_digits_are_all_there_in_two_splits(tmp_path: Path) -> None:
    make_digits(tmp_path)
    train, test = pixels(tmp_path / "train"), pixels(tmp_path / "test")
    assert len(train) + len(test) == 1797
    assert 0.17 < len(test) / 1797 < 0.23
    assert {name.split("/")[0] for name in train} == {name.split("/")[0] for name in test} == set("0123456789")
    assert all(image.shape == (32, 32, 3) for image in test.values())


def test_a_folder_of_photos_is_not_taken_for_an_earlier_demo(tmp_path: Path) -> None:
    """A demo begins by removing the earlier one; many folders of photos have a folder "raw"."""
    picture = tmp_path / "photos" / "raw" / "1.dng"
    picture.parent.mkdir(parents=True)
    picture.touch()
    with pytest.raises(UserError, match=r"photos exists and is not a demo's folder: choose another one with out="):
        demo(DemoConfig(out=str(tmp_path / "photos")))
    assert picture.exists()
