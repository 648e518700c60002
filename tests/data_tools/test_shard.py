"""A data set is what it was made of, to the byte, however often the job was killed."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset
from faulty_s3 import S3, bucket_path, put
from raw_images import LAYOUTS, contents, encoded, jpeg, noise, settings, write_class_tars, write_folder

from data_tools import cluster, shard
from data_tools.sources import list_source
from data_tools.write_shard import Job, write_shard
from pipeline.config import ShardConfig
from pipeline.data.bucket import name_inside, walk_files
from pipeline.data.manifest import Dataset, open_dataset
from pipeline.data.storage import ShardReader
from pipeline.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


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


def test_bytes_at_the_manifest_s_offset_are_the_image(dataset: Dataset, pictures: dict[str, bytes]) -> None:
    by_key = {expected_key(name): data for name, data in pictures.items()}
    for name in dataset.splits:
        split = dataset.split(name)
        shards = split.shard_of(np.arange(len(split)))
        for row, key in enumerate(split.keys(range(len(split)))):
            with open(split.shard_paths[shards[row]], "rb") as file:
                file.seek(split.offsets[row])
                assert file.read(split.sizes[row]) == by_key[key]


def test_extension_and_size_come_from_the_bytes(dataset: Dataset) -> None:
    rows = {row["key"]: row for row in pq.read_table(dataset.path / "samples.parquet").to_pylist()}
    assert rows["elk/really_a_png"]["ext"] == "png"
    assert rows["cat/grey"]["ext"] == rows["cat/cmyk"]["ext"] == "jpg"
    assert (rows["cat/one_pixel"]["width"], rows["cat/one_pixel"]["height"]) == (1, 1)
    assert (rows["dog/grey16"]["width"], rows["dog/grey16"]["height"]) == (20, 16)


def test_samples_are_mixed_across_classes(dataset: Dataset) -> None:
    split = dataset.split("train")
    for start, end in zip(split.shard_starts[:-2], split.shard_starts[1:-1], strict=True):
        assert len(set(split.label_values[start:end])) > 1


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


def test_killed_job_goes_on_and_gives_the_same_bytes(ray_cluster: int, source: Path, tmp_path: Path, capfd) -> None:
    whole = shard.run(settings(source, tmp_path / "whole", samples_per_shard=1))
    out = tmp_path / "killed"
    command = [sys.executable, "launch/shard.py", f"source={source}", f"out={out}", "samples_per_shard=1"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    while len(list(out.glob("*.tar"))) < 5:
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "dataset.json").exists()
    with pytest.raises(UserError, match="no finished data set"):
        open_dataset(out)
    # What a kill in the middle of a shard leaves.
    (out / ".train-000000.tar.0123abcd.tmp").write_bytes(b"half")

    capfd.readouterr()
    again = shard.run(settings(source, out, samples_per_shard=1))
    assert " shards were whole already" in capfd.readouterr().out
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


def test_damaged_manifest_is_made_again(dataset: Dataset, source: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(dataset.path, tmp_path / "copy"))
    (out / "samples.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"samples.parquet is damaged"):
        open_dataset(out).split("train")
    shard.run(settings(source, out, val_share=0.25))
    assert contents(out) == contents(dataset.path)


def test_another_seed_or_source_is_refused(dataset: Dataset, source: Path, pictures: dict, tmp_path: Path) -> None:
    before = contents(dataset.path)
    with pytest.raises(UserError, match="made with seed = 0, not 1"):
        shard.run(settings(source, dataset.path, val_share=0.25, seed=1))
    other = write_folder({**pictures, "cat/new.jpg": jpeg(77)}, tmp_path / "raw")
    with pytest.raises(UserError, match=f"was made of {len(pictures)} images .* has {len(pictures) + 1}"):
        shard.run(settings(other, dataset.path, val_share=0.25))
    assert contents(dataset.path) == before


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
    other = shard.run(settings(source, tmp_path / "out", max_bad_share=0.1))
    assert f"skipped {len(BAD)} bad images" in capfd.readouterr().out
    assert sum(other.info["samples"].values()) == len(pictures)
    header, *rows = (tmp_path / "out/skipped.csv").read_text().splitlines()
    assert header == "key,where,reason"
    for row, (name, (_, reason)) in zip(rows, sorted(BAD.items()), strict=True):
        key, where, why = row.split(",", 2)
        assert (key, where) == (expected_key(name), name)
        assert re.search(reason, why)


def test_more_bad_images_than_the_budget_stop_the_job(ray_cluster, pictures: dict, tmp_path: Path) -> None:
    source = write_folder({**pictures, **{name: data for name, (data, _) in BAD.items()}}, tmp_path / "raw")
    with pytest.raises(UserError, match=r"more than the 1 that max_bad_share = 0.001 allows of \d+: (cat|dog)/"):
        shard.run(settings(source, tmp_path / "out"))
    assert not (tmp_path / "out/dataset.json").exists()
    # And the way out that the message names.
    shard.run(settings(source, tmp_path / "out", max_bad_share=0.1))


def test_a_shard_of_bad_images_only_is_left_out(ray_cluster, tmp_path: Path) -> None:
    source = write_folder({"cat/bad.jpg": b"text", "cat/good.jpg": jpeg(1), "dog/good.jpg": jpeg(2)}, tmp_path / "raw")
    dataset = shard.run(settings(source, tmp_path / "out", samples_per_shard=1, max_bad_share=0.5))
    assert dataset.info["shards"] == {"train": 2}
    assert len(dataset.split("train").shard_paths) == len(list(dataset.path.glob("*.tar"))) == 2
    assert shard.run(settings(source, tmp_path / "out", samples_per_shard=1)).fingerprint == dataset.fingerprint


def test_resize_makes_large_images_small_and_copies_the_others(ray_cluster, tmp_path: Path) -> None:
    exif = noise(1).getexif()
    exif[0x0112] = 6  # rotated by a quarter
    small = jpeg(3, width=40, height=32)
    files = {
        "cat/wide.png": encoded(noise(2, width=100, height=64), "PNG"),
        "cat/rotated.jpg": encoded(noise(4, width=100, height=64), "JPEG", exif=exif),
        "dog/small.jpg": small,
    }
    dataset = shard.run(settings(write_folder(files, tmp_path / "raw"), tmp_path / "out", resize_short=32))
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
        raise UserError("mend it")

    with pytest.raises(OSError, match="No space left") as full:
        list(cluster.run_tasks(fail, ["here"], limit=1))
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, "train-000000.tar")
    with pytest.raises(UserError, match=r"^mend it$"):
        list(cluster.run_tasks(fail, ["there"], limit=1))


def test_tasks_in_flight_are_bounded(ray_cluster: int) -> None:
    taken: list[int] = []
    results: dict[int, int] = {}
    for number, result in cluster.run_tasks(lambda i: i * i, (taken.append(i) or i for i in range(20)), limit=3):
        results[number] = result
        assert len(taken) - len(results) <= 3
    assert results == {i: i * i for i in range(20)}


def test_sharding_from_bucket_to_bucket_gives_the_same_bytes(
    dataset: Dataset, pictures: dict, tmp_path: Path, s3: tuple[S3, str], capfd: pytest.CaptureFixture[str]
) -> None:
    url = s3[1]
    for path in write_class_tars(pictures, tmp_path / "tars").iterdir():
        put(bucket_path(f"{url}/raw/{path.name}"), path.read_bytes())
    config = ShardConfig(source=f"{url}/raw", out=f"{url}/out", samples_per_shard=8, val_share=0.25)
    other = shard.run(config)
    assert other.fingerprint == dataset.fingerprint
    found = {name_inside(path, bucket_path(f"{url}/out")): path.read_bytes() for path, _ in walk_files(other.path)}
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
    listing = list_source(source, "auto", {"train": ""}, tmp_path)
    job = Job(str(source), url, "train-000000.tar", "train", listing.rows(np.arange(5)), 0, 95, True, None)
    first = write_shard(job)
    server.reset()
    again = write_shard(job)
    assert (again.shard, again.made, first.made) == (first.shard, False, True)
    assert not [request for request in server.requests if request.startswith("GET") and ".tar" in request]
    put(bucket_path(f"{url}/train-000000.tar"), bytes(first.shard.bytes))
    assert write_shard(job).made
