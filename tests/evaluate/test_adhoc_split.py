"""Images named on the command line as a split."""

from pathlib import Path

import pytest

from pipeline.evaluate.adhoc_split import open_adhoc_split


def test_a_linked_image_has_the_class_of_the_folder_that_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had that of the folder of the file that it links to, or none."""
    for name in ("all", "cat", "dog"):
        (tmp_path / name).mkdir()
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / "all" / f"{number}.jpg").write_bytes(b"x")
        (tmp_path / name / f"{number}.jpg").symlink_to(tmp_path / "all" / f"{number}.jpg")
    (tmp_path / "dog" / "2.jpg").symlink_to(tmp_path / "cat" / "0.jpg")
    split = open_adhoc_split([str(tmp_path)], "val", "all", ["cat", "dog"]).split
    assert [split.labels_of(row).tolist() for row in range(len(split))] == [[], [], [0], [1], [1]]
    monkeypatch.chdir(tmp_path / "dog")
    here = open_adhoc_split(["1.jpg", "../cat/0.jpg"], "val", "all", ["cat", "dog"]).split
    assert [here.labels_of(row).tolist() for row in range(2)] == [[1], [0]]


def test_hidden_files_are_ignored(tmp_path: Path) -> None:
    """As by sharding: a folder copied from a Mac has a `._NAME` for each file."""
    folder = tmp_path / ".album"
    for name in ("a.jpg", "._a.jpg", "__MACOSX/a.jpg", ".thumbnails/a.jpg", "b/c.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    found = open_adhoc_split([str(folder)], "val", "all", []).split
    assert found.keys(range(len(found))) == [str(folder / "a.jpg"), str(folder / "b" / "c.jpg")]


def test_a_photograph_that_cannot_be_decoded_is_not_ignored(tmp_path: Path) -> None:
    for name in ("a.HEIC", "b.jpg", "c.txt", "d.jxl", "e.ppm"):
        (tmp_path / name).write_bytes(b"x")
    found = open_adhoc_split([str(tmp_path)], "val", "all", []).split
    assert found.keys(range(len(found))) == [str(tmp_path / name) for name in ("a.HEIC", "b.jpg", "d.jxl", "e.ppm")]
