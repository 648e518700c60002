"""A checkpoint is whole or invisible, whenever the process dies and whatever happens to its files."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import checkpoint
from pipeline.checkpoint import Checkpoints, free_bytes, read_state, verify, write_atomically

ROOT = Path(__file__).parents[1]


def commit(checkpoints: Checkpoints, step: int) -> Path:
    path = checkpoints.begin(step)
    (path / "engine" / "state").mkdir(parents=True)
    for name in ("engine/state/rank0.pt", "engine/state/rank1.pt", "model.pt"):
        (path / name).write_bytes(f"{name} of step {step}".encode() * 10)
    return checkpoints.commit(path, {"step": step})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path, bit: int = 5) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_begin_is_invisible_and_commit_is_not(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=2)
    assert checkpoints.candidates() == []
    assert checkpoints.newest_whole() == (None, [])
    path = checkpoints.begin(7)
    (path / "model.pt").write_bytes(b"half")
    assert checkpoints.candidates() == []
    final = checkpoints.commit(path, {"step": 7, "text": "ä"})
    assert final.name == "step-00000007"
    assert checkpoints.newest_whole() == (final, [])
    assert read_state(final) == {"step": 7, "text": "ä"}
    assert (checkpoints.folder / "latest").read_text() == "step-00000007"
    assert names(checkpoints.folder) == ["latest", "step-00000007"]
    assert set(json.loads((final / "checksums.json").read_text())) == {"model.pt", "state.json"}


def test_begin_forgets_an_earlier_attempt(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    (checkpoints.begin(7) / "stale.pt").write_bytes(b"stale")
    assert names(checkpoints.begin(7)) == []


def test_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 90, 1000, 123_456_789):
        commit(checkpoints, step)
    assert [path.name for path in checkpoints.candidates()] == ["step-123456789", "step-00001000"]
    assert names(tmp_path) == ["latest", "step-00001000", "step-123456789"]
    assert (tmp_path / "latest").read_text() == "step-123456789"


@pytest.mark.parametrize("name", ["engine/state/rank1.pt", "model.pt", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "remove", "rename"])
def test_a_damaged_one_is_refused_and_the_one_before_is_used(name: str, damage: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    old, new = commit(checkpoints, 10), commit(checkpoints, 20)
    file = new / name
    if damage == "flip":
        flip(file)
    elif damage == "remove":
        file.unlink()
    elif damage == "rename":
        file.rename(file.with_name("other"))
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "cut" else file.read_bytes() + b"x")
    found, refused = checkpoints.newest_whole()
    assert found == old
    assert len(refused) == 1
    assert str(new) in refused[0]
    assert (name if damage != "rename" else "other has no checksum") in refused[0]
    assert verify(old) is None


def test_no_flipped_bit_of_the_checksums_is_believed(tmp_path: Path) -> None:
    path = commit(Checkpoints(tmp_path, keep=2), 10)
    file = path / "checksums.json"
    good = file.read_bytes()
    for bit in range(0, 8 * len(good), 7):
        flip(file, bit)
        assert verify(path) is not None, bit
        file.write_bytes(good)
    for text in ("", "[]", "null", '{"a\\u0000b": 1}'):
        file.write_text(text)
        assert verify(path) is not None, text


def test_none_is_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (10, 20):
        (commit(checkpoints, step) / "model.pt").unlink()
    found, refused = checkpoints.newest_whole()
    assert found is None
    assert len(refused) == 2


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    commit(checkpoints, 10)
    flip(commit(checkpoints, 20) / "model.pt")
    assert checkpoints.newest_whole()[0] == tmp_path / "step-00000010"
    again = commit(checkpoints, 20)
    assert checkpoints.newest_whole() == (again, [])
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000020"]


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_ones_do_not_push_out_whole_ones(keep: int, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (10, 20, 30):
        commit(checkpoints, step)
    flip(tmp_path / "step-00000020" / "model.pt")
    flip(tmp_path / "step-00000030" / "model.pt")
    # The next life goes on from 10, and commits at steps of its own.
    checkpoints = Checkpoints(tmp_path, keep=keep)
    assert checkpoints.newest_whole()[0] == tmp_path / "step-00000010"
    commit(checkpoints, 15)
    assert checkpoints.newest_whole()[0] == tmp_path / "step-00000015"
    commit(checkpoints, 25)
    assert checkpoints.newest_whole()[0] == tmp_path / "step-00000025"
    whole = [path.name for path in checkpoints.candidates() if verify(path) is None]
    assert whole == ["step-00000025", "step-00000015"][:keep]
    commit(checkpoints, 35)
    assert [path.name for path in checkpoints.candidates()] == ["step-00000035", "step-00000025"][:keep]


def test_sweep_removes_what_was_interrupted_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    whole = commit(checkpoints, 10)
    (checkpoints.begin(20) / "model.pt").write_bytes(b"half")
    shutil.copytree(whole, tmp_path / ".removing-step-00000005")
    checkpoints.sweep()
    assert names(tmp_path) == ["latest", "step-00000010"]
    Checkpoints(tmp_path / "nowhere", 2).sweep()


def test_what_a_sweep_could_not_remove_stops_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    commit(checkpoints, 10)
    (tmp_path / ".removing-step-00000010" / "busy").mkdir(parents=True)
    commit(checkpoints, 20)
    assert names(tmp_path) == ["latest", "step-00000020"]


def test_a_full_disk_leaves_the_old_text_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as error:
        write_atomically(path, "new")
    assert error.value.filename == str(path)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["state.json"]


def test_everything_is_flushed_before_it_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: set[str] = set()
    fsync, rename = os.fsync, os.rename

    def remember(descriptor: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def check(source: Path, target: Path) -> None:
        # The checksums are flushed under the name that they are written under.
        everything = {str(p) for p in [source, *source.rglob("*")] if p.name != "checksums.json"}
        assert everything <= flushed, everything - flushed
        assert str(source / ".checksums.json.tmp") in flushed
        rename(source, target)

    monkeypatch.setattr(checkpoint.os, "fsync", remember)
    monkeypatch.setattr(checkpoint.os, "rename", check)
    commit(Checkpoints(tmp_path, keep=2), 10)
    assert str(tmp_path) in flushed


def test_space_left(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)


# Runs without torch and pytest, so that a fork is cheap: each child dies at its N-th call that touches the disk.
KILLS = """
import builtins, os, shutil, signal, sys
from pathlib import Path
from pipeline.checkpoint import Checkpoints, verify

