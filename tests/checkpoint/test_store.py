"""A checkpoint is complete or invisible, whenever the writers die and whatever happens to its files."""

import errno
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import faulty_s3
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polling import until
from ranks import ROOT
from safetensors.numpy import load_file
from saving import CONFIG, STATES, job, metadata, names, newest_complete, save_all, tensors

from pipeline import model as models
from pipeline.base.errors import CrashError, UserError
from pipeline.checkpoint import store, writer
from pipeline.checkpoint.sharded_tensors import CheckpointIndex, Range, ShardedTensors
from pipeline.checkpoint.store import (
    Checkpoints,
    State,
    WriterStatus,
    read_state,
    read_status,
    verify,
    write_status,
)
from pipeline.checkpoint.writer import save
from pipeline.data.storage.retry import Retry
from pipeline.process import committed, waits
from pipeline.process.distributed import Ranks

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


def flip(path: Path, bit: int = 5) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# -------------------------------------------------------------------- what is written
def test_what_was_saved_is_there(tmp_path: Path) -> None:
    """By three ranks: the tensors by range, the model by itself, the state; and nothing else."""
    folder = tmp_path / "run" / "checkpoints"
    assert Checkpoints(folder).candidates() == []
    save_all(folder, 7, world_size=3, identity={"text": "ä"})
    final = folder / "step-00000007"
    assert Checkpoints(folder).candidates() == [final]
    assert verify(final) is None
    assert read_state(final) == State(7, {"text": "ä"})
    assert (folder / "latest").read_text() == "step-00000007"
    assert names(folder) == ["latest", "step-00000007"]
    assert names(final) == [
        "checksums.json",
        "index.json",
        "model.safetensors",
        *[f"rank-000{r}.t.bin" for r in range(3)],
        "state.json",
    ]
    expected = tensors(7)
    for state in STATES:
        found = ShardedTensors.open(final).full_tensors(state)
        assert found.keys() == expected[state].keys()
        assert all(np.array_equal(found[name], array) for name, array in expected[state].items())
    config, weights, extra = models.read_weights(final)[:3]
    assert (config, extra) == (CONFIG, {"step": 7})
    assert all(np.array_equal(weights[name].numpy(), array) for name, array in expected["weights"].items())


@settings(max_examples=25)
@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    writers=st.integers(1, 4),
)
def test_any_ranges_are_read_from_any_ranges(
    data: st.DataObject, sizes: list[int], writers: int, tmp_path_factory
) -> None:
    """However the tensors were cut and dealt out to files."""
    folder = tmp_path_factory.mktemp("ranges")
    rng = np.random.default_rng(0)
    arrays = {s: {f"t{i}": rng.random(n, np.float32) for i, n in enumerate(sizes)} for s in STATES}
    files: dict[str, list[tuple[str, int, int]]] = {f"rank-{w}.bin": [] for w in range(writers)}
    for i, n in enumerate(sizes):
        bounds = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))})
        for begin, end in pairwise(bounds):
            files[f"rank-{data.draw(st.integers(0, writers - 1))}.bin"].append((f"t{i}", begin, end - begin))
    for file, ranges in files.items():
        parts = [arrays[s][name][start : start + length] for s in STATES for name, start, length in ranges]
        (folder / file).write_bytes(b"".join(part.tobytes() for part in parts))
    shapes = {name: [array.size] for name, array in arrays["weights"].items()}
    sharded = ShardedTensors(folder, CheckpointIndex(shapes, list(STATES), files))
    wanted = []
    for state in STATES:
        for i, n in enumerate(sizes):
            start = data.draw(st.integers(0, n - 1))
            wanted.append(Range(state, f"t{i}", start, np.empty(data.draw(st.integers(0, n - start)), np.float32)))
    sharded.read(wanted)
    for state, name, start, out in wanted:
        assert np.array_equal(out, arrays[state][name][start : start + len(out)])


