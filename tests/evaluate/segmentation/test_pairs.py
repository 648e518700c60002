"""Images and masks find each other by name, in every kind of place; what has no partner is counted."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from block_pairs import COLOURS, Write, settings
from PIL import Image

from pipeline.architecture.pixels import RGB8
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.split import BadBudget
from pipeline.data.loading.decode import DecodeError
from pipeline.evaluate.segmentation.pairs import NO_CLASS, open_pairs, pair_reader, scan

BUDGET = BadBudget(0.001)


def opened(*places: object) -> tuple[list[str], list[str]]:
    train, val = open_pairs(settings(*map(str, places)), RGB8)
    return train.names, val.names


def test_a_pair_has_the_same_path(write_pairs: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    images, masks = write_pairs(20)
    found = opened(images, masks, "val_share=0.3")
    assert sorted(found[0] + found[1]) == sorted(f"part.{i % 2}/{i}" for i in range(20))
    assert 2 <= len(found[1]) <= 10
    monkeypatch.chdir(images.parent)
    assert opened("images/", "./masks", "val_share=0.3") == found


def test_more_images_move_none_to_the_other_part(write_pairs: Write) -> None:
    few = opened(*write_pairs(20), "val_share=0.3")
    many = opened(*write_pairs(40), "val_share=0.3")
    assert set(few[0]) <= set(many[0])
    assert set(few[1]) <= set(many[1])


def test_groups_are_held_out_whole(write_pairs: Write) -> None:
    """Of names part.0/0 to part.1/19: by the last digit, and of two groups, one."""
    places = write_pairs(20)
    train, val = open_pairs(settings(*map(str, places), "val_share=0.3", "group_pattern=[0-9]$"), RGB8)
    assert val.groups == [name[-1] for name in val.names]
    assert not set(train.groups) & set(val.groups)
    assert len(train) + len(val) == 20
    assert val.only(np.array([1])).groups == val.groups[1:2]
    assert [len(names) for names in opened(*places, "val_share=0.01", "group_pattern=^part.([01])")] == [10, 10]
    with pytest.raises(UserError, match=r"finds no group in the key 'part\.0/0'"):
        opened(*places, "group_pattern=video")


def test_a_data_set_has_groups_itself(make_dataset: Callable[..., Dataset]) -> None:
    data = make_dataset({"train": [[0]] * 12}, ["any"], groups=lambda row: f"video{row // 3}").path
    train, val = open_pairs(settings(str(data), str(data), "val_share=0.3", "val_split="), RGB8)
    assert sorted([*train.groups, *val.groups]) == sorted(f"video{row // 3}" for row in range(12))
    assert not set(train.groups) & set(val.groups)


def test_what_has_no_partner_is_counted(write_pairs: Write, capsys: pytest.CaptureFixture[str]) -> None:
    images, masks = write_pairs(20)
    (images / "part.0/0.png").unlink()
    for i in (1, 3):
        (masks / f"part.1/{i}.png").unlink()
    train, val = opened(images, masks, "val_share=0.3")
    assert len(train) + len(val) == 17
    assert f"left out: 2 of source = {images} and 1 of masks = {masks} without a partner\n" in capsys.readouterr().out


def test_endings_of_names(write_pairs: Write) -> None:
    """As in Cityscapes, whose folders hold several masks of each image."""
    images, masks = write_pairs(8)
    before = opened(images, masks, "val_share=0.4")
    for file in list(images.rglob("*.png")):
        file.rename(file.with_stem(f"{file.stem}_leftImg8bit"))
    for file in list(masks.rglob("*.png")):
        shutil.copy(file, file.with_stem(f"{file.stem}_instanceIds"))
        file.rename(file.with_stem(f"{file.stem}_labelIds"))
    with pytest.raises(UserError, match="image_suffix and mask_suffix"):
        opened(images, masks)
    assert opened(images, masks, "val_share=0.4", "image_suffix=_leftImg8bit", "mask_suffix=_labelIds") == before


def test_a_pair_is_read_with_its_classes(write_pairs: Write, capsys: pytest.CaptureFixture[str]) -> None:
    images, masks = write_pairs(6)
    Image.new("L", (5, 24)).save(masks / "part.0/0.png")
    (masks / "part.1/1.png").write_bytes(b"no image")
    config = settings(images, masks, f"val_source={images}", f"val_masks={masks}")
    train, _ = open_pairs(config, RGB8)
    classes = scan(config, BadBudget(0.5), train)
    assert classes.names == ["0", "1", "2"]
    read = pair_reader(train, classes, RGB8)
    whole = [read(train.names.index(f"part.{i % 2}/{i}")) for i in range(2, 6)]
    for name, why in (("part.0/0", "32 x 24 pixels, its mask 5 x 24"), ("part.1/1", "UnidentifiedImageError")):
        with pytest.raises(DecodeError, match=why):
            read(train.names.index(name))
    for pixels, numbers in whole:
        known = numbers != NO_CLASS
        assert np.array_equal(pixels[known], COLOURS[numbers[known]])
        assert not known[:8, :8].any()
        assert known.sum() == 24 * 32 - 64


def test_what_masks_cannot_tell_is_said_before_any_training(write_pairs: Write) -> None:
    images, masks = write_pairs(6)
    train, _ = open_pairs(settings(images, masks, "val_share=0.3"), RGB8)
    Image.new("L", (32, 24), 7).save(masks / f"{train.names[0]}.png")
    train, _ = open_pairs(settings(images, masks, "val_share=0.3"), RGB8)
    with pytest.raises(UserError, match=r"1 mask, the first .*\.png: each pixel has a value that ignore names"):
        scan(settings(images, masks, "ignore=[7,255]"), BUDGET, train, train.only(np.array([0])))


def test_images_that_are_learnt_from_and_scored_on_are_found(write_pairs: Write, tmp_path: Path) -> None:
    images, masks = write_pairs(6)
    (tmp_path / "link").symlink_to(images)
    train, val = open_pairs(settings(images, masks, f"val_source={tmp_path / 'link'}", f"val_masks={masks}"), RGB8)
    assert len(train.places() & val.places()) == 6
    train, val = open_pairs(settings(images, masks, "val_share=0.3"), RGB8)
    assert not train.places() & val.places()
