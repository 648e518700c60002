"""One odd item stops no job: it is skipped, counted and named, and every other sample is what it was."""

import csv
import io
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from raw_images import jpeg, settings, write_folder, write_tar, write_zip

from data_tools.check import verify
from data_tools.sharding import shard
from data_tools.sharding.index import run as index
from data_tools.sharding.write_shard import ShardingJob, write_shard
from data_tools.sources import Listing, Reader, list_source
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import Dataset
from pipeline.settings.commands.data import IndexConfig, ShardConfig, VerifyConfig

GOOD = {"cat/1.jpg": jpeg(1), "dog/1.jpg": jpeg(2)}
LATIN = os.fsdecode("caf\u00e9".encode("latin-1"))


def listed(source: Path, **others: object) -> Listing:
    config = ShardConfig(source=str(source), out="unused", **others)
    return list_source(source, config, source.parent / "staging")


def skipped(listing: Listing) -> dict[str, str]:
    return {where: reason for _, where, reason in listing.skipped}


@pytest.mark.parametrize("command", ["shard", "index"])
def test_a_path_that_is_not_utf8_is_refused_before_ray(command: str, tmp_path: Path) -> None:
    """Neither Ray nor Arrow can pass it on."""
    source = write_folder(GOOD, tmp_path / LATIN)
    run = {
        "shard": lambda: shard.run(settings(source, tmp_path / "out")),
        "index": lambda: index(IndexConfig(source=str(source), out=str(tmp_path / "out"))),
    }[command]
    with pytest.raises(UserError, match=r"^(source|data) = .* is not UTF-8, as Ray and Parquet require. Rename"):
        run()
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- folders


def _loop(at: Path) -> None:
    (at / "a").symlink_to(at / "b")
    (at / "b").symlink_to(at / "a")


def _cycle(at: Path) -> None:
    (at / "cat/dogs").symlink_to("../dog")
    (at / "dog/cats").symlink_to("../cat")


LINK = "a link to a folder that it lies in"
FOLDERS: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "loop of links": (_loop, set("ab")),
    "looping image": (lambda at: (at / "cat/2.jpg").symlink_to("2.jpg"), {"cat/2.jpg"}),
    "link to the parent": (lambda at: (at / "cat/up").symlink_to(".."), {"cat/up"}),
    "cycle": (_cycle, {"cat/dogs/cats", "dog/cats/dogs"}),
    "not UTF-8": (lambda at: (at / f"cat/{LATIN}.jpg").write_bytes(jpeg(3)), {"cat/caf\\udce9.jpg"}),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_an_odd_item_of_a_folder_is_skipped_and_named(what: str, tmp_path: Path) -> None:
    plant, expected = FOLDERS[what]
    source = write_folder(GOOD, tmp_path / "raw")
    plant(source)
    listing = listed(source)
    assert skipped(listing).keys() == expected
    assert {"cat/1", "dog/1"} <= set(listing.table["key"].to_pylist())
    assert any(note.startswith(f"cannot use {len(expected)} of the items listed: ") for note in listing.notes)


def test_class_folders_with_the_names_of_other_layouts(tmp_path: Path) -> None:
    names = ["x.tar", "y.parquet", "dataset.json", "test.bin", "meta"]
    source = write_folder({f"{name}/1.jpg": jpeg(number) for number, name in enumerate(names)}, tmp_path / "raw")
    assert listed(source).classes == sorted(names)