def test_another_models_tensors_are_refused(tmp_path: Path) -> None:
    save_all(tmp_path, 1)
    sharded = ShardedTensors.open(tmp_path / "step-00000001")
    shapes = sharded.index.shapes
    sharded.check(shapes)
    for other, said in (
        ({**shapes, "head.bias": [4]}, r"head.bias has shape \[3\] there, \[4\] here"),
        ({**shapes, "more": [1]}, r"more has shape none there, \[1\] here"),
        ({n: s for n, s in shapes.items() if n != "head.bias"}, r"head.bias has shape \[3\] there, none here"),
    ):
        with pytest.raises(UserError, match=said):
            sharded.check(other)


@pytest.mark.parametrize("found", [0, 2])
def test_another_formats_checkpoint_is_refused(found: int, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"format": found, "step": 1}))
    with pytest.raises(UserError, match=f"has format {found}, .* init.weights="):
        read_state(tmp_path)


def test_a_checkpoint_in_a_folder_of_another_step_is_refused(tmp_path: Path) -> None:
    save_all(tmp_path, 7)
    folder = (tmp_path / "step-00000007").rename(tmp_path / "step-00000008")
    with pytest.raises(UserError, match="step = 7, in a folder of another step"):
        read_state(folder)


# -------------------------------------------------------------------- damage
def test_the_model_is_read_by_others_and_not_when_it_is_damaged(tmp_path: Path) -> None:
    save_all(tmp_path, 10)
    file = tmp_path / "step-00000010" / "model.safetensors"
    expected = tensors(10)["weights"]
    for found in (
        load_file(file),
        {n: t.numpy() for n, t in models.read_weights(tmp_path / "step-00000010")[1].items()},
    ):
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], array) for name, array in expected.items())
    flip(file, 8 * file.stat().st_size - 5)
    assert load_file(file).keys() == expected.keys(), "the file alone does not tell"
    with pytest.raises(
        UserError, match=r"model\.safetensors: damaged, its checksum is wrong. Use the previous checkpoint"
    ):
        models.read_weights(tmp_path / "step-00000010")


