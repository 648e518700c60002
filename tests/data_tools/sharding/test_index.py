"""Shards of others get a manifest where they lie; nothing of theirs changes."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from heic_files import HEIC
from raw_images import contents, encoded, jpeg, noise, write_tar

from data_tools.check import verify
from data_tools.dedup.thumbnails import compared_split
from data_tools.sharding.index import IndexJob, index_tar, run
from data_tools.sharding.write_shard import read_rows
from pipeline.base.errors import UserError
from pipeline.cluster.ray_tasks import LostError
from pipeline.data.dataset.exclusion import EXCLUDED, write_list
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.settings.commands.data import IndexConfig, VerifyConfig

SPLITS = {"train": "", "val": "val-"}


def tars(at: Path) -> Path:
    (at / "more").mkdir(parents=True)
    for shard_name, first in (("train-0", 0), ("more/train-1", 3), ("val-0", 6)):
        members: dict[str, bytes] = {}
        for i in range(first, first + 3):
            labels = {f"{i}.json": b'{"labels": [2, 1]}'} if i % 3 == 1 else {f"{i}.cls": str(i % 3).encode()}
            members |= {f"{i}.jpg": jpeg(i), **labels}
        write_tar(members, at / f"{shard_name}.tar")
    return at


def config(source: Path, out: Path | str = "", **others: object) -> IndexConfig:
    made = IndexConfig(source=str(source), out=str(out), **{"splits": SPLITS, **others})
    made.check()
    return made


def check(dataset: Dataset) -> None:
    found = {}
    for name in dataset.splits:
        split = dataset.split(name)
        reader = ShardReader(split)
        for row, key in enumerate(split.keys(range(len(split)))):
            found[key] = (name, split.labels_of(row).tolist(), reader.read(row))
        reader.close()
    assert found == {
        str(i): ("val" if i > 5 else "train", [1, 2] if i % 3 == 1 else [i % 3], jpeg(i)) for i in range(9)
    }


def test_beside_the_tars_and_elsewhere(ray_cluster: int, tmp_path: Path) -> None:
    source = tars(tmp_path / "tars")
    before = contents(source)
    here = run(config(source))
    assert here.path == source
    assert contents(source) | before == contents(source)
    new = {name.split("/")[0] for name in set(contents(source)) - set(before)}
    assert new == {"dataset.json", "samples.parquet", "samples.chunks", "shards.parquet", "index"}
    check(here)
    (tmp_path / "names.txt").write_text("a\nb\nc\n")
    for name in ("dataset.json", "samples.parquet", "samples.chunks", "shards.parquet"):
        (source / name).unlink()
    shutil.rmtree(source / "index")
    there = run(config(source, tmp_path / "there", label_names=str(tmp_path / "names.txt")))
    assert not list(there.path.glob("*.tar"))
    assert there.classes == ["a", "b", "c"]
    assert contents(source) == before
    check(there)
    with pytest.raises(UserError, match=r"there has a manifest.*launch/verify\.py"):
        run(config(source, tmp_path / "there"))

    # The manifest of what we wrote ourselves has the fingerprint it had, wherever it is.
    moved = run(config(source, tmp_path / "moved/far/away", label_names=str(tmp_path / "names.txt")))
    assert moved.fingerprint == there.fingerprint


def test_a_damaged_tar_is_named_and_a_part_is_taken_again(ray_cluster: int, tmp_path: Path) -> None:
    source = tars(tmp_path / "tars")
    out = tmp_path / "out"
    whole = (source / "val-0.tar").read_bytes()
    (source / "val-0.tar").write_bytes(whole[:-11000])
    with pytest.raises(UserError, match=r"val-0.tar is damaged"):
        run(config(source, out, num_tasks=1))
    assert not (out / "dataset.json").exists()
    assert list((out / ".parts").glob("*.part"))
    (source / "val-0.tar").write_bytes(whole)
    run(config(source, out))
    assert not (out / ".parts").exists()


def test_a_tar_that_the_machine_fails_to_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    tar = write_tar({"1.jpg": jpeg(1), "1.cls": b"0"}, tmp_path / "a.tar")
    job = IndexJob(str(tar), "a.tar", "train", str(tmp_path / "a.parquet"), whole=True, num_classes=0)
    monkeypatch.setattr("data_tools.sharding.index.content_hash", stale)
    with pytest.raises(LostError, match=r"a.tar cannot be read: Stale file handle"):
        index_tar(job)


def test_bad_samples_have_a_budget(ray_cluster: int, tmp_path: Path, capfd) -> None:
    members = {"1.jpg": jpeg(1), "1.cls": b"0", "2.jpg": b"no image", "2.cls": b"1", "3.jpg": jpeg(3), "4.cls": b"1"}
    source = write_tar(members, tmp_path / "t/train-0.tar" if (tmp_path / "t").mkdir() is None else tmp_path)
    with pytest.raises(UserError, match=r"3 of 4 .* 1 \(max_bad_share\): \.\./t/train"):
        run(config(source, tmp_path / "out", splits={"train": ""}))
    dataset = run(config(source, tmp_path / "out", splits={"train": ""}, max_bad_share=0.8))
    assert str(dataset.path / "skipped.csv") in capfd.readouterr().out
    assert len(dataset.split("train")) == 1
    assert np.array_equal(open_dataset(dataset.path).split("train").label_values, [0])


def test_no_sample_of_a_split_is_no_data_set(ray_cluster: int, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    write_tar({"1.jpg": jpeg(1), "1.cls": b"0"}, tmp_path / "t/train-0.tar")
    write_tar({"2.jpg": b"no image", "2.cls": b"1"}, tmp_path / "t/val-0.tar")
    splits = {"train": "train", "val": "val"}
    with pytest.raises(UserError, match=r"no image of split 'val' can be used.*val-0.tar: 2.jpg \("):
        run(config(tmp_path / "t", tmp_path / "out", splits=splits, max_bad_share=1.0))
    assert not (tmp_path / "out/dataset.json").exists()


def test_tars_of_formats_that_phones_and_web_sites_write(tmp_path: Path) -> None:
    small = noise(1, width=32, height=16)
    images = {
        "1.heic": HEIC["turned"],
        "2.jpg": HEIC["tiles"],
        "3.avif": encoded(small, "AVIF"),
        "4.ppm": encoded(small, "PPM"),
        "5.jp2": encoded(small, "JPEG2000"),
        "6.avif": encoded(small, "AVIF")[:-9],
        "7.heic": HEIC["tiles"][:-9],
        "8.jpg": jpeg(8)[:-9],
    }
    source = write_tar(images, tmp_path / "a.tar")
    for whole in (False, True):
        table = tmp_path / f"{whole}.parquet"
        done = index_tar(IndexJob(str(source), "a.tar", "train", str(table), whole, 1, is_labelled=False))
        assert [key for key, _, _ in done.skipped] == ["6", "7", "8"]
        rows = read_rows(table).select(["ext", "width", "height"]).to_pylist()
        assert [tuple(row.values()) for row in rows] == [
            ("heic", 16, 32),
            ("heic", 100, 96),
            ("avif", 32, 16),
            ("ppm", 32, 16),
            ("jp2", 32, 16),
        ]


def test_what_others_write_is_whole(ray_cluster: int, tmp_path: Path, capfd) -> None:
    """Names as `tar cf a.tar .` has them, a label twice, two files of labels, keys that come again."""
    (tmp_path / "t").mkdir()
    of_two = {"b.jpg": jpeg(2), "b.cls": b"1", "b.json": b'{"label": 0}'}
    write_tar({"./a.jpg": jpeg(1), "./a.json": b'{"labels": [1, 1, 0]}', **of_two}, tmp_path / "t/train-0.tar")
    labels = [("a.cls", b"0"), ("b.cls", b"0"), ("a.cls", b"1")]
    images = [(f"{label[0]}.jpg", jpeg(number)) for number, (label, _) in enumerate(labels, 3)]
    again = [part for sample in zip(images, labels, strict=True) for part in sample]
    write_tar(again, tmp_path / "t/train-1.tar")
    dataset = run(config(tmp_path / "t", splits={"train": ""}))
    report = verify.run(VerifyConfig(data=str(dataset.path)))
    assert report["is_whole"], report["kinds"]
    split = dataset.split("train")
    assert [split.labels_of(row).tolist() for row in range(5)] == [[0, 1], [1], [0], [0], [1]]


def test_an_unfinished_data_set_is_refused(tmp_path: Path) -> None:
    """Of a killed launch/shard.py: the tars that are there became a whole data set, and the job could not go on."""
    source = tars(tmp_path / "source")
    (source / ".parts").mkdir()
    (source / ".parts" / "plan.json").write_text("{}")
    with pytest.raises(UserError, match=r"source is a data set that launch/shard.py has not finished"):
        run(config(source))
    assert not (source / "dataset.json").exists()


def test_lists_of_excluded_samples_are_refused_after_indexing_other_rows(ray_cluster: int, tmp_path: Path) -> None:
    """The fingerprint is the same, since the tar is. Another sample would have been excluded."""
    members: dict[str, bytes] = {}
    for i in range(6):
        data = jpeg(i)
        members |= {f"{i}.jpg": data[:-40] + b"\xff\xd9" if i == 2 else data, f"{i}.cls": b"0"}
    (source := tmp_path / "tars").mkdir()
    write_tar(members, source / "train-0.tar")
    settings = {"splits": {"train": ""}, "max_bad_share": 0.5}
    first = run(config(source, inspect="header", **settings))
    places = [job.out for job in compared_split(first, "train", tmp_path).jobs]
    columns = {"split": ["train"], "row": [4], "key": ["4"], "reason": ["x"]}
    write_list(first, "mine", pa.table(columns, EXCLUDED))
    assert len(first.split("train")) == 5

    (source / "dataset.json").unlink()
    second = run(config(source, inspect="decode", **settings))
    assert (second.fingerprint, second.info["samples"]) == (first.fingerprint, {"train": 5})
    assert [job.out for job in compared_split(second, "train", tmp_path).jobs] != places
    with pytest.raises(UserError, match=r"mine\.parquet"):
        second.split("train")
    assert len(second.split("train", "none")) == 5
    write_list(second, "mine", pa.table({**columns, "row": [3]}, EXCLUDED))
    assert second.split("train").keys(range(4)) == ["0", "1", "3", "5"]
