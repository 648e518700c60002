"""Small files that a user names: regular files only, and nothing that waits or has no end."""

import errno
import fcntl
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import pytest

from data_tools.sources.class_numbers import read_names
from pipeline.base import files
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import open_dataset
from pipeline.estimate.measured import read_measured
from pipeline.evaluate.predict import read_class_names
from pipeline.lifecycle.hosts import read_hostfile
from pipeline.model.files import find_file
from pipeline.settings import schema
from pipeline.settings.commands.operate import PlanConfig
from pipeline.settings.yaml_reader import read_yaml


def _socket(at: Path) -> None:
    folder = os.open(at.parent, os.O_RDONLY)  # The address of a socket has at most 107 bytes.
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{at.name}")
    os.close(folder)


ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo, "folder": Path.mkdir, "socket": _socket, "device": lambda at: at.symlink_to("/dev/zero"),
    "terminal": lambda at: at.symlink_to("/dev/tty"), "circle": lambda at: at.symlink_to(at), "missing": lambda at: None,
    "huge": lambda at: (at.touch(), os.truncate(at, files.MAX_BYTES + 1)),
}  # fmt: skip


def _predict(path: Path) -> object:
    return read_class_names(str(path))


def _plan(path: Path) -> object:
    settings = [
        "name=x",
        "data.path=x",
        "train.length=1 steps",
        "model.name=ViT-Ti/16",
        "cluster=1x1xH100",
        f"bench={path}",
    ]
    return read_measured(schema.load(PlanConfig, None, settings), None, None)  # type: ignore[arg-type]


READERS: dict[str, Callable[[Path], object]] = {
    "class_map, class_list, synset_names, label_names": lambda path: read_names(str(path), "class_list"),
    "class_names": _predict, "bench": _plan, "--config": read_yaml, "hostfile": read_hostfile,
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ODD)
def test_one_line_for_what_is_no_file(kind: str, reader: str, tmp_path: Path) -> None:
    path = tmp_path / "named"
    ODD[kind](path)
    signal.alarm(20)  # Ends a reader that waits, with all tests.
    try:
        with pytest.raises(UserError, match="named") as caught:
            READERS[reader](path)
        assert "\n" not in str(caught.value)
    finally:
        signal.alarm(0)


def test_content_and_limit(tmp_path: Path) -> None:
    (file := tmp_path / "a.txt").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(file)
    assert files.read_bytes(tmp_path / "link", 5) == b"12345"
    with pytest.raises(UserError, match="has 5 bytes, above the limit of 4"):
        files.read_bytes(file, 4)
    with pytest.raises(UserError, match="has 5 bytes, above the limit of 4"):
        files.read_bytes("/proc/self/fd/" + str(os.open(file, os.O_RDONLY)), 4)
    for name in ("a\0b", "a\ud800"):
        with pytest.raises(UserError, match="is not a path"):
            files.read_bytes(tmp_path / name)


def test_an_error_names_the_file_and_not_its_hidden_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(FileNotFoundError) as missing, files.replacing(tmp_path / "nowhere" / "a"):
        pass
    assert missing.value.filename == str(tmp_path / "nowhere" / "a")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as folder:
        files.write_text(tmp_path / "folder", "x")
    assert folder.value.filename == str(tmp_path / "folder")


def killed_while(writes: Callable[[Path], AbstractContextManager[object]], path: Path) -> None:
    if (pid := os.fork()) == 0:
        with writes(path):
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("writes", [files.replacing, files.hidden_folder])
def test_what_a_killed_process_left_is_removed(
    writes: Callable[[Path], AbstractContextManager[object]], tmp_path: Path
) -> None:
    killed_while(writes, tmp_path / "a")
    killed_while(writes, tmp_path / "b")
    left = {path.name.split(".")[1] for path in tmp_path.iterdir()}
    assert left == {"a", "b"}
    files.remove_unfinished(tmp_path, ["a"])
    left = {path.name.split(".")[1] for path in tmp_path.iterdir()}
    assert left == {"b"}


def test_what_is_being_written_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a file that another process finds before it is locked: the writer begins another one."""
    lock = fcntl.flock

    def late(file: BinaryIO | int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        files.remove_unfinished(tmp_path, ["a"])
        assert not any(tmp_path.iterdir())
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with files.replacing(tmp_path / "a") as file, files.hidden_folder(tmp_path / "a") as folder:
        file.write(b"new")
        (folder / "a").write_bytes(b"other")
        files.remove_unfinished(tmp_path, ["a"])
        assert (folder / "a").exists()
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("with_links", [True, False])
def test_the_first_creates_a_file(with_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a disk without hard links, such as exFAT, where a new MLflow database ended in "permission denied"."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", str(source), None, str(target))

    if not with_links:
        monkeypatch.setattr(os, "link", refuse)
    assert files.create(tmp_path / "a", b"first")
    assert not files.create(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_a_misspelt_path_is_compared_with_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also below a folder whose name is misspelt, and of a relative path; nothing is offered that does not exist."""
    for name in ("recipes/own_images.yaml", "recipes/other", "photos/cat.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for missing, hint in {
        "recipes/own_image.yaml": " Did you mean recipes/own_images.yaml?",
        "recipe/own_images.yaml": " Did you mean recipes/own_images.yaml?",
        f"{tmp_path}/photo": f" Did you mean {tmp_path}/photos?",
        "recipe/mine.yaml": "",
        "photos/cat.jpg/x": "",
        "..": "",
        "elsewhere": "",
    }.items():
        assert files.did_you_mean(Path(missing)) == hint, missing
    for read in (read_yaml, open_dataset, find_file):
        with pytest.raises(UserError, match=r"^photo: no such .*\. Did you mean photos\?"):
            read(Path("photo"))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert files.did_you_mean(Path("a/b")) == ""
