"""Images named on the command line as a split."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.base.errors import UserError
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.evaluate.adhoc_split import open_adhoc_split


def write_tar(path: Path, members: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_images_of_a_tar_whose_names_begin_alike(tmp_path: Path) -> None:
    """Webdataset's key ends at the first full stop, which names of photographs may have early: none of them is lost."""
    days = {f"2023.05.{day}.jpg": b"%d" % day for day in (11, 12, 13)}
    pair = {"a/x.left.jpg": b"l", "a/x.right.jpg": b"r", "a/x.cls": b"1", "2023.05.12.cls": b"0"}
    write_tar(tmp_path / "photos.tar", {**days, **pair})
    split = open_adhoc_split([str(tmp_path / "photos.tar")], "val", "all", ["cat", "dog"]).split
    assert split.keys(range(len(split))) == [f"photos.tar/{name}" for name in (*days, *list(pair)[:2])]
    reader = ShardReader(split)
    assert [reader.read(row) for row in range(len(split))] == [b"11", b"12", b"13", b"l", b"r"]
    assert [split.labels_of(row).tolist() for row in range(len(split))] == [[], [0], [], [1], [1]]


def test_labels_of_a_tar_that_are_no_numbers_of_a_class_are_unknown(tmp_path: Path) -> None:
    """Other programs write names. Of two classes with one name, as ImageNet has, each counts."""
    labels = [b"2\n", b"cat", b"3", b"-1", b"", b"\xff", b" 1"]
    members = {f"{n}.{kind}": content for n, of in enumerate(labels) for kind, content in (("jpg", b"x"), ("cls", of))}
    write_tar(tmp_path / "photos.tar", members)
    split = open_adhoc_split([str(tmp_path / "photos.tar")], "val", "all", ["cat", "cat", "dog"]).split
    assert [split.labels_of(row).tolist() for row in range(len(split))] == [[2], [], [], [], [], [], [1]]


def test_links_in_a_tar(tmp_path: Path) -> None:
    """As in sharding, a hard link has the bytes of an earlier file. Other links were left out without a word."""
    write_tar(file := tmp_path / "a.tar", {"a.jpg": b"a", "one": b"1"})
    links = {
        "b.jpg": ("a.jpg", tarfile.LNKTYPE),
        "b.cls": ("one", tarfile.LNKTYPE),
        "c.jpg": ("a.jpg", tarfile.SYMTYPE),
        "d.jpg": ("later.jpg", tarfile.LNKTYPE),
        "c.cls": ("nothing", tarfile.SYMTYPE),
        "e.txt": ("a.jpg", tarfile.SYMTYPE),
    }
    with tarfile.open(file, "a") as tar:
        for name, (target, kind) in links.items():
            link = tarfile.TarInfo(name)
            link.linkname, link.type = target, kind
            tar.addfile(link)
    split = open_adhoc_split([str(file)], "val", "all", ["cat", "dog"]).split
    assert split.keys(range(len(split))) == ["a.tar/a.jpg", "a.tar/b.jpg"]
    reader = ShardReader(split)
    assert [reader.read(row) for row in range(len(split))] == [b"a", b"a"]
    assert [split.labels_of(row).tolist() for row in range(len(split))] == [[], [1]]
    said = "left out: 3 links, such as a.tar/c.jpg"
    assert said in split.notes()


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


@pytest.mark.parametrize("damage", ["cut off", "damaged header"])
def test_the_images_behind_damage_in_a_tar_are_missed(damage: str, tmp_path: Path) -> None:
    """tarfile stopped there as if at the end, and those images were left out without a word."""
    write_tar(file := tmp_path / "a.tar", {"a.jpg": b"a", "b.jpg": b"b"})
    whole = file.read_bytes()
    file.write_bytes(whole[:1024] if damage == "cut off" else whole[:1024] + b"x" + whole[1025:])
    with pytest.raises(
        UserError, match=r"a\.tar is not a complete tar of samples \(no header and no end mark at byte 1024\)"
    ):
        open_adhoc_split([str(file)], "val", "all", [])


def test_hidden_files_are_ignored(tmp_path: Path) -> None:
    """As by sharding: a folder copied from a Mac has a `._NAME` for each file."""
    folder = tmp_path / ".album"
    for name in ("a.jpg", "._a.jpg", "__MACOSX/a.jpg", ".thumbnails/a.jpg", "b/c.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    found = open_adhoc_split([str(folder)], "val", "all", []).split
    assert found.keys(range(len(found))) == [str(folder / "a.jpg"), str(folder / "b" / "c.jpg")]
    write_tar(tmp_path / "album.tar", {"./a.jpg": b"x", "./._a.jpg": b"y", "__MACOSX/._a.jpg": b"z"})
    found = open_adhoc_split([str(tmp_path / "album.tar")], "val", "all", []).split
    assert found.keys(range(len(found))) == ["album.tar/./a.jpg"]


def test_a_photograph_that_cannot_be_decoded_is_not_ignored(tmp_path: Path) -> None:
    for name in ("a.HEIC", "b.jpg", "c.txt", "d.jxl", "e.ppm"):
        (tmp_path / name).write_bytes(b"x")
    found = open_adhoc_split([str(tmp_path)], "val", "all", []).split
    assert found.keys(range(len(found))) == [str(tmp_path / name) for name in ("a.HEIC", "b.jpg", "d.jxl", "e.ppm")]
