"""A data set is what it was made of, to the byte, however often the job was killed."""

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset
from faulty_s3 import S3, bucket_path, put
from polling import until
from ranks import ROOT
from raw_images import LAYOUTS, contents, encoded, jpeg, noise, settings, write_class_tars, write_folder

from data_tools import progress
from data_tools.sharding import shard
from data_tools.sharding.write_shard import ShardingJob, write_shard
from data_tools.sources import list_source
from pipeline.base.errors import UserError
from pipeline.cluster import ray_tasks
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.storage.bucket import name_inside, walk_files
from pipeline.settings.commands.data import ShardConfig


def expected_key(name: str) -> str:
    return name.rpartition(".")[0].replace(".", "_")


def test_webdataset_reads_the_images_and_labels_that_went_in(dataset: Dataset, pictures: dict[str, bytes]) -> None:
    found = {}
    for split in dataset.splits:
        for sample in webdataset.WebDataset(dataset.split(split).shard_paths, shardshuffle=False):
            (image,) = (sample[ext] for ext in ("jpg", "png", "webp", "gif") if ext in sample)
            found[sample["__key__"]] = (image, int(sample["cls"]))
    classes = sorted({name.split("/")[0] for name in pictures})
    assert dataset.classes == classes
    assert found == {expected_key(name): (data, classes.index(name.split("/")[0])) for name, data in pictures.items()}


