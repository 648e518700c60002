"""What is refused or passed over when a source is listed: before Ray starts, and with nothing left behind."""

import os
import shutil
import sys
import tarfile
import typing
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_images import LAYOUTS as LAYOUTS_OF_IMAGES
from raw_images import jpeg, write_folder, write_tar, write_zip

from data_tools.sharding.shard import run
from data_tools.sources import list_source
from data_tools.sources.layouts import LAYOUTS
from pipeline.settings import command
from pipeline.settings.commands.data import ShardConfig

GOOD = {"cat/1.jpg": jpeg(1), "dog/1.jpg": jpeg(2)}
MORE = {**GOOD, "cat/2.jpg": jpeg(3, width=99)}


def test_the_setting_offers_every_layout() -> None:
    choices = typing.get_args(typing.get_type_hints(ShardConfig)["layout"])
    assert set(choices) == {"auto", *LAYOUTS}


def _below(*folders: str) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for folder in folders for name, data in GOOD.items()}


def _empty_class(at: Path) -> Path:
    (at / "raw/fox").mkdir(parents=True)
    return write_folder(GOOD, at / "raw")


def _cut(path: Path) -> Path:
    # A plain tar ends in kilobytes of zeros: cut it before those.
    path.write_bytes(path.read_bytes().rstrip(b"\0")[:-200])
    return path


def _twice_in_tar(at: Path) -> Path:
    write_tar(GOOD, at / "raw.tar")
    with tarfile.open(at / "raw.tar", "a") as tar:
        tar.addfile(tarfile.TarInfo("cat/1.jpg"))
    return at / "raw.tar"


def _text(at: Path) -> Path:
    (at / "raw.tar").write_text("hello")
    return at / "raw.tar"


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def _begins_with(start: bytes, name: str) -> Callable[[Path], Path]:
    return lambda at: write_folder({name: start + bytes(600)}, at) / name


# What is wrong -> (makes the source, what the line says)
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda at: at / "nowhere", "nowhere: no such file or folder"),
    "no images": (lambda at: write_folder({"cat/notes.txt": b""}, at / "raw"), "no class folders with images"),
    "empty class": (_empty_class, "raw: 1 class folder without images: fox."),
    "two extensions": (
        lambda at: write_folder({**GOOD, "cat/1.png": b"?"}, at / "raw"),
        "cat/1.jpg and cat/1.png have the same key, 'cat/1'",
    ),
    "twice in a tar": (_twice_in_tar, "cat/1.jpg and cat/1.jpg have the same key"),
    "cut tar": (lambda at: _cut(write_tar(GOOD, at / "raw.tar")), "is damaged"),
    "an image": (lambda at: _text(at).rename(at / "photo.jpg"), "photo.jpg is a single image"),
    "no archive": (_text, "is not a .tar, .tar.gz, .tgz or .zip"),
    "not fetched": (
        _begins_with(LFS, "raw.tar"),
        "raw.tar is a pointer of Git LFS instead of the file; run git lfs pull.",
    ),
    "splits beside other folders": (
        lambda at: write_folder(_below("train", "valid") | {"extra/1.jpg": jpeg(1), "notes/a.txt": b""}, at / "raw"),
        "class folders are called train, valid, like splits. If they are, say so: splits.train=train splits.val=valid",
    ),
    "one folder too deep": (
        lambda at: write_folder(_below("My Pets"), at / "raw"),
        "If those are the classes, say so: 'splits.train=My Pets' . For images without labels: layout=images",
    ),
}