def test_skipped_items_count_as_bad_images_and_the_rest_is_the_same(ray_cluster: int, tmp_path: Path, capfd) -> None:
    files = {f"{name}/{i}.jpg": jpeg(i) for name in ("cat", "dog") for i in range(5)}
    plain = shard.run(settings(write_folder(files, tmp_path / "plain"), tmp_path / "a"))
    source = Path(shutil.copytree(tmp_path / "plain", tmp_path / "raw"))
    (source / "cat/up").symlink_to("..")
    (source / "dog/up").symlink_to("..")
    with pytest.raises(UserError, match=r"^2 of the 2 images read so far are bad, more than 1 of 12"):
        shard.run(settings(source, tmp_path / "b"))
    capfd.readouterr()
    made = shard.run(settings(source, tmp_path / "b", max_bad_share=0.2))
    assert str(made.path / "skipped.csv") in capfd.readouterr().out
    with open(made.path / "skipped.csv", newline="") as file:
        assert list(csv.reader(file))[1:] == [["", "cat/up", LINK], ["", "dog/up", LINK]]
    for name in ("train-000000.tar", "train-000001.tar", "samples.parquet", "shards.parquet", "source.parquet"):
        assert (made.path / name).read_bytes() == (plain.path / name).read_bytes(), name


# ---------------------------------------------------------------- lists


def test_odd_paths_of_a_list(tmp_path: Path) -> None:
    write_folder(GOOD, tmp_path)
    rows = [b"path,label", b"cat/1.jpg,cat", b"a\0b.jpg,cat", b"dog,dog", b"..,dog"]
    (tmp_path / "list.csv").write_bytes(b"\n".join(rows) + b"\n")
    listing = listed(tmp_path / "list.csv")
    assert skipped(listing) == {
        "a\\x00b.jpg": "its name has a NUL character",
        "..": "it has no name but an extension",
    }
    job = ShardingJob(
        str(tmp_path),
        str(tmp_path / "out"),
        "train-000000.tar",
        "train",
        listing.images(range(len(listing))),
        ShardConfig(source="", out=""),
        None,
    )
    (tmp_path / "out/.parts").mkdir(parents=True)
    done = write_shard(job)
    assert [name for _, name, _ in done.skipped] == ["dog"]
    assert done.shard.samples == 1


# ---------------------------------------------------------------- tars


def header(name: bytes, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(os.fsdecode(name))
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def member(name: bytes, data: bytes, pax: bytes = b"") -> bytes:
    """A member of a tar, with this content of a pax header before it."""
    before = header(b"pax", len(pax), tarfile.XHDTYPE) + pax + bytes(-len(pax) % 512) if pax else b""
    return before + header(name, len(data)) + data + bytes(-len(data) % 512)


def record(name: bytes, value: bytes) -> bytes:
    length = len(name) + len(value) + 3
    return b"%d %s=%s\n" % (length + len(str(length + len(str(length)))), name, value)


def tar_of(*members: bytes) -> bytes:
    return b"".join(members) + bytes(1024)


ODD_MEMBERS = {
    "name not UTF-8": member(b"cat/caf\xe9.jpg", jpeg(3)),
    "pax name not UTF-8": member(b"cat/x.jpg", jpeg(3), record(b"path", b"cat/\xff.jpg")),
    "NUL in a pax name": member(b"cat/x.jpg", jpeg(3), record(b"path", b"cat/\0.jpg")),
}


@pytest.mark.parametrize("what", ODD_MEMBERS)
@pytest.mark.parametrize("layout", ["archive", "imagenet21k"])
def test_an_odd_member_of_a_tar_is_skipped_and_named(what: str, layout: str, tmp_path: Path) -> None:
    data = tar_of(member(b"cat/1.jpg", GOOD["cat/1.jpg"]), ODD_MEMBERS[what], member(b"dog/1.jpg", GOOD["dog/1.jpg"]))
    source, splits = tmp_path / "raw.tar", {"train": ""}
    if layout == "imagenet21k":
        data, splits = tar_of(member(b"all.tar", data)), {"train": "all"}
    source.write_bytes(data)
    listing = listed(source, layout=layout, splits=splits)
    assert len(listing) == 2
    ((_, where, _),) = listing.skipped
    assert where.isprintable()


def link(name: bytes, target: bytes, kind: bytes = tarfile.LNKTYPE) -> bytes:
    info = tarfile.TarInfo(os.fsdecode(name))
    info.linkname, info.type = os.fsdecode(target), kind
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def test_odd_members_of_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "raw.zip", "w") as file:
        for name, data in GOOD.items():
            file.writestr(name, data)
        file.writestr("cat/rare.jpg", jpeg(3), zipfile.ZIP_BZIP2)
        file.writestr("cat/locked.jpg", jpeg(4))
        file.filelist[-1].flag_bits |= 1
    listing = listed(tmp_path / "raw.zip")
    assert listing.table["key"].to_pylist() == ["cat/1", "dog/1"]
    assert [(where, reason.split(";")[0]) for _, where, reason in listing.skipped] == [
        ("cat/locked.jpg", "it is encrypted, or packed by a rare method"),
        ("cat/rare.jpg", "it is encrypted, or packed by a rare method"),
    ]