@pytest.mark.parametrize("name", ["rank-0001.t.bin", "index.json", "model.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "remove", "rename"])
def test_a_damaged_one_is_named_and_the_one_before_is_whole(name: str, damage: str, tmp_path: Path) -> None:
    for step in (10, 20):
        save_all(tmp_path, step)
    file = tmp_path / "step-00000020" / name
    if damage == "flip":
        flip(file)
    elif damage == "remove":
        file.unlink()
    elif damage == "rename":
        file.rename(file.with_name("other"))
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "cut" else file.read_bytes() + b"x")
    # Each rank looks at a share of the files, and one of them sees it.
    problems = [verify(file.parent, share, 3) for share in range(3)]
    said = [text for text in problems if text]
    assert len(said) == 1
    assert name in said[0]
    assert said[0] == verify(file.parent)
    assert newest_complete(tmp_path) == "step-00000010"


def test_no_flipped_bit_of_the_checksums_is_believed(tmp_path: Path) -> None:
    save_all(tmp_path, 10)
    path = tmp_path / "step-00000010"
    file = path / "checksums.json"
    good = file.read_bytes()
    for bit in range(0, 8 * len(good), 29):
        flip(file, bit)
        assert verify(path) is not None, bit
        file.write_bytes(good)
    for text in ("", "[]", "null", "{}", '{"a\\u0000b": 1}'):
        file.write_text(text)
        assert verify(path) is not None, text


# -------------------------------------------------------------------- which ones stay
@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_ones_do_not_push_out_whole_ones(keep: int, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_all(tmp_path, step, world_size=1, keep=3)
    for step in (20, 30):
        flip(tmp_path / f"step-{step:08d}" / "model.safetensors")
    # The next life goes on from 10, and commits at steps of its own.
    assert newest_complete(tmp_path) == "step-00000010"
    damaged = ["step-00000020", "step-00000030"]
    for step in (15, 25):
        save_all(tmp_path, step, world_size=1, keep=keep, damaged=damaged)
        assert newest_complete(tmp_path) == f"step-{step:08d}"
    whole = [path.name for path in Checkpoints(tmp_path).candidates() if verify(path) is None]
    assert whole == ["step-00000025", "step-00000015"][:keep]
    save_all(tmp_path, 35, world_size=1, keep=keep, damaged=damaged)
    assert [path.name for path in Checkpoints(tmp_path).candidates()] == ["step-00000035", "step-00000025"][:keep]


def test_kept_ones_and_the_best_stay_beside_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)

    def there() -> list[int]:
        return [int(path.name[5:]) for path in reversed(checkpoints.candidates())]

    for step, top1 in ((1, 0.3), (2, 0.6), (3, float("nan")), (4, 0.5), (5, 0.6), (6, 0.4)):
        save_all(tmp_path, step, world_size=1, keep=1, always=step == 1)
        assert checkpoints.keep_if_best(f"step-{step:08d}", "val_top1", top1) is (step in (1, 2))
    assert there() == [1, 2, 6]
    # A better one lets the one before go; a loss is better when it is lower; another metric begins anew.
    checkpoints.keep_if_best("step-00000006", "val_loss", 2.0, lower_is_better=True)
    assert not checkpoints.keep_if_best("step-00000007", "val_loss", 2.5, lower_is_better=True)
    save_all(tmp_path, 7, world_size=1, keep=1)
    assert there() == [1, 6, 7]
    assert checkpoints.keep_if_best("step-00000007", "val_loss", 1.5, lower_is_better=True)
    save_all(tmp_path, 8, world_size=1, keep=1)
    assert there() == [1, 7, 8]
    # Also the best one goes when it is damaged.
    save_all(tmp_path, 9, world_size=1, keep=1, damaged=["step-00000007"])
    assert there() == [1, 9]


# -------------------------------------------------------------------- several writers
def test_rank_0_waits_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late, memory = job(tmp_path, 10, 1, 2)
    first, memory_0 = job(tmp_path, 10, 0, 2)
    asked: list[int] = []
    monkeypatch.setattr(writer, "read_status", lambda *of: (asked.append(of[1]), store.read_status(*of))[1])
    thread = threading.Thread(target=save, args=(first, memory_0))
    thread.start()
    until(lambda: asked[:2] == [1, 1])
    assert Checkpoints(tmp_path).candidates() == []
    assert len(Checkpoints(tmp_path).unfinished()) == 1
    save(late, memory)
    thread.join()
    assert newest_complete(tmp_path) == "step-00000010"


def test_a_part_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    """Its writer was killed before it could say so, and rank 0's may be reading the part; or has committed it."""
    part, memory = job(tmp_path, 10, 1, 2)
    save(part, memory)
    (file,) = Checkpoints(tmp_path).begin(10, "t").glob("rank-0001*")
    before = file.stat().st_ino, file.stat().st_mtime_ns
    save(part, memory, again=True)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == before
    save(*job(tmp_path, 10, 0, 2))
    save(part, memory, again=True)
    assert names(tmp_path) == ["latest", "step-00000010"]
    assert newest_complete(tmp_path) == "step-00000010"


def test_a_part_that_never_comes_is_named_and_nothing_stays(tmp_path: Path) -> None:
    save_all(tmp_path, 10)
    with pytest.raises(CrashError, match="rank 1's part of the checkpoint of step 20 does not come"):
        save(*job(tmp_path, 20, 0, 2), give_up=0.2)
    assert names(tmp_path) == ["latest", "step-00000010"]


@pytest.mark.parametrize(
    ("number", "kind", "way_out"),
    [(errno.ENOSPC, UserError, "checkpoint.keep"), (errno.EIO, CrashError, "another folder")],
)
def test_the_error_of_one_is_the_error_of_all_and_nothing_stays(
    number: int, kind: type[Exception], way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a file server is a crash: a supervisor starts the run again, which it does not after a mistake of the
    user.
    """
    save_all(tmp_path, 10)
    fsync = os.fsync

    def fails(descriptor: int) -> None:
        if "rank-0001" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(writer.os, "fsync", fails)
    for rank in (1, 0):
        with pytest.raises(kind, match=f"{tmp_path}: .*{way_out}") as error:
            save(*job(tmp_path, 20, rank, 2))
        assert type(error.value) is kind
    assert "rank 1: " in str(error.value)
    assert names(tmp_path) == ["latest", "step-00000010"]


def test_a_checkpoint_is_read_again_while_the_file_server_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One EIO counted as damage: the run lost the steps since the checkpoint before, or was told to begin afresh."""
    save_all(tmp_path, 10)
    path, opened = tmp_path / "step-00000010", Path.open
    failures = {"checksums.json": 1, "state.json": 2}

    def fail(file: Path, *arguments: str, **named: str) -> IO[Any]:
        if failures.get(file.name, 0):
            failures[file.name] -= 1
            raise OSError(errno.ESTALE, "Stale file handle", str(file))
        return opened(file, *arguments, **named)

    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(Retry, "_pause", lambda *_: None)
    assert verify(path) is None
    assert set(failures.values()) == {0}
    failures["checksums.json"] = 1
    with pytest.raises(OSError, match="Stale"):  # Nor do readers of its weights take the one before.
        committed.newest_complete(tmp_path)
    failures["state.json"] = 10**6  # As on a disk with a bad sector.
    clock = itertools.count(step=100.0)
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
    assert verify(path) == "state.json cannot be read (Stale file handle)"
    failures["checksums.json"] = 10**6
    assert verify(path) == "checksums.json cannot be read (Stale file handle)"
    # Another host has removed it, as a run in training does: what is before it is the newest.
    monkeypatch.setattr(Path, "exists", lambda file: False)
    assert committed.newest_complete(tmp_path) is None


def test_a_stale_handle_of_a_writers_status_is_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced each second, and one stale handle ended the save of all ranks."""

    def fail(file: Path) -> bytes:
        raise OSError(number, "failed", str(file))

    monkeypatch.setattr(Path, "read_bytes", fail)
    number = errno.ESTALE
    assert read_status(tmp_path, 1, "token") == WriterStatus()
    number = errno.EACCES
    with pytest.raises(OSError, match="failed"):
        read_status(tmp_path, 1, "token")


def test_a_writer_of_an_earlier_life_changes_nothing(tmp_path: Path) -> None:
    """It comes late with its part, while the next life saves the same step."""
    save(*job(tmp_path, 10, 1, 2, token="old"))
    save(*job(tmp_path, 10, 1, 2, token="new"))
    save(*job(tmp_path, 10, 0, 2, token="new"))
    save(*job(tmp_path, 10, 2, 3, token="old"))
    assert newest_complete(tmp_path) == "step-00000010"
    Checkpoints(tmp_path).clean_up(print, silence=0.1)
    assert names(tmp_path) == ["latest", "step-00000010"]


# -------------------------------------------------------------------- what an earlier life left
def test_what_was_interrupted_goes_and_nothing_else(tmp_path: Path) -> None:
    save_all(tmp_path, 10)
    save(*job(tmp_path, 20, 1, 2))
    shutil.copytree(tmp_path / "step-00000010", tmp_path / ".removing-step-00000005")
    said: list[str] = []
    Checkpoints(tmp_path).clean_up(said.append, silence=0.1)
    assert names(tmp_path) == ["latest", "step-00000010"]
    assert said == []
    Checkpoints(tmp_path / "nowhere").clean_up(print)


def clock(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None] = time.sleep) -> list[float]:
    """What waits in a writer or for one goes by this clock."""
    now = [0.0]
    for module in (store, writer):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    return now


def test_what_goes_on_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Checkpoints(tmp_path).begin(20, "t")

    def work(seconds: float) -> None:
        now[0] += seconds
        write_status(path, 0, "t", WriterStatus(beat=int(now[0])))
        if now[0] > 2 * store.SILENCE_SECONDS:
            save(*job(tmp_path, 20))

    now = clock(monkeypatch, sleep=work)
    said: list[str] = []
    Checkpoints(tmp_path).clean_up(said.append)
    assert newest_complete(tmp_path) == "step-00000020"
    assert len(said) == 1
    assert "waiting" in said[0]


# -------------------------------------------------------------------- in a bucket
@pytest.mark.slow
def test_a_bucket_holds_checkpoints(s3: tuple[faulty_s3.S3, str]) -> None:
    server, url = s3
    folder = faulty_s3.bucket_path(f"{url}/runs/a")
    checkpoints = Checkpoints(folder)
    assert checkpoints.candidates() == []
    server.fail(faulty_s3.answer(503, "SlowDown"), "rank-0001", times=2)
    for step in (10, 20, 30):
        save_all(folder, step)
    assert [path.name for path in checkpoints.candidates()] == ["step-00000030", "step-00000020"]
    newest = checkpoints.candidates()[0]
    assert [verify(newest, share, 2) for share in range(2)] == [None, None]
    assert (folder / "latest").read_bytes() == b"step-00000030"
    assert not any("status" in path.name for path in newest.iterdir())
    found = ShardedTensors.open(newest).full_tensors("exp_avg")
    assert all(np.array_equal(found[name], array) for name, array in tensors(30)["exp_avg"].items())

    # One that was interrupted is none, and goes; a damaged one is refused, and replaced.
    save(*job(folder, 40, 1, 2))
    assert [path.name for path in checkpoints.candidates()] == ["step-00000030", "step-00000020"]
    checkpoints.clean_up(print, silence=0.1)
    assert checkpoints.unfinished() == []
    faulty_s3.put(newest / "model.safetensors", b"?")
    assert verify(newest) == "model.safetensors does not match its checksum"
    save_all(folder, 30, token="again", damaged=["step-00000030"])
    assert verify(newest) is None
    assert not (newest / "rank-0000.t.bin").exists()


@pytest.mark.slow
def test_an_outage_longer_than_the_patience_for_another_writer_loses_no_save(
    s3: tuple[faulty_s3.S3, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's writer cannot read meanwhile, so it did not hear silence; rank 1's needs a moment to reach the store
    again.
    """
    now = clock(monkeypatch)
    server, url = s3
    folder = faulty_s3.bucket_path(f"{url}/a")
    write_status(Checkpoints(folder).begin(10, "t"), 1, "t", WriterStatus(beat=1))
    work, memory = job(folder, 10, 0, 2, retry=300.0)
    failed: list[Exception] = []

    def save_first() -> None:
        try:
            save(work, memory)
        except (UserError, CrashError) as error:
            failed.append(error)

    thread = threading.Thread(target=save_first)
    thread.start()

    def asked(method: str) -> int:
        return sum(method in request and "status-0001" in request for request in server.requests)

    until(lambda: asked("GET") >= 2)  # It has read the other's status twice.
    server.fail(faulty_s3.answer(503, "SlowDown"), "status-0001")
    before = asked("HEAD")
    until(lambda: asked("HEAD") > before + 1)  # A read begins with a HEAD, which fails.
    now[0] += writer.GIVE_UP_SECONDS + 1
    server.reset()
    until(lambda: asked("GET") >= 2 or failed)  # The status is what it was, twice.
    save(*job(folder, 10, 1, 2))
    thread.join()
    assert not failed
    assert [path.name for path in Checkpoints(folder).candidates()] == ["step-00000010"]


def test_a_bucket_that_refuses_leaves_the_last_one(s3: tuple[faulty_s3.S3, str]) -> None:
    server, url = s3
    folder = faulty_s3.bucket_path(f"{url}/a")
    save_all(folder, 10)
    # The upload of the last object: no checkpoint before it.
    for method in ("PUT", "POST"):
        server.fail(faulty_s3.answer(403, "AccessDenied"), f"{method} /{url[5:]}/a/step-00000020/checksums.json")
    with pytest.raises(UserError, match=r"access denied. Check that the credentials"):
        save_all(folder, 20)
    server.reset()
    assert [path.name for path in Checkpoints(folder).candidates()] == ["step-00000010"]
    assert Checkpoints(folder).unfinished() == []


# -------------------------------------------------------------------- small files, and the order of things
def test_everything_is_flushed_before_it_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: set[str] = set()
    fsync, rename = os.fsync, os.rename

    def remember(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        # What is flushed under a temporary name: .state.json.tmp, .kept.json.tmp.
        folder, _, file = name.rpartition("/")
        flushed.add(f"{folder}/{'.'.join(file[1:].split('.')[:2])}" if file.endswith(".tmp") else name)
        fsync(descriptor)

    def check(source: Path, target: Path) -> None:
        everything = {str(p) for p in [source, *source.rglob("*")]}
        assert len(everything) == 7
        assert everything <= flushed, everything - flushed
        rename(source, target)

    monkeypatch.setattr(os, "fsync", remember)
    monkeypatch.setattr(os, "rename", check)
    save_all(tmp_path, 10)
    assert str(tmp_path) in flushed


# Each child is a fork that dies at its N-th call that touches the disk.
KILLS = """
import builtins, os, pickle, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import numpy as np
import saving
from saving import STATES, job, save_all
from pipeline.checkpoint import store, writer
from pipeline.checkpoint.store import Checkpoints, verify
from pipeline.checkpoint.writer import save
from pipeline.checkpoint.sharded_tensors import ShardedTensors

os.fsync = lambda descriptor: None  # Slow, and a SIGKILL loses nothing that was written.
writer.BEAT_SECONDS = 1e6

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
            return len(data)
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
        # The model is written in dozens of pieces, and no two of them are different to us.
        return Halves(stream) if "w" in mode and "model.safetensors" not in str(file) else stream
    builtins.open = opened

def check(folder, allowed):
    for path in Checkpoints(folder).candidates():
        step = int(path.name[5:])
        if step == DAMAGED:
            continue
        assert verify(path) is None, (path, verify(path))
        found = ShardedTensors.open(path).full_tensors("weights")
        assert all(np.array_equal(found[n], a) for n, a in tensors(step)["weights"].items())
    found = next(p for p in Checkpoints(folder).candidates() if verify(p) is None)
    assert int(found.name[5:]) in allowed, found
    return int(found.name[5:])

root, DAMAGED = Path(sys.argv[1]), int(sys.argv[2])
made = pickle.loads((root / "made").read_bytes())
tensors = saving.tensors = made["tensors"].get
saving.metadata = made["metadata"].get
damaged = [f"step-{DAMAGED:08d}"] if DAMAGED else []
save_all(root / "template", 10, keep=1)
if DAMAGED:
    saved = root / "saved"
    shutil.copytree(root / "template" / "step-00000010", saved)
    save_all(root / "template", DAMAGED, keep=1)
    shutil.copytree(saved, root / "template" / "step-00000010")
    (root / "template" / f"step-{DAMAGED:08d}" / "model.safetensors").write_bytes(b"?")
seen, last = set(), 0
while True:
    last += 1
    folder = root / f"run{last}"
    shutil.copytree(root / "template", folder)
    works = [job(folder, 20, rank, 2, keep=1, damaged=damaged, always=True) for rank in (1, 0)]
    child = os.fork()
    if not child:
        die_at(last)
        for work, memory in works:
            save(work, memory)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    for _, memory in works:
        os.close(memory)
    survived = status == 0
    assert survived or os.WTERMSIG(status) == signal.SIGKILL, status
    was_damaged, DAMAGED = DAMAGED, 0 if survived else DAMAGED
    seen.add(check(folder, {20} if survived else {10, 20}))
    DAMAGED = was_damaged
    # The next life: clean up, go on.
    Checkpoints(folder).clean_up(print, silence=0)
    if last % 4 == 0:
        save_all(folder, 30, keep=1, damaged=damaged if not survived else [])
        assert verify(folder / "step-00000030") is None
        left = {path.name for path in folder.iterdir()}
        assert left <= {"latest", "step-00000020", "step-00000030", "kept.json", ".kept.json.tmp"}, left
    shutil.rmtree(folder)
    if survived:
        break
assert seen == {10, 20}, seen
assert "torch" not in sys.modules, "every fork would take ten times as long"
print(last)
"""


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [0, 20])
def test_sigkill_at_every_write(damaged: int, tmp_path: Path) -> None:
    """damaged: the step of a damaged checkpoint that lies where the new one goes; 0 is none."""
    made = {what.__name__: {step: what(step) for step in (10, 20, 30)} for what in (tensors, metadata)}
    (tmp_path / "made").write_bytes(pickle.dumps(made))
    done = subprocess.run(
        [sys.executable, "-c", KILLS, tmp_path, str(damaged), ROOT / "tests/helpers"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60  # every call was reached
