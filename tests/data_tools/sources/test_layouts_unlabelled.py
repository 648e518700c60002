"""Images without labels in every layout: the same samples from each, zero classes, and one line for what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_images import jpeg, write_folder, write_tar, write_zip
from test_layouts import listed, refused, samples, table

from data_tools.sources import Listing

# The same names in several folders, a folder in a folder, one at the top, and what is no image.
PHOTOS = {
    "2019/1.jpg": jpeg(1),
    "2020/1.jpg": jpeg(2),
    "2020/may/1.jpg": jpeg(3),
    "top.png": jpeg(4),
    "2020/notes.txt": b"x",
    ".hidden/5.jpg": jpeg(5),
}
KEYS = {"2019/1": jpeg(1), "2020/1": jpeg(2), "2020/may/1": jpeg(3), "top": jpeg(4)}


def unlabelled(listing: Listing) -> dict[str, bytes]:
    """Key -> bytes of a listing, all of whose samples are in train, without classes and labels."""
    assert not listing.is_labelled
    assert listing.classes == []
    found = samples(listing)
    assert {(split, classes) for split, classes, _ in found.values()} == {("train", ())}
    return {key: data for key, (_, _, data) in found.items()}


def _list(at: Path, name: str = "list.csv") -> Path:
    folder = write_folder(PHOTOS, at / "raw")
    paths = [name for name in PHOTOS if name.endswith(("jpg", "png")) and not name.startswith(".")]
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"path": paths}), folder / name)
    else:
        (folder / name).write_text("\n".join(["path", *paths]) + "\n")
    return folder / name


SOURCES: dict[str, tuple[Callable[[Path], Path], dict]] = {
    "folder": (lambda at: write_folder(PHOTOS, at / "raw"), {"layout": "images"}),
    "tar": (lambda at: write_tar(PHOTOS, at / "raw.tar"), {"layout": "images"}),
    "tar.gz": (lambda at: write_tar(PHOTOS, at / "raw.tgz", "w:gz"), {"layout": "images"}),
    "zip": (lambda at: write_zip(PHOTOS, at / "raw.zip"), {"layout": "images"}),
    "csv": (_list, {}),
    "parquet list": (lambda at: _list(at, "list.parquet"), {}),
}


@pytest.mark.parametrize("form", SOURCES)
def test_every_form_gives_the_same_samples(form: str, tmp_path: Path) -> None:
    make, settings = SOURCES[form]
    listing = listed(make(tmp_path), **settings)
    assert unlabelled(listing) == KEYS
    (tmp_path / "again").mkdir()
    assert listing.digest() == listed(write_folder(PHOTOS, tmp_path / "again/raw"), layout="images").digest()


def test_archives_below_a_folder_are_folders(tmp_path: Path) -> None:
    source = write_folder({"a/1.jpg": jpeg(1)}, tmp_path / "raw")
    write_zip({"x/1.jpg": jpeg(2)}, source / "a/2.zip")
    write_tar({"1.jpg": jpeg(3), "1.txt": b"a caption"}, source / "b.tar")
    write_tar({"./1.jpg": jpeg(4), "inner.tar": b"?"}, source / "c.tar.gz", "w:gz")
    listing = listed(source, layout="images")
    assert unlabelled(listing) == {"a/1": jpeg(1), "a/2/x/1": jpeg(2), "b/1": jpeg(3), "c/1": jpeg(4)}
    assert "ignored files without an image extension (2): b/1.txt, c/inner.tar" in listing.notes


def test_splits_are_folders(tmp_path: Path) -> None:
    source = write_folder({"a/1.jpg": jpeg(1), "b/2/1.jpg": jpeg(2), "c/3.jpg": jpeg(3)}, tmp_path / "raw")
    listing = listed(source, layout="images", splits={"train": "a", "val": "b"})
    assert samples(listing) == {"1": ("train", (), jpeg(1)), "2/1": ("val", (), jpeg(2))}
    assert any(note.startswith("ignored images outside the folders of splits (1)") for note in listing.notes)


def test_auto_offers_it_and_invents_no_labels(tmp_path: Path) -> None:
    source = write_folder({"1.jpg": jpeg(1), "2.jpg": jpeg(2)}, tmp_path / "raw")
    assert "layout=images" in refused(source)
    shards = tmp_path / "shards"
    shards.mkdir()
    write_tar({"1.jpg": jpeg(1)}, shards / "00000.tar")
    said = refused(shards)
    assert "is 00000.tar a shard of images without labels (layout=webdataset)" in said
    assert unlabelled(listed(shards, layout="webdataset")) == {"1": jpeg(1)}
    assert listed(shards, layout="imagenet21k").classes == ["00000"]


def test_images_beside_few_in_folders_are_not_left_out(tmp_path: Path) -> None:
    """Six of a hundred would be the data set."""
    source = write_folder({**{f"{i}.jpg": jpeg(i) for i in range(5)}, "a/1.jpg": jpeg(6), "b/1.jpg": jpeg(7)}, tmp_path)
    said = refused(source)
    assert all(word in said for word in ("5 images of 7", "2 folders", "layout=images"))
    listing = listed(source, layout="images")
    assert len(listing) == 7
    assert listing.notes == []


# --- tables without a label column


def test_a_table_without_labels_says_so(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_text("path,kind,caption\n1.jpg,cat,a cat\n2.jpg,dog,a dog\n")
    listing = listed(path)
    assert (len(listing), listing.classes, listing.is_labelled) == (2, [], False)
    assert "kind, caption" in listing.notes[0]
    assert listed(path, label_column="kind").classes == ["cat", "dog"]
    assert "has no column 'breed' (label_column)" in refused(path, label_column="breed")
    table(path, [("1.jpg", "cat")])
    assert not listed(path, label_column="").is_labelled
    assert listed(path).is_labelled


def test_lists_of_which_one_has_labels_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("path\n1.jpg\n")
    table(tmp_path / "val.csv", [("2.jpg", "cat")])
    splits = {"train": "train.csv", "val": "val.csv"}
    said = refused(tmp_path, layout="list", splits=splits)
    assert "val.csv has labels, but a table before it has none. Shard them into two data sets, or all without" in said
    listing = listed(tmp_path, layout="list", splits=splits, label_column="")
    assert (len(listing), listing.classes) == (2, [])


def test_parquet_of_images_alone(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [jpeg(1), jpeg(2)], "text": ["a", "b"]}), tmp_path / "a.parquet")
    listing = listed(tmp_path / "a.parquet")
    assert unlabelled(listing) == {"a/000000": jpeg(1), "a/000001": jpeg(2)}
    assert "label_column=NAME (there: image, text)" in listing.notes[0]


# --- tars of others


def _img2dataset(at: Path) -> Path:
    at.mkdir()
    for number in range(2):
        files: dict[str, bytes] = {}
        for i in (0, 1):
            key = f"{number:05d}{i:04d}"
            caption = json.dumps({"caption": "a cat", "key": key, "status": "success", "sha256": "x"}).encode()
            files |= {f"{key}.jpg": jpeg(10 * number + i), f"{key}.txt": b"a cat", f"{key}.json": caption}
        write_tar(files, at / f"{number:05d}.tar")
        pq.write_table(pa.table({"url": ["u", "v"], "caption": ["a cat", "a cat"]}), at / f"{number:05d}.parquet")
        (at / f"{number:05d}_stats.json").write_text("{}")
    return at


def test_shards_of_captions(tmp_path: Path) -> None:
    listing = listed(_img2dataset(tmp_path / "raw"))
    assert unlabelled(listing) == {f"{n:05d}{i:04d}": jpeg(10 * n + i) for n in (0, 1) for i in (0, 1)}


def test_tars_of_which_some_have_labels_use_those_alone(tmp_path: Path) -> None:
    """The others are bad images; layout=images uses all images and no label. Late labels are bad ones."""
    source = tmp_path / "raw"
    source.mkdir()
    write_tar({"1.jpg": jpeg(1), "2.jpg": jpeg(2)}, source / "a.tar")
    write_tar({"3.jpg": jpeg(3), "4.jpg": jpeg(4), "4.cls": b"1"}, source / "b.tar")
    listing = listed(source, layout="webdataset")
    assert samples(listing) == {"4": ("train", ("1",), jpeg(4))}
    assert listing.containers == [str(source / name) for name in ("a.tar", "b.tar")]
    assert [where for _, where, _ in listing.skipped] == ["a.tar: 1.jpg", "a.tar: 2.jpg", "b.tar: 3.jpg"]
    assert set(unlabelled(listed(source, layout="images"))) == {"a/1", "a/2", "b/3", "b/4"}
    write_tar({f"{i}.{ext}": data for i in range(9) for ext, data in _late(i).items()}, tmp_path / "c.tar")
    listing = listed(tmp_path / "c.tar", layout="webdataset")
    assert len(unlabelled(listing)) == 8
    assert listing.skipped[0][1] == "c.tar: 8.jpg"


def _late(number: int) -> dict[str, bytes]:
    return {"jpg": jpeg(number), **({"cls": b"1"} if number == 8 else {})}


@pytest.mark.parametrize("label", ['"cat"', "3.0", "true", '["cat"]', "[0, null]"])
def test_labels_that_are_no_numbers_are_not_taken_for_none(label: str, tmp_path: Path) -> None:
    write_tar({"1.jpg": jpeg(1), "1.json": f'{{"label": {label}}}'.encode()}, tmp_path / "raw.tar")
    said = refused(tmp_path / "raw.tar")
    assert "1 cannot be used: raw.tar: 1.jpg (.json: label " in said
    assert "is not an integer" in said


def test_a_damaged_json_makes_no_labels_of_captions(tmp_path: Path) -> None:
    source = _img2dataset(tmp_path / "raw")
    write_tar({"8.jpg": jpeg(8), "8.json": b'{"caption": "a c', "9.jpg": jpeg(9)}, source / "00002.tar")
    listing = listed(source, layout="webdataset")
    assert len(unlabelled(listing)) == 5
    ((_, where, reason),) = listing.skipped
    assert where == "00002.tar: 8.jpg"
    assert reason.startswith(".json: it is not valid JSON")