def test_extension_and_size_come_from_the_bytes(dataset: Dataset) -> None:
    rows = {row["key"]: row for row in pq.read_table(dataset.path / "samples.parquet").to_pylist()}
    assert rows["elk/really_a_png"]["ext"] == "png"
    assert rows["cat/grey"]["ext"] == rows["cat/cmyk"]["ext"] == "jpg"
    assert (rows["cat/one_pixel"]["width"], rows["cat/one_pixel"]["height"]) == (1, 1)
    assert (rows["dog/bits"]["width"], rows["dog/bits"]["height"]) == (20, 16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_shards(layout: str, dataset: Dataset, pictures: dict, tmp_path: Path) -> None:
    source = LAYOUTS[layout](pictures, tmp_path)
    other = shard.run(settings(source, tmp_path / "out", val_share=0.25))
    assert other.fingerprint == dataset.fingerprint
    assert other.info["source"]["sha256"] == dataset.info["source"]["sha256"]
    assert not list(other.path.glob(".*"))


def test_the_number_of_tasks_changes_no_byte(dataset: Dataset, source: Path, tmp_path: Path) -> None:
    other = shard.run(settings(source, tmp_path / "out", val_share=0.25, num_tasks=1))
    assert contents(other.path) == contents(dataset.path)


# Runs a command that is killed when it has counted five shards, while its tasks make others.
DIES = """
import os, runpy, signal, sys
import launch
from data_tools.progress import ProgressMeter

def add_and_die(meter, *arguments, **others):
    add(meter, *arguments, **others)
    if meter.shards == 5:
        os.kill(os.getpid(), signal.SIGKILL)

add, ProgressMeter.add = ProgressMeter.add, add_and_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_killed_job_goes_on_and_gives_the_same_bytes(ray_cluster: int, source: Path, tmp_path: Path, capfd) -> None:
    whole = shard.run(settings(source, tmp_path / "whole", samples_per_shard=1))
    out = tmp_path / "killed"
    command = [sys.executable, "-c", DIES, "launch/shard.py", f"source={source}", f"out={out}", "samples_per_shard=1"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    assert len(list(out.glob("*.tar"))) >= 5
    assert not (out / "dataset.json").exists()
    with pytest.raises(UserError, match=r"dataset\.json"):
        open_dataset(out)
    # What a kill in the middle of a shard leaves.
    (out / ".train-000000.tar.0123abcd.tmp").write_bytes(b"half")

    capfd.readouterr()
    again = shard.run(settings(source, out, samples_per_shard=1))
    assert "already complete: " in capfd.readouterr().out
    assert contents(again.path) == contents(whole.path)


def test_damaged_and_missing_shards_are_made_again(dataset: Dataset, source: Path, tmp_path: Path, capfd) -> None:
    out = Path(shutil.copytree(dataset.path, tmp_path / "copy"))
    flipped = bytearray((out / "train-000001.tar").read_bytes())
    flipped[1000] ^= 1
    (out / "train-000001.tar").write_bytes(flipped)
    (out / "val-000000.tar").unlink()
    with pytest.raises(UserError, match=r"val-000000.tar is missing"):
        open_dataset(out).split("val")
    shard.run(settings(source, out, val_share=0.25))
    assert "made 2 again" in capfd.readouterr().out
    assert contents(out) == contents(dataset.path)

    shard.run(settings(source, out, val_share=0.25))
    assert "nothing to do" in capfd.readouterr().out
    (out / "samples.parquet").write_bytes(b"PAR1")
    shard.run(settings(source, out, val_share=0.25))
    assert contents(out) == contents(dataset.path)


def test_other_settings_are_refused_and_all_of_them_named(dataset: Dataset, source: Path) -> None:
    before = contents(dataset.path)
    with pytest.raises(UserError, match=r"made with seed = 0, not 1; resize_short = 0, not 8\. Choose another out"):
        shard.run(settings(source, dataset.path, val_share=0.25, seed=1, resize_short=8))
    assert contents(dataset.path) == before


def test_another_source_is_refused_with_the_difference(dataset: Dataset, pictures: dict, tmp_path: Path) -> None:
    before = contents(dataset.path)
    changed = {name: data for name, data in pictures.items() if not name.startswith("cat/0")}
    changed |= {"cat/new.jpg": jpeg(77), "dog/00.jpg": jpeg(78, width=99)}
    with pytest.raises(UserError, match=r"2 came \(train/cat/new .*train/dog/00 .*11 went \(train/cat/00"):
        shard.run(settings(write_folder(changed, tmp_path / "changed"), dataset.path, val_share=0.25))
    assert contents(dataset.path) == before


def test_a_source_that_changes_while_a_job_is_stopped_is_refused(ray_cluster: int, tmp_path: Path) -> None:
    """Unless it is an image that could not be read, and keeps its size."""
    files = {**{f"cat/{i}.jpg": jpeg(i) for i in range(8)}, "dog/good.jpg": jpeg(9)}
    source, out = write_folder({**files, "dog/bad.jpg": bytes(len(jpeg(10)))}, tmp_path / "raw"), tmp_path / "out"
    how = {"samples_per_shard": 1, "seed": 4}  # With this seed, the last shard is that of the bad image.
    with pytest.raises(UserError, match="max_bad_share"):
        shard.run(settings(source, out, max_bad_share=0.0, **how))
    (source / "cat/3.jpg").unlink()
    with pytest.raises(UserError, match=r": 1 went \(train/cat/3"):
        shard.run(settings(source, out, max_bad_share=0.5, **how))
    write_folder({**files, "dog/bad.jpg": jpeg(10)}, source)
    assert shard.run(settings(source, out, max_bad_share=0.0, **how)).info["samples"] == {"train": 10}


def bmp(seed: int) -> bytes:
    """As long as every other."""
    return encoded(noise(seed), "BMP")


def tars(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if name.endswith(".tar")}


def test_images_that_change_and_keep_their_size_while_a_job_is_stopped(ray_cluster: int, tmp_path: Path, capfd) -> None:
    """Class folders are swapped, and swapped back, with the times of change that they had at the first start."""
    files = {f"{name}/{i}.bmp": bmp(10 * at + i) for at, name in enumerate(("cat", "dog")) for i in range(4)}
    files |= {"elk/1.bmp": bmp(30), "elk/2.bmp": bmp(30), "elk/3.bmp": bmp(31), "elk/bad.bmp": bytes(len(bmp(0)))}
    source, out = write_folder(files, tmp_path / "raw"), tmp_path / "out"
    how = {"samples_per_shard": 1, "seed": 9}  # With this seed, the last shard is that of the bad image.

    def start_and_stop() -> None:
        with pytest.raises(UserError, match="elk/bad"):
            shard.run(settings(source, out, max_bad_share=0.0, **how))

    def swap() -> None:
        for old, new in (("cat", "x"), ("dog", "cat"), ("x", "dog")):
            (source / old).rename(source / new)

    start_and_stop()
    swap()
    write_folder({"elk/2.bmp": bmp(32)}, source)
    start_and_stop()
    swap()
    write_folder({"elk/2.bmp": bmp(30)}, source)
    capfd.readouterr()
    made = shard.run(settings(source, out, max_bad_share=0.5, **how))
    assert "9 images changed (cat/0, " in capfd.readouterr().out
    fresh = shard.run(settings(source, tmp_path / "fresh", max_bad_share=0.5, **how))
    assert contents(made.path) == contents(fresh.path)
    shard.run(settings(source, out, max_bad_share=0.5, **how))
    assert contents(made.path) == contents(fresh.path)


def test_images_that_change_after_the_end_are_refused_and_a_copied_source_is_not(
    ray_cluster: int, tmp_path: Path
) -> None:
    files = {f"{name}/{i}.bmp": bmp(10 * at + i) for at, name in enumerate(("cat", "dog")) for i in range(4)}
    source, out = write_folder(files, tmp_path / "raw"), tmp_path / "out"
    before, edited = tars(shard.run(settings(source, out)).path), source / "cat/1.bmp"
    times = edited.stat()
    edited.write_bytes(bmp(99))
    for _ in range(2):
        with pytest.raises(UserError, match=r"1 image changed \(cat/1\)"):
            shard.run(settings(source, out))
        assert tars(out) == before
    os.utime(edited, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(UserError, match=r"1 image changed \(cat/1\)"):  # It was not compared with success since.
        shard.run(settings(source, out))
    edited.write_bytes(files["cat/1.bmp"])
    shard.run(settings(source, out))
    written = {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    copied = shutil.copytree(source, tmp_path / "copied", copy_function=shutil.copyfile)
    assert tars(shard.run(settings(copied, out)).path) == before
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.tar")} == written


def wait_for_state(folder: Path, **expected: object) -> dict:
    """What progress.json says once it says this; it is replaced by a thread, whatever the job is at."""
    states: list[dict] = []

    def is_so() -> bool:
        states.append(json.loads((folder / "progress.json").read_text()))
        return expected.items() <= states[-1].items()

    until(is_so)
    return states[-1]


def test_progress_goes_on_while_no_shard_ends_and_tells_checks_from_work(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_FILES", 0.01)
    with progress.ProgressMeter(1000, 10, tmp_path, "sharded") as job:
        job.add(600, 6_000_000, made=False)
        state = wait_for_state(tmp_path, images=600, shards=1, bytes=6_000_000)
        assert (state["images_per_second"], state["seconds_left"]) == (0, None)
        until(lambda: wait_for_state(tmp_path)["seconds"] > state["seconds"] + 0.8)
        job.add(100, 1_000_000)
        state = wait_for_state(tmp_path, images=700)
        assert state["seconds_left"] == pytest.approx(300 / state["images_per_second"])
        # 100 images since the check ended, not 700 since the start.
        assert 100 / state["seconds"] < state["images_per_second"] < 100 / 0.1
    assert list(tmp_path.iterdir()) == []


def test_held_out_images_never_move(dataset: Dataset, pictures: dict, tmp_path: Path) -> None:
    more = {**pictures, **{f"ant/{i}.jpg": jpeg(500 + i) for i in range(20)}}
    bigger = shard.run(settings(write_folder(more, tmp_path / "raw"), tmp_path / "out", val_share=0.25, seed=5))
    old, new = dataset.split("val"), bigger.split("val")
    old_keys = set(old.keys(range(len(old))))
    assert 0 < len(old_keys) < len(pictures) / 2
    assert {key for key in new.keys(range(len(new))) if not key.startswith("ant/")} == old_keys


BAD = {
    "cat/text.jpg": (b"this is no image at all", "no image"),
    "cat/cut.jpg": (jpeg(1, width=64, height=64)[:-300], "(?i)premature end"),
    "dog/cut.png": (encoded(noise(2), "PNG")[:-100], "truncated|broken"),
    "dog/empty.jpg": (b"", "empty file"),
}


def test_bad_images_are_skipped_named_and_counted(ray_cluster: int, pictures: dict, tmp_path: Path, capfd) -> None:
    source = write_folder({**pictures, **{name: data for name, (data, _) in BAD.items()}}, tmp_path / "raw")
    with pytest.raises(UserError, match=r"more than 1 of \d+: (cat|dog)/"):
        shard.run(settings(source, tmp_path / "out"))
    assert not (tmp_path / "out/dataset.json").exists()
    other = shard.run(settings(source, tmp_path / "out", max_bad_share=0.1))
    assert f"skipped {len(BAD)} bad images" in capfd.readouterr().out
    assert sum(other.info["samples"].values()) == len(pictures)
    header, *rows = (tmp_path / "out/skipped.csv").read_text().splitlines()
    assert header == "key,where,reason"
    for row, (name, (_, reason)) in zip(rows, sorted(BAD.items()), strict=True):
        key, where, why = row.split(",", 2)
        assert (key, where) == (expected_key(name), name)
        assert re.search(reason, why)


def test_a_shard_of_bad_images_only_is_left_out(ray_cluster, tmp_path: Path) -> None:
    source = write_folder({"cat/bad.jpg": b"text", "cat/good.jpg": jpeg(1), "dog/good.jpg": jpeg(2)}, tmp_path / "raw")
    dataset = shard.run(settings(source, tmp_path / "out", samples_per_shard=1, max_bad_share=0.5))
    assert dataset.info["shards"] == {"train": 2}
    assert len(dataset.split("train").shard_paths) == len(list(dataset.path.glob("*.tar"))) == 2
    assert shard.run(settings(source, tmp_path / "out", samples_per_shard=1)).fingerprint == dataset.fingerprint


def test_no_image_of_a_split_is_no_data_set(ray_cluster, tmp_path: Path) -> None:
    files = {"train/cat/1.jpg": jpeg(1), "val/cat/2.jpg": b"text", "val/cat/3.jpg": b""}
    splits = {"train": "train", "val": "val"}
    config = settings(write_folder(files, tmp_path / "raw"), tmp_path / "out", splits=splits, max_bad_share=1.0)
    with pytest.raises(UserError, match=r"no image of split 'val' can be used: val/cat/2.jpg \(.*; val/cat/3.jpg \("):
        shard.run(config)
    assert not (tmp_path / "out/dataset.json").exists()


def test_resize_makes_large_images_small_and_copies_the_others(ray_cluster, tmp_path: Path) -> None:
    exif = noise(1).getexif()
    exif[0x0112] = 6  # rotated by a quarter
    small = jpeg(3, width=40, height=32)
    files = {
        "cat/wide.png": encoded(noise(2, width=100, height=64), "PNG"),
        "cat/rotated.jpg": encoded(noise(4, width=100, height=64), "JPEG", exif=exif),
        "dog/small.jpg": small,
        "dog/cut.jpg": jpeg(5, width=100, height=64)[:-50],
        "dog/small_cut.jpg": small[:-50],
    }
    config = settings(write_folder(files, tmp_path / "raw"), tmp_path / "out", resize_short=32, max_bad_share=0.4)
    dataset = shard.run(config)
    skipped = (dataset.path / "skipped.csv").read_text()
    assert all(name in skipped for name in ("dog/cut.jpg", "dog/small_cut.jpg"))
    rows = {row["key"]: row for row in pq.read_table(dataset.path / "samples.parquet").to_pylist()}
    assert {key: (row["ext"], row["width"], row["height"]) for key, row in rows.items()} == {
        "cat/wide": ("jpg", 50, 32),
        "cat/rotated": ("jpg", 32, 50),
        "dog/small": ("jpg", 40, 32),
    }
    assert rows["dog/small"]["size"] == len(small)


def test_errors_of_tasks_come_back_as_they_were(ray_cluster: int) -> None:
    def fail(where: str) -> None:
        if where == "here":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "train-000000.tar")
        raise UserError("repair it")

    with pytest.raises(OSError, match="No space left") as full:
        list(ray_tasks.run_tasks(fail, ["here"], print, limit=1))
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, "train-000000.tar")
    with pytest.raises(UserError, match=r"^repair it$"):
        list(ray_tasks.run_tasks(fail, ["there"], print, limit=1))


def test_tasks_in_flight_are_bounded_however_many_there_are(ray_cluster: int) -> None:
    taken: list[int] = []
    results: dict[int, int] = {}
    endless = (taken.append(i) or i for i in itertools.count())
    with contextlib.closing(ray_tasks.run_tasks(lambda i: i * i, endless, print, limit=3)) as tasks:
        for number, result in itertools.islice(tasks, 20):
            results[number] = result
            assert len(taken) - len(results) <= 3
    assert results == {i: i * i for i in results}


def test_a_dead_worker_or_machine_costs_its_task_which_is_run_again(ray_cluster: int, tmp_path: Path) -> None:
    def fails_once(number: int) -> int:
        mark = tmp_path / str(number)
        if number % 2 and not mark.exists():
            mark.touch()
            if number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ray_tasks.LostError("1.jpg cannot be read: Input/output error.")
        return number

    told: list[str] = []
    assert sorted(ray_tasks.run_tasks(fails_once, range(4), told.append, limit=2)) == [(i, i) for i in range(4)]
    assert len(told) == 2
    assert any("died" in reason for reason in told)
    assert "1.jpg cannot be read: Input/output error." in told


def test_sharding_from_bucket_to_bucket_gives_the_same_bytes(
    dataset: Dataset, pictures: dict, tmp_path: Path, s3: tuple[S3, str], capfd: pytest.CaptureFixture[str]
) -> None:
    url = s3[1]
    for path in write_class_tars(pictures, tmp_path / "tars").iterdir():
        put(bucket_path(f"{url}/raw/{path.name}"), path.read_bytes())
    config = ShardConfig(source=f"{url}/raw", out=f"{url}/out", samples_per_shard=8, val_share=0.25)
    other = shard.run(config)
    assert other.fingerprint == dataset.fingerprint
    found = {name_inside(path, bucket_path(f"{url}/out")): path.read_bytes() for path, *_ in walk_files(other.path)}
    assert {name: data for name, data in found.items() if name.endswith(".tar")} == {
        name: data for name, data in contents(dataset.path).items() if name.endswith(".tar")
    }
    assert not [name for name in found if name.startswith(".")]
    rows = ShardReader(other.split("val")), ShardReader(dataset.split("val"))
    assert all(rows[0].read(row) == rows[1].read(row) for row in range(len(dataset.split("val"))))

    bucket_path(f"{url}/out/val-000000.tar").unlink()
    capfd.readouterr()
    shard.run(config)
    assert "made 1 again" in capfd.readouterr().out
    assert bucket_path(f"{url}/out/val-000000.tar").read_bytes() == found["val-000000.tar"]


def test_a_shard_uploaded_before_a_kill_is_not_read_again(
    source: Path, tmp_path: Path, s3: tuple[S3, str], pictures: dict
) -> None:
    server, url = s3
    config = ShardConfig(source=str(source), out=url)
    listing = list_source(source, config, tmp_path)
    job = ShardingJob(str(source), url, "train-000000.tar", "train", listing.images(np.arange(5)), config, None)
    first = write_shard(job)
    server.reset()
    again = write_shard(job)
    assert (again.shard, again.made, first.made) == (first.shard, False, True)
    assert not [request for request in server.requests if request.startswith("GET") and ".tar" in request]
    put(bucket_path(f"{url}/train-000000.tar"), bytes(first.shard.bytes))
    assert write_shard(job).made