FILES = ("engine/state/rank0.pt", "engine/state/rank1.pt", "model.pt")
os.fsync = lambda descriptor: None  # Slow, and a SIGKILL loses nothing that was written.

def content(name, step):
    return f"{name} of step {step}".encode() * 500

def commit(folder, step):
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.newest_whole()
    path = checkpoints.begin(step)
    (path / "engine" / "state").mkdir(parents=True)
    for name in FILES:
        with open(path / name, "wb") as file:
            file.write(content(name, step))
    checkpoints.commit(path, {"step": step})

def die_at(last):
    count = 0
    def tick():
        nonlocal count
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
    def counted(function):
        def call(*arguments, **options):
            tick()
            return function(*arguments, **options)
        return call
    class Halves:
        def __init__(self, file):
            self.file = file
        def write(self, data):
            half = len(data) // 2
            for part in (data[:half], data[half:]):
                self.file.write(part)
                self.file.flush()
                tick()
        def __enter__(self):
            return self
        def __exit__(self, *error):
            self.file.close()
        def __getattr__(self, name):
            return getattr(self.file, name)
    for name in ("replace", "rename", "fsync", "open", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    plain = builtins.open
    def opened(file, mode="r", *rest, **options):
        tick()
        stream = plain(file, mode, *rest, **options)
        return Halves(stream) if "w" in mode else stream
    builtins.open = opened

def check(folder, allowed):
    for path in Checkpoints(folder, 1).candidates():
        step = int(path.name[5:])
        if step == DAMAGED:
            continue
        assert verify(path) is None, (path, verify(path))
        for name in FILES:
            assert (path / name).read_bytes() == content(name, step)
    found, _ = Checkpoints(folder, 1).newest_whole()
    assert found is not None and int(found.name[5:]) in allowed, found
    return int(found.name[5:])

root, DAMAGED = Path(sys.argv[1]), int(sys.argv[2])
commit(root / "template", 10)
if DAMAGED:
    saved = root / "saved"
    shutil.copytree(root / "template" / "step-00000010", saved)
    commit(root / "template", DAMAGED)
    shutil.copytree(saved, root / "template" / "step-00000010")
    (root / "template" / f"step-{DAMAGED:08d}" / "model.pt").write_bytes(b"?")
seen, last = set(), 0
while True:
    last += 1
    folder = root / f"run{last}"
    shutil.copytree(root / "template", folder)
    child = os.fork()
    if not child:
        die_at(last)
        commit(folder, 20)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    survived = status == 0
    assert survived or os.WTERMSIG(status) == signal.SIGKILL, status
    was_damaged, DAMAGED = DAMAGED, 0 if survived else DAMAGED
    seen.add(check(folder, {20} if survived else {10, 20}))
    DAMAGED = was_damaged
    # The next life: sweep, go on.
    Checkpoints(folder, 1).sweep()
    commit(folder, 30)
    assert Checkpoints(folder, 1).newest_whole()[0].name == "step-00000030"
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["latest", "step-00000030"], left
    shutil.rmtree(folder)
    if survived:
        break
assert seen == {10, 20}, seen
print(last)
"""


@pytest.mark.parametrize("damaged", [0, 20])
def test_sigkill_at_every_write(damaged: int, tmp_path: Path) -> None:
    """damaged: the step of a damaged checkpoint that lies where the new one goes; 0 is none."""
    done = subprocess.run(
        [sys.executable, "-c", KILLS, tmp_path, str(damaged)], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40  # every call was reached
