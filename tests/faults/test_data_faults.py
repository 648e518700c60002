"""What goes wrong with data on disk: each fault is found and named, is counted, and costs nothing that was whole."""

import errno
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_s3 import S3, bucket_path
from ranks import ROOT
from raw_images import jpeg
from tiny import train_view

from data_tools.check import verify
from data_tools.sharding import shard
from pipeline.base.errors import UserError
from pipeline.base.words import si
from pipeline.data.dataset.exclusion import read_lists
from pipeline.data.dataset.manifest import SAMPLES_FILE, Dataset, open_dataset, sign_tables
from pipeline.data.loading.loader import Batch, Loader
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.retry import Retry, StorageError
from pipeline.settings.command import mistakes_in_one_line
from pipeline.settings.commands.data import ShardConfig, VerifyConfig
from pipeline.settings.run import AugmentConfig

pytestmark = pytest.mark.usefixtures("ray_cluster")

SHARD = "train-000001.tar"  # rows 40 to 79 of 150


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Dataset:
    """A data set to damage: 150 training images in 4 shards, 37 validation images in one."""
    return open_dataset(shutil.copytree(dataset, tmp_path / "data"))


def check(data: AnyPath, **settings: object) -> dict:
    return verify.run(VerifyConfig(data=str(data), **settings))


def listed(dataset: Dataset) -> list[tuple[str, int]]:
    lists = read_lists(open_dataset(dataset.path))
    rows = lists["damaged"].to_pylist() if "damaged" in lists else []
    return [(row["split"], row["row"]) for row in rows]


def kinds(report: dict) -> dict[str, int]:
    return {kind: of_kind["count"] for kind, of_kind in report["kinds"].items()}


def overwrite(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def rewrite_rows(dataset: Dataset, change: Callable[[list[dict]], None]) -> None:
    """Change rows of samples.parquet, and its checksum with them, as a tool that wrote it wrongly would have."""
    path = dataset.path / SAMPLES_FILE
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path, row_group_size=150)
    info = json.loads((dataset.path / "dataset.json").read_text())
    info["files"] = sign_tables(dataset.path)
    info.pop("checksum", None)
    (dataset.path / "dataset.json").write_text(json.dumps(info))


def test_a_whole_data_set_is_whole(copy: Dataset, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in copy.path.iterdir() if path.is_file()}
    report = check(copy.path)
    assert report["is_whole"]
    assert (report["shards"], report["samples"], report["kinds"]) == (5, 187, {})
    assert report["bytes"] == sum(len(data) for name, data in before.items() if name.endswith(".tar"))
    assert f": intact. read 5 shards, 187 images, {si(report['bytes'], 'B')};" in capfd.readouterr().out
    shutil.rmtree(copy.path / "verify")
    assert {path.name: path.read_bytes() for path in copy.path.iterdir() if path.is_file()} == before


def truncate(data: Dataset) -> None:
    os.truncate(data.path / SHARD, int(data.split("train").index.offsets[70]) + 10)


def overwrite_header(content: bytes) -> Callable[[Dataset], None]:
    """Of the image of row 60, and what follows."""
    return lambda data: overwrite(data.path / SHARD, data.split("train").place_of(60)[0] - 512, content)


def remove(data: Dataset) -> None:
    (data.path / SHARD).unlink()
    (data.path / "val-000000.tar").unlink()


