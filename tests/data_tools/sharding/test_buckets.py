"""Work on a data set in a bucket: the same findings, numbers, marks and manifest as on a disk."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faulty_s3 import S3, answer, bucket_path, copy_folder, put, truncate
from PIL import Image
from raw_images import encoded, jpeg, noise, settings, write_folder, write_tar

from data_tools.check import verify
from data_tools.dedup import dedup
from data_tools.sharding import index, shard
from data_tools.sharding.write_shard import Done, load_part, part_path, write_part
from pipeline.data.dataset.exclusion import read_lists
from pipeline.data.dataset.manifest import ROWS, Dataset, open_dataset
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.storage.retry import StorageError
from pipeline.settings.commands.data import DedupConfig, IndexConfig, VerifyConfig


def comparable(report: dict) -> dict:
    return {name: value for name, value in report.items() if name not in ("data", "seconds")}


def test_verify_finds_what_it_finds_on_a_disk(dataset: Dataset, tmp_path: Path, s3: tuple[S3, str]) -> None:
    server, url = s3
    local = Path(shutil.copytree(dataset.path, tmp_path / "data"))
    shard_of_train = local / "train-000001.tar"
    content = bytearray(shard_of_train.read_bytes())
    offset = dataset.split("train").place_of(8)[0]  # The first of the shard.
    content[offset : offset + 20] = bytes(20)
    shard_of_train.write_bytes(content)
    (local / "val-000000.tar").unlink()
    copy_folder(local, url)
    for fault in (truncate, answer(503, "SlowDown")):
        server.fail(fault, ".tar", times=1)
    here, there = (verify.run(VerifyConfig(data=str(place))) for place in (local, url))
    assert {"checksum": 1, "missing": 1}.items() <= {kind: of["count"] for kind, of in there["kinds"].items()}.items()
    assert comparable(there) == comparable(here)
    assert (bucket_path(url) / "verify/damage.csv").read_bytes() == (local / "verify/damage.csv").read_bytes()
    assert json.loads((bucket_path(url) / "verify/report.json").read_bytes()) == there
    lists = [read_lists(open_dataset(place))["damaged"].to_pylist() for place in (local, url)]
    assert lists[0] == lists[1]
    # Shards came whole, once, but for the two answers that failed: nothing was asked for sample by sample.
    num_there = len(list(local.glob("*.tar")))
    assert sum(request.startswith("GET") and ".tar" in request for request in server.requests) <= num_there + 2
    assert not [request for request in server.requests if "progress.json" in request or ".lock" in request]

    # A bucket that is not for us says nothing of the data: no finding, and the list stays.
    server.fail(answer(403, "AccessDenied"), "GET /")
    with pytest.raises(StorageError, match="access denied"):
        verify.run(VerifyConfig(data=url))
    server.reset()
    assert read_lists(open_dataset(url))["damaged"].to_pylist() == lists[0]


def test_dedup_marks_in_a_bucket(ray_cluster: int, tmp_path: Path, s3: tuple[S3, str]) -> None:
    server, url = s3

    def smooth(seed: int) -> Image.Image:
        return noise(seed, 10, 8).resize((120, 90), Image.Resampling.BICUBIC)

    train = {f"a/{i}.jpg": encoded(smooth(i), "JPEG", quality=90) for i in range(6)}
    tests = {f"x/{i}.jpg": encoded(smooth(i), "JPEG", quality=60) for i in (2, 4, 7)}
    for name, files in (("train", train), ("pets", tests)):
        made = shard.run(settings(write_folder(files, tmp_path / f"raw_{name}"), tmp_path / name, samples_per_shard=4))
        copy_folder(made.path, f"{url}/{name}")
    # Options of a URL stand behind the split's name.
    config = DedupConfig(data=f"{url}/train", against=[f"{url}/pets:train?region=us-east-1"])
    report = dedup.run(config)
    assert report["data"]["copies"] == 2
    assert report["against"][0]["name"] == "pets:train"
    data = open_dataset(f"{url}/train")
    assert sorted(row["key"] for row in read_lists(data)["test_copies"].to_pylist()) == ["a/2", "a/4"]
    with Image.open(io.BytesIO((data.path / "dedup/pairs.png").read_bytes())) as sheet:
        assert np.asarray(sheet).std() > 20
    server.reset()
    again = dedup.run(config)
    assert {**again, "seconds": 0} == {**report, "seconds": 0}
    # Thumbnails are kept: of the shards only what the sheet shows is read again.
    fetched = [request for request in server.requests if request.startswith("GET") and ".tar" in request]
    assert len(fetched) == 4


def samples(dataset: Dataset) -> dict[str, tuple[list[int], bytes]]:
    split = dataset.split("train")
    reader = ShardReader(split)
    return {
        key: (split.labels_of(row).tolist(), reader.read(row)) for row, key in enumerate(split.keys(range(len(split))))
    }


def test_tars_of_others_in_a_bucket(ray_cluster: int, tmp_path: Path, s3: tuple[S3, str]) -> None:
    server, url = s3
    expected = {}
    for number in range(3):
        members: dict[str, bytes] = {}
        for i in range(3 * number, 3 * number + 3):
            members |= {f"{i}.jpg": jpeg(i), f"{i}.cls": str(i % 3).encode()}
            expected[str(i)] = ([i % 3], jpeg(i))
        tar = write_tar(members, tmp_path / f"{number}.tar")
        put(bucket_path(f"{url}/theirs/deep/{number}.tar"), tar.read_bytes())
    before = set(bucket_path(f"{url}/theirs").walk())
    # Beside the tars (one of them is one folder down), elsewhere in the bucket, in another bucket, on this disk.
    server.bucket("elsewhere" + url[-8:])
    places = {
        "": "deep/0.tar",
        f"{url}/ours/set": "../../theirs/deep/0.tar",
        f"s3://elsewhere{url[-8:]}/set": f"{url}/theirs/deep/0.tar",
        str(tmp_path / "here"): f"{url}/theirs/deep/0.tar",
    }
    fingerprints = set()
    for out, name in places.items():
        server.reset()
        dataset = index.run(IndexConfig(source=f"{url}/theirs", out=out))
        # All bytes of each tar came once, after a look at its first images.
        gets = [request for request in server.requests if request.startswith("GET") and ".tar" in request]
        assert len(gets) == 2 * 3
        assert dataset.shards()[0].name == name
        assert samples(dataset) == expected
        fingerprints.add(dataset.fingerprint)
        if out:
            assert verify.run(VerifyConfig(data=out, out=str(tmp_path / "verify")))["is_whole"]
    assert len(fingerprints) == 1
    assert before <= set(bucket_path(f"{url}/theirs").walk())


def test_a_bucket_that_is_down_is_no_damaged_part(dataset: Dataset, s3: tuple[S3, str]) -> None:
    """Else a job that goes on after an outage would write every shard again."""
    server, url = s3
    part = part_path(bucket_path(url, seconds=0.3), "train-000000.tar")
    write_part(part, ROWS.empty_table(), Done(replace(dataset.shards()[0], samples=0), []))
    assert load_part(part, Done) is not None
    server.fail(answer(503, "SlowDown"), "GET /")
    with pytest.raises(StorageError, match=r"train-000000.part was unreachable"):
        load_part(part, Done)
    server.reset()
    put(part, b"PAR1 no more")
    assert load_part(part, Done) is None


def test_a_data_set_is_made_checked_and_indexed_on_gcs(dataset: Dataset, source: Path, gcs: str, capfd) -> None:
    config = settings(source, f"gs://models/out{gcs}", val_share=0.25)
    made = shard.run(config)
    assert made.fingerprint == dataset.fingerprint
    assert verify.run(VerifyConfig(data=config.out))["is_whole"]
    parts = {"train": "train-", "val": "val-"}
    indexed = index.run(IndexConfig(source=config.out, out=f"gs://models/index{gcs}", splits=parts))
    assert indexed.info["samples"] == made.info["samples"]
    (made.path / "val-000000.tar").unlink()
    capfd.readouterr()
    assert shard.run(config).fingerprint == dataset.fingerprint
    assert "made 1 again" in capfd.readouterr().out
    assert not [path for path, *_ in made.path.walk() if "/." in path.key]