def refusal(monkeypatch, capfd, *arguments: str) -> str:
    """The one line that the command prints, having checked that it is one line with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["shard.py", *arguments])
    with pytest.raises(SystemExit) as exit:
        command.main(ShardConfig, run, "about")
    line = capfd.readouterr().err
    assert exit.value.code == 2
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_one_line_and_nothing_left(what: str, tmp_path: Path, monkeypatch, capfd) -> None:
    make, said = REFUSED[what]
    line = refusal(monkeypatch, capfd, f"source={make(tmp_path)}", f"out={tmp_path / 'out'}")
    assert said in line
    assert not (tmp_path / "out").exists()


def test_bad_places_are_refused(tmp_path: Path, monkeypatch, capfd) -> None:
    source = write_folder(GOOD, tmp_path / "raw")
    stranger = write_folder({"thesis.txt": b"..."}, tmp_path / "mine")
    # Of a job that was killed while it listed.
    killed = write_folder({"progress.json": b"{}"}, tmp_path / "killed")
    cases = {
        (f"out={killed}", "splits.train=here"): "here has no class folders with images (split 'train')",
        (f"out={source}/shards",): "lies inside source",
        (f"out={stranger}",): "is not empty (it holds thesis.txt)",
        (f"out={stranger}/thesis.txt",): "thesis.txt",
        (f"out={tmp_path}/new", "splits.train=here"): "here has no class folders with images (split 'train')",
        (f"out={tmp_path}/new", "val_share=0.0001"): "leaves 2 for 'train' and 0 for 'val'",
    }
    for arguments, said in cases.items():
        assert said in refusal(monkeypatch, capfd, f"source={source}", *arguments)
    assert [path.name for path in stranger.iterdir()] == ["thesis.txt"]
    assert not (tmp_path / "new").exists()

    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"working_dir": "gcs://x.zip"}}')
    assert "out = here is a relative path" in refusal(monkeypatch, capfd, f"source={source}", "out=here")


def test_what_is_no_image_is_counted(tmp_path: Path) -> None:
    others = {
        "cat/.DS_Store": b"",
        "__MACOSX/cat/._1.jpg": b"",
        "cat/notes.txt": b"",
        ".git/x/y.jpg": b"",
        "top.jpg": b"",
    }
    for source in (
        write_folder({**GOOD, **others}, tmp_path / "raw"),
        write_zip({**GOOD, **others}, tmp_path / "raw.zip"),
    ):
        listing = list_source(source, ShardConfig(source=str(source), out="unused"), tmp_path / "staging")
        assert listing.classes == ["cat", "dog"]
        assert listing.table["key"].to_pylist() == ["cat/1", "dog/1"]
        assert any("without an image extension" in note for note in listing.notes)
        assert any(
            "ignored images outside the folders of splits (1)" in note and "top.jpg" in note for note in listing.notes
        )
        assert not any("layout=images" in note for note in listing.notes)
        hidden = [note for note in listing.notes if ".git" in note]  # Not read in a folder, where it may be huge.
        assert ["hidden folders (2)" in note for note in hidden] == [source.is_dir()]


SOURCES = LAYOUTS_OF_IMAGES | {
    "parquet": lambda files, at: write_parquet(at / "raw.parquet", {"image": list(files.values())}),
    "list": lambda files, at: write_parquet(write_folder(files, at / "raw") / "list.parquet", {"path": list(files)}),
    "webdataset": lambda files, at: write_tar({"1.jpg": jpeg(1), "1.cls": b"0"}, at / "00000.tar"),
}


@pytest.mark.parametrize("layout", SOURCES)
def test_a_listing_has_the_time_of_each_image_s_last_change(layout: str, tmp_path: Path) -> None:
    source = SOURCES[layout](MORE, tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]

    def mtimes() -> set[int]:
        table = list_source(source, ShardConfig(source=str(source), out="unused"), tmp_path / "staging").table
        shutil.rmtree(tmp_path / "staging", ignore_errors=True)  # What is unpacked again has not changed.
        return set(table["mtime"].to_pylist())

    before = mtimes()
    assert before == mtimes()
    assert before <= {path.stat().st_mtime_ns for path in files}
    for path in files:
        os.utime(path, ns=(10**9, 10**9))
    assert mtimes() == {10**9}


def write_parquet(path: Path, columns: dict[str, list]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_classes_called_like_splits(tmp_path: Path) -> None:
    """Images of trains and of tests, each in its folder: with a class beside them these are classes."""
    source = write_folder({"train/1.jpg": jpeg(1), "test/1.jpg": jpeg(2), "car/old/1.jpg": jpeg(3)}, tmp_path / "raw")
    assert list_source(source, ShardConfig(source=str(source), out="out"), tmp_path).classes == ["car", "test", "train"]