def test_names_in_a_zip_that_does_not_tell_their_encoding(tmp_path: Path) -> None:
    """macOS does not say that its names are UTF-8; Windows packs them in its own code page."""
    names = {b"mac__": "caf\u00e9".encode(), b"gbk": b"\xb9\xb7k", b"old": "\u00e9t".encode("cp437") + b"t"}
    content = write_zip({f"{name.decode()}/1.jpg": jpeg(1) for name in names}, tmp_path / "raw.zip").read_bytes()
    for name, other in names.items():
        content = content.replace(name, other)
    (tmp_path / "raw.zip").write_bytes(content)
    listing = listed(tmp_path / "raw.zip")
    assert listing.classes == sorted(["caf\u00e9", b"\xb9\xb7k".decode("cp437"), "\u00e9tt"])


class _Pipe(io.BytesIO):
    """A file that cannot be sought, to which zipfile writes each CRC-32 after the data."""

    def seek(self, *_: object) -> int:
        raise io.UnsupportedOperation

    tell = seek


@pytest.mark.parametrize("file", [io.BytesIO, _Pipe])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_flipped_bit_in_a_zip_is_found(method: int, file: type[io.BytesIO], tmp_path: Path) -> None:
    """Neither inflate nor a JPEG's decoder notices it."""
    data, raw = np.random.default_rng(0).bytes(3000), file()
    with zipfile.ZipFile(raw, "w", method) as zipped:
        zipped.writestr("cat/1.jpg", data)
    content = raw.getvalue()
    (tmp_path / "raw.zip").write_bytes(content)
    ((place,),) = (image.files for image in listed(tmp_path / "raw.zip").images(np.arange(1)))
    with Reader() as reader:
        assert reader.read(*place) == data
    middle = content.index(data[1000:1100])
    (tmp_path / "raw.zip").write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with Reader() as reader, pytest.raises(ValueError, match=r"^damaged zip member \(wrong CRC-32\)$"):
        reader.read(*place)


# ---------------------------------------------------------------- webdataset

SHARD = [
    ("1.jpg", jpeg(1)),
    ("1.cls", b"0"),
    ("/tmp/ESC.jpg", jpeg(2)),
    ("/tmp/ESC.cls", b"1"),
    ("../up.jpg", jpeg(3)),
    ("../up.cls", b"0"),
    ("deep.jpg", jpeg(4)),
    ("deep.json", b'{"label": ['),
    (f"{LATIN}.jpg", jpeg(5)),
    (f"{LATIN}.cls", b"1"),
    ("long.jpg", jpeg(6)),
    ("long.cls", b"9" * 5000),
]
BAD = {"deep.jpg", "caf\\udce9.jpg", "long.jpg"}


@pytest.fixture
def odd_shard(tmp_path: Path) -> Path:
    (tmp_path / "tars").mkdir()
    return write_tar(SHARD, tmp_path / "tars/a.tar")


