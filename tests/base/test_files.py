"""Files that are replaced atomically, and what killed processes leave of them."""

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from pipeline.base import files


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


def test_what_is_being_written_is_not_removed(tmp_path: Path) -> None:
    with files.replacing(tmp_path / "a") as file, files.hidden_folder(tmp_path / "a") as folder:
        file.write(b"new")
        (folder / "a").write_bytes(b"other")
        files.remove_unfinished(tmp_path, ["a"])
        assert (folder / "a").exists()
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"new"


def test_the_first_creates_a_file(tmp_path: Path) -> None:
    assert files.create(tmp_path / "a", b"first")
    assert not files.create(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]
