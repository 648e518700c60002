"""Sources as macOS and Windows write them: hidden ._files beside each file, byte order marks, upper-case extensions."""

from pathlib import Path

import pytest
from raw_images import jpeg, write_folder, write_tar, write_zip
from test_layouts import listed, samples

from pipeline.evaluate.adhoc_split import open_adhoc_split

DOUBLE = b"\0\5\x16\7\0\2\0\0Mac OS X        "


def _with_doubles(files: dict[str, bytes]) -> list[tuple[str, bytes]]:
    """Each file after the one that macOS's tar adds for its attributes."""
    found = []
    for name, data in files.items():
        folder, slash, last = name.rpartition("/")
        found += [(f"{folder}{slash}._{last}", DOUBLE), (name, data)]
    return found


@pytest.mark.parametrize("layout", ["auto", "webdataset"])
def test_labels_of_a_tar_made_on_a_mac(layout: str, tmp_path: Path) -> None:
    files = {"1.jpg": jpeg(1), "1.cls": b"0", "./a/2.jpg": jpeg(2), "./a/2.json": b'{"labels": [1]}'}
    write_tar(_with_doubles(files), tmp_path / "raw.tar")
    assert samples(listed(tmp_path / "raw.tar", layout=layout)) == {
        "1": ("train", ("0",), jpeg(1)),
        "a/2": ("train", ("1",), jpeg(2)),
    }


def test_a_list_and_names_written_on_windows(tmp_path: Path) -> None:
    write_folder({"1.jpg": jpeg(1), "2.jpg": jpeg(2)}, tmp_path / "raw")
    mark = b"\xef\xbb\xbf"
    (tmp_path / "raw/L.CSV").write_bytes(mark + b"path,label\r\n1.jpg,0\r\n2.jpg,1\r\n")
    (tmp_path / "raw/L.TSV").write_bytes(mark + b"path\tlabel\r\n1.jpg\t0\r\n2.jpg\t1\r\n")
    (tmp_path / "names.txt").write_bytes(mark + b"cat\r\ndog\r\n")
    for name in ("L.CSV", "L.TSV"):
        listing = listed(tmp_path / "raw" / name, label_names=str(tmp_path / "names.txt"))
        assert samples(listing) == {"1": ("train", ("cat",), jpeg(1)), "2": ("train", ("dog",), jpeg(2))}


def test_folders_that_systems_add_are_no_classes(tmp_path: Path) -> None:
    """Synology's thumbnails became a class and samples of others; lost+found was a class folder without images."""
    files = {"cat/1.jpg": jpeg(1), "dog/1.jpg": jpeg(2)}
    added = [
        "@eaDir/1.jpg",
        "cat/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg",
        "$RECYCLE.BIN/x/1.jpg",
        "System Volume Information/1.jpg",
    ]
    everything = {**files, **dict.fromkeys(added, jpeg(3))}
    source = write_folder(everything, tmp_path / "raw")
    (source / "lost+found").mkdir()
    for made in (source, write_zip(everything, tmp_path / "raw.zip"), write_tar(everything, tmp_path / "raw.tar")):
        listing = listed(made)
        assert listing.classes == ["cat", "dog"]
        assert samples(listing).keys() == {"cat/1", "dog/1"}
        assert made == source or "ignored hidden files (4)" in listing.notes[0]
    assert len(open_adhoc_split([str(source)], "val", "none", []).split) == 2
