"""Several files that belong together: a full disk changes none of them, and a kill leaves no mixture that counts as
results.
"""

import errno
import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.data.storage.atomic import write_files

OLD = {"numbers.json": "old", "page.md": "old", "picture.png": b"old", "gone.csv": "old"}
NEW = {"numbers.json": "new", "page.md": "new", "picture.png": b"new" * 1000, "gone.csv": None}


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Context in which a larger file cannot be written: the error of a full disk, but for its number."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text()[:3] for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_full_disk_leaves_all_older_files(tmp_path: Path) -> None:
    write_files(tmp_path, OLD)
    with pytest.raises(OSError, match="File too large") as full, largest_file(1000):
        write_files(tmp_path, NEW, mark="numbers.json")
    assert (full.value.errno, full.value.filename) == (errno.EFBIG, str(tmp_path / "picture.png"))
    assert content(tmp_path) == dict.fromkeys(OLD, "old")
    assert len(list(tmp_path.iterdir())) == len(OLD)


def kill_before(number: int, folder: Path) -> bool:
    """Write NEW in a process that is killed before its n-th change of a name. Returns whether there was one."""
    if (pid := os.fork()) == 0:
        left = iter(range(number))

        def killed(change):
            def counted(*arguments, **options):
                if next(left, None) is None:
                    os._exit(9)
                return change(*arguments, **options)

            return counted

        os.replace, os.unlink = killed(os.replace), killed(os.unlink)
        write_files(folder, NEW, mark="numbers.json")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_what_a_kill_leaves_is_old_or_new_or_has_no_mark(tmp_path: Path) -> None:
    seen = []
    for number in itertools.count():
        write_files(folder := tmp_path / str(number), OLD)
        if not kill_before(number, folder):
            break
        found = content(folder)
        seen.append(found.get("numbers.json"))
        assert len(set(found.values())) <= 1, "an old page may name a new picture"
        write_files(folder, NEW, mark="numbers.json")
        assert content(folder) == {"numbers.json": "new", "page.md": "new", "picture.png": "new"}
        assert len(list(folder.iterdir())) == 3, "no hidden file stays"
    assert seen == ["old", *[None] * 6]