# What is done, what is found, and which rows of train are unfit.
DAMAGE: dict[str, tuple[Callable[[Dataset], None], dict[str, int], list[int]]] = {
    "truncated": (truncate, {"size": 1, "lost": 10}, [*range(70, 80)]),
    "zeros": (overwrite_header(bytes(1500)), {"checksum": 1, "content": 1}, [60]),
    "header": (overwrite_header(b"\xa5" * 300), {"checksum": 1}, []),
    "gone": (remove, {"missing": 2, "lost": 77}, [*range(40, 80)]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_costs_what_it_covers(name: str, copy: Dataset) -> None:
    damage, expected, unfit = DAMAGE[name]
    damage(copy)
    assert kinds(check(copy.path)) == expected
    assert [row for split, row in listed(copy) if split == "train"] == unfit


def test_a_manifest_that_disagrees_with_its_tar(copy: Dataset) -> None:
    def change(rows: list[dict]) -> None:
        rows[3]["offset"] += 512
        rows[5]["size"] -= 1
        rows[11]["xxh128"] = b"\0" * 16
        rows[15]["offset"] = 10**12
        rows[149]["labels"] = [4]

    rewrite_rows(copy, change)
    assert kinds(check(copy.path)) == {"content": 3, "lost": 1, "label range": 1}
    assert listed(copy) == [("train", row) for row in (3, 5, 11, 15, 149)]


def test_an_index_that_is_not_what_training_should_read(
    copy: Dataset, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = copy.split("train").label_values.tolist()
    (folder,) = copy.path.glob("index/train-*")
    overwrite(folder / "labels", 8, b"\x03")

    def kill(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(verify, "write_files", kill)
    with pytest.raises(RuntimeError, match="killed"):
        check(copy.path)
    monkeypatch.undo()
    assert kinds(check(copy.path)) == {"manifest": 1}, "a check that was killed has hidden the damage"
    assert "it was removed, and is made again" in capfd.readouterr().out
    assert check(copy.path)["is_whole"]
    assert open_dataset(copy.path).split("train").label_values.tolist() == expected


def test_damaged_tables(copy: Dataset) -> None:
    overwrite(copy.path / SHARD, copy.split("train").place_of(45)[0], b"\0" * 9)
    check(copy.path)
    overwrite(copy.path / SAMPLES_FILE, 100, b"\xff" * 300)
    report = check(copy.path)
    assert kinds(report) == {"manifest": 1, "checksum": 1}
    assert {kind: of_kind["shards"] for kind, of_kind in report["kinds"].items()} == {"manifest": 0, "checksum": 1}
    # What cannot be judged now keeps the judgement that it has.
    assert listed(copy) == [("train", 45)]


def test_a_killed_check_leaves_no_report(copy: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the report, damage.csv and the list would be taken for those of the same check."""

    def kill(*_: object) -> None:
        raise RuntimeError("killed")

    assert check(copy.path)["is_whole"]
    overwrite(copy.path / SHARD, copy.split("train").place_of(50)[0], b"\0" * 9)
    monkeypatch.setattr(verify, "_write_list", kill)
    with pytest.raises(RuntimeError, match="killed"):
        check(copy.path)
    monkeypatch.undo()
    assert not (copy.path / "verify" / "report.json").exists()
    unfinished = [copy.path / f"{name}.12345678.tmp" for name in ("verify/.damage.csv", "exclude/.damaged.parquet")]
    for path in unfinished:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    assert not check(copy.path)["is_whole"]
    assert not any(path.exists() for path in unfinished)
    assert listed(copy) == [("train", 50)]
    assert json.loads((copy.path / "verify" / "report.json").read_text())["unfit_samples"] == 1


def test_exit_codes(
    copy: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def exit_code(data: Path) -> int:
        monkeypatch.setattr(sys, "argv", ["launch/verify.py", f"data={data}", f"out={tmp_path / 'report'}"])
        try:
            runpy.run_path(str(ROOT / "launch" / "verify.py"), run_name="__main__")
        except SystemExit as stop:
            return stop.code
        return 0

    assert exit_code(copy.path) == 0
    overwrite(copy.path / SHARD, 600, b"\0")
    assert exit_code(copy.path) == 1
    assert "DAMAGED" in capfd.readouterr().out
    rows = (tmp_path / "report/damage.csv").read_text().splitlines()
    assert rows[0] == "kind,split,shard,row,key,detail,is_unfit"
    assert [row.split(",")[0] for row in rows[1:]] == ["checksum", "content"]
    assert exit_code(tmp_path / "nowhere") == 2


# ------------------------------------------------------------------------------ while a run trains


def loader(dataset: Dataset, max_bad_share: float) -> Loader:
    return Loader(dataset.split("train"), train_view(AugmentConfig(), 0, 16), 2, 1, max_bad_share)


def read_all(of: Loader) -> list[Batch]:
    return list(of.batches((rows, np.zeros(len(rows), np.int64)) for rows in np.arange(150).reshape(15, 10)))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda path: path.write_bytes(b"\x07" * path.stat().st_size), "not those of the manifest"),
        (lambda path: path.write_bytes(b""), "ends before byte"),
    ],
    ids=["replaced", "emptied"],
)
def test_a_shard_that_goes_while_a_run_trains(fault: Callable[[Path], None], reason: str, copy: Dataset) -> None:
    with loader(copy, max_bad_share=0.3) as patient, loader(copy, max_bad_share=0.01) as strict:
        fault(copy.path / SHARD)  # after both have looked at it
        batches = read_all(patient)
        assert sorted(patient.bad) == list(range(40, 80))
        assert np.flatnonzero(np.concatenate([~batch.valid.numpy() for batch in batches])).tolist() == [*range(40, 80)]
        with pytest.raises(
            UserError, match=r"samples of 150 cannot be read, more than data.max_bad_share = 0.01 .* train000\d\d: "
        ) as error:
            read_all(strict)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda path: path.unlink(), "No such file or directory"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),  # pread() fails, as on a broken disk
    ],
    ids=["deleted", "unreadable"],
)
def test_a_shard_that_cannot_be_read_is_no_bad_image(fault: Callable[[Path], None], reason: str, copy: Dataset) -> None:
    with loader(copy, max_bad_share=1.0) as patient:
        fault(copy.path / SHARD)
        said = rf"{SHARD} cannot be read: {reason}"
        with pytest.raises(StorageError, match=said):
            read_all(patient)
        assert not patient.bad


def test_a_shard_of_a_file_server_that_fails_for_a_moment_is_read_again(
    copy: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One EIO, or a handle that the server no longer knows, ended a run for good."""
    split = copy.split("train")
    reader, retry = ShardReader(split), split.storage.retry
    expected = reader.read(0)
    open_shard, pread = ShardReader._open, os.pread
    opened, failures = list[int](), [errno.EIO, errno.ESTALE]

    def count(reader: ShardReader, shard: int) -> object:
        opened.append(shard)
        return open_shard(reader, shard)

    def fail(*place: int) -> bytes:
        if failures:
            raise OSError(failures.pop(), "failed")
        return pread(*place)

    monkeypatch.setattr(ShardReader, "_open", count)
    monkeypatch.setattr(os, "pread", fail)
    monkeypatch.setattr(Retry, "_pause", lambda *_: None)
    assert reader.read(0) == expected
    assert (len(opened), retry.retries) == (2, 2)

    # What is found then is as before: a truncated shard is read once, and costs its images.
    failures.append(errno.EIO)
    os.truncate(split.shard_paths[split.shard_of(0)], 10)
    with pytest.raises(OSError, match="ends before byte") as error:
        reader.read(0)
    assert error.value.errno is None
    assert retry.retries == 3
    retry.seconds = 0
    failures.extend([errno.EIO] * 9)
    with pytest.raises(StorageError, match=r"cannot be read: failed"):
        reader.read(0)


# ------------------------------------------------------------------------------ while images are sharded


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """20 images each of cat and dog."""
    for number in range(40):
        folder = tmp_path / "raw" / ("cat" if number < 20 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02d}.jpg").write_bytes(jpeg(number))
    return tmp_path / "raw"


def settings(source: Path, out: AnyPath, **others: object) -> ShardConfig:
    return ShardConfig(source=str(source), out=str(out), **{"samples_per_shard": 8, **others})


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_damage_that_is_found_is_repaired_and_found_no_more(
    place: str, source: Path, tmp_path: Path, s3: tuple[S3, str]
) -> None:
    """launch/verify.py, launch/shard.py as before, launch/verify.py: all the way round."""
    out = tmp_path / "out" if place == "disk" else bucket_path(f"{s3[1]}/out")
    whole = shard.run(settings(source, out))
    content = (out / SHARD).read_bytes()
    offset, size = whole.split("train").place_of(11)
    with replacing(out / SHARD) as file:
        file.write(content[:offset] + bytes(size) + content[offset + size :])
    (out / "train-000003.tar").unlink()
    damaged = check(out)
    assert kinds(damaged) == {"checksum": 1, "content": 1, "missing": 1, "lost": 8}
    assert listed(whole) == [("train", row) for row in (11, *range(24, 32))]
    assert len(open_dataset(out).split("train")) == 31

    again = shard.run(settings(source, out))
    assert again.fingerprint == whole.fingerprint
    assert (out / SHARD).read_bytes() == content
    # The list holds until somebody looks again.
    assert len(again.split("train")) == 31
    assert check(out)["is_whole"]
    assert listed(again) == []
    assert len(again.split("train")) == 40
    assert not (out / "verify" / "damage.csv").exists()


def test_a_source_file_that_vanishes(source: Path, tmp_path: Path) -> None:
    def list_and_then_it_goes(*arguments: Any) -> Any:
        listing = shard.list_source(*arguments)
        (source / "dog" / "33.jpg").unlink()
        return listing

    dataset = shard.run(settings(source, tmp_path / "out"), list_and_then_it_goes)
    assert dataset.info["samples"] == {"train": 39}
    (row,) = (tmp_path / "out" / "skipped.csv").read_text().splitlines()[1:]
    assert row.startswith("dog/33,dog/33.jpg,")
    assert "No such file" in row


def test_a_disk_that_fills(
    source: Path, tmp_path: Path, small_disk: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = shard.run(settings(source, tmp_path / "whole")), small_disk("100k") / "out"
    with pytest.raises(SystemExit) as stop, mistakes_in_one_line():
        shard.run(settings(source, out))
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: No space left for {out}/")
    assert not (out / "dataset.json").exists()
    assert not list(out.rglob(".*.tmp")), "nothing half-written stays"
    finished = {path.name: path.read_bytes() for path in out.glob("*.tar")}
    assert finished, "shards that were whole before the disk was full stay"
    assert all(data == (whole.path / name).read_bytes() for name, data in finished.items())
    subprocess.run(["mount", "-o", "remount,size=10m", out.parent], check=True)
    assert shard.run(settings(source, out)).fingerprint == whole.fingerprint
    assert "already complete: " in capsys.readouterr().out