def test_odd_samples_of_a_webdataset(odd_shard: Path) -> None:
    listing = listed(odd_shard)
    assert listing.table["key"].to_pylist() == ["1", "__/up", "tmp/ESC"]
    assert {where.removeprefix("a.tar: ") for where in skipped(listing)} == BAD


def test_links_of_a_webdataset_are_skipped_and_named(tmp_path: Path) -> None:
    """The webdataset library does not read them; they were left out without a word."""
    parts = [member(b"1.jpg", jpeg(1)), member(b"1.cls", b"0"), link(b"2.jpg", b"1.jpg"), member(b"2.cls", b"1")]
    parts += [member(b"3.jpg", jpeg(3)), link(b"3.cls", b"1.cls")]
    (tmp_path / "a.tar").write_bytes(tar_of(*parts))
    listing = listed(tmp_path / "a.tar")
    assert listing.table["key"].to_pylist() == ["1"]
    said = "a link to {}; make the tar again with tar --dereference --hard-dereference"
    assert skipped(listing) == {
        "a.tar: 2.jpg": said.format("'1.jpg'"),
        "a.tar: 3.jpg": ".cls: " + said.format("'1.cls'"),
    }


NO_IMAGES = {
    "two images of a sample": (["2.0.jpg", "2.1.jpg", "2.cls"], "2.0.jpg"),
    "dots in the names": (["v2.cls", "v2.5.png"], "v2.cls"),
    "files that are not side by side": (["2.cls", "1.png", "2.jpg"], "2.cls"),
    "a label of a file that is no image": (["2.txt", "2.json"], "2.json"),
    "an image twice, once in capitals": (["2.jpg", "2.cls", "2.JPG"], "2.JPG"),
    "a label twice": (["2.jpg", "2.cls", "2.cls"], "2.cls"),
}


@pytest.mark.parametrize("what", NO_IMAGES)
def test_a_sample_of_a_webdataset_without_an_image_is_skipped_and_named(what: str, tmp_path: Path) -> None:
    """It was left out without a word, and is_labelled was False where all labels were in such samples."""
    names, where = NO_IMAGES[what]
    data = {"cls": b"1", "json": b'{"labels": [1]}'}
    odd = [(name, data.get(name.rpartition(".")[2], jpeg(2))) for name in names]
    stray = [("names.json", b'{"labels": ["cat", "dog"]}'), ("about.txt", b"")]
    write_tar([("0.jpg", jpeg(1)), ("0.cls", b"0"), *odd, *stray], tmp_path / "a.tar")
    assert f"a.tar: {where}" in skipped(listed(tmp_path / "a.tar"))


def test_labels_that_are_not_beside_their_images_are_not_taken_for_none(tmp_path: Path) -> None:
    write_tar({"1.jpg": jpeg(1), "2.jpg": jpeg(2), "1.cls": b"0", "2.cls": b"1"}, tmp_path / "a.tar")
    with pytest.raises(
        UserError, match=r"has no images; 4 cannot be used: a.tar: 1.cls \(no image beside it; .* as 1.jpg 1.cls"
    ):
        listed(tmp_path / "a.tar")
    # A list of names in a tar of images alone is no label.
    write_tar({"1.jpg": jpeg(1), "names.json": b'{"labels": ["cat"]}'}, tmp_path / "a.tar")
    assert not listed(tmp_path / "a.tar", layout="webdataset").is_labelled


def test_index_and_verify_of_odd_tars(odd_shard: Path, ray_cluster: int, tmp_path: Path) -> None:
    made: Dataset = index(IndexConfig(source=str(odd_shard), out=str(tmp_path / "out"), max_bad_share=0.7))
    with open(made.path / "skipped.csv", newline="") as file:
        assert {where.rpartition(": ")[2] for _, where, _ in list(csv.reader(file))[1:]} == BAD
    assert len(made.split("train")) == 3
    assert verify.run(VerifyConfig(data=str(made.path)))["is_whole"]
