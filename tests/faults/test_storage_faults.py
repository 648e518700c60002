"""Faults of networks and servers, and changes of a bucket: passing errors are retried and counted, others end in one
line.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_s3 import S3, answer, bucket_path, copy_folder, flip, put, reset, stall, truncate

from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.views import eval_view
from pipeline.data.storage import object_store
from pipeline.data.storage.cache import ShardCache, Storage
from pipeline.data.storage.retry import Retry, StorageError
from pipeline.settings.command import mistakes_in_one_line
from pipeline.settings.run import AugmentConfig

Server = tuple[S3, str]
Open = Callable[..., Dataset]


@pytest.fixture
def remote(s3: Server, dataset: Path, tmp_path: Path) -> Open:
    """Opens the tiny data set in the bucket, by default with a cache."""
    copy_folder(dataset, f"{s3[1]}/tiny")
    s3[0].reset()

    def open_it(with_cache: bool = True, seconds: float = 20, **options: Any) -> Dataset:
        cache = ShardCache(tmp_path / "cache", 10**9) if with_cache else None
        return open_dataset(f"{s3[1]}/tiny", Storage(Retry(seconds, **options), cache))

    return open_it


def images(dataset: Path) -> list[bytes]:
    reader = ShardReader(open_dataset(dataset).split("train"))
    return [reader.read(row) for row in range(150)]


@pytest.mark.slow
@pytest.mark.parametrize("with_cache", [False, True])
def test_what_passes_is_tried_again_and_counted(with_cache: bool, s3: Server, remote: Open, dataset: Path) -> None:
    split = remote(with_cache).split("train")
    rows = range(0, 150, 15)
    for fault in (reset, answer(503, "SlowDown"), truncate, answer(500, "InternalError")):
        s3[0].fail(fault, "GET", times=1)
    expected, reader = images(dataset), ShardReader(split)
    assert [reader.read(row) for row in rows] == [expected[row] for row in rows]
    assert split.storage.retry.retries == 4


@pytest.mark.slow
def test_a_connection_that_stands_still_is_given_up(s3: Server, remote: Open, dataset: Path) -> None:
    split = remote(stall_seconds=5.0).split("train")  # In less than that, a busy machine may not answer at all.
    s3[0].fail(stall, ".tar", times=1)
    assert ShardReader(split).read(0) == images(dataset)[0]
    assert split.storage.retry.retries == 1


@pytest.mark.slow
@pytest.mark.usefixtures("notice_after_600")
@pytest.mark.parametrize("with_cache", [False, True])
def test_an_outage_stops_the_run_with_one_line(
    with_cache: bool, s3: Server, remote: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    split = remote(with_cache, seconds=0.5, setting="data.retry_minutes").split("train")
    s3[0].fail(answer(503, "SlowDown"))
    loader = Loader(split, eval_view(AugmentConfig(), 16), 2, 2, max_bad_share=1.0)
    with pytest.raises(SystemExit) as stopped, mistakes_in_one_line(), loader:
        list(loader.batches([(np.arange(150), np.zeros(150, int))]))
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(
        r"s3://\w+/tiny/train-00000\d.tar was unreachable for 0.00833 minutes \(data.retry_minutes\): .*503.*Check the"
        r" network",
        said,
    )
    assert not loader.bad
    assert split.storage.retry.retries > 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (answer(403, "AccessDenied"), r"tiny: access denied. Check that the credentials \(AWS_PROFILE"),
        (answer(403, "InvalidAccessKeyId"), r"(access denied|no valid credentials)"),
        (answer(301, "PermanentRedirect"), r"another region. Set AWS_REGION"),
    ],
)
def test_what_no_waiting_repairs_is_said_at_once(fault, said: str, s3: Server, remote: Open) -> None:
    s3[0].fail(fault)
    with pytest.raises(UserError, match=said) as error:
        remote()
    assert "\n" not in str(error.value)
    assert len(s3[0].requests) <= 2


def test_a_bucket_or_data_set_that_is_not_there(s3: Server) -> None:
    with pytest.raises(UserError, match=r"s3://no-such-bucket/x: no such bucket. Check its name"):
        open_dataset("s3://no-such-bucket/x")
    with pytest.raises(UserError, match=r"s3://\w+/x: no such data set. Shard it first"):
        open_dataset(f"{s3[1]}/x")
    put(bucket_path(f"{s3[1]}/x/train-000000.tar"), b"")
    with pytest.raises(UserError, match=r"s3://\w+/x/dataset.json"):
        open_dataset(f"{s3[1]}/x")


def test_a_bit_that_flips_on_the_way_is_fetched_again(s3: Server, remote: Open, dataset: Path) -> None:
    split = remote().split("train")
    s3[0].fail(flip, "GET", times=1)
    assert ShardReader(split).read(0) == images(dataset)[0]
    assert sum("train-000000.tar" in request for request in s3[0].requests if request.startswith("GET")) == 2


@pytest.mark.parametrize("change", ["replaced", "cut"])
@pytest.mark.parametrize("with_cache", [False, True])
def test_a_shard_that_changes_under_us_costs_its_samples_only(
    change: str, with_cache: bool, s3: Server, remote: Open, dataset: Path
) -> None:
    split = remote(with_cache).split("train")
    shard = bucket_path(f"{s3[1]}/tiny/train-000001.tar")
    content = shard.read_bytes()
    put(shard, bytes(len(content)) if change == "replaced" else content[:-1000])
    s3[0].reset()
    with Loader(split, eval_view(AugmentConfig(), 16), 2, 2, max_bad_share=0.3) as loader:
        (batch,) = loader.batches([(np.arange(150), np.zeros(150, int))])
    assert sorted(loader.bad) == list(range(40, 80))
    assert batch.valid.sum() == 110
    reason = loader.bad[40]
    if change == "cut":
        assert re.search(
            r"train-000001.tar has [\d,]+ bytes, but [\d,]+ in the manifest: it was replaced or damaged", reason
        )
    elif with_cache:
        assert re.search(r"train-000001.tar is not the shard in the manifest \(sha256 \w+, not \w+\)", reason)
    if with_cache or change != "replaced":
        # Not each of its samples causes requests.
        assert sum("train-000001.tar" in request for request in s3[0].requests) <= 16


@pytest.mark.parametrize(("lost", "said"), [("access", "access denied"), ("file", "cannot be read")])
@pytest.mark.parametrize("with_cache", [False, True])
def test_a_shard_that_is_lost_during_a_run_is_no_bad_sample(
    lost: str, said: str, with_cache: bool, s3: Server, remote: Open
) -> None:
    split = remote(with_cache).split("train")
    if lost == "file":
        bucket_path(f"{s3[1]}/tiny/train-000001.tar").unlink()
    else:
        s3[0].fail(answer(403, "AccessDenied"), "train-000001.tar")
    with Loader(split, eval_view(AugmentConfig(), 16), 2, 2, max_bad_share=1.0) as loader:
        with pytest.raises(StorageError, match=f"tiny/train-000001.tar:? {said}"):
            list(loader.batches([(np.arange(150), np.zeros(150, int))]))
        assert not loader.bad


@pytest.mark.slow
def test_an_upload_that_fails_leaves_the_old_object(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_PART_ATTEMPTS", 1)
    path = bucket_path(f"{s3[1]}/file", seconds=0.3)
    put(path, b"old")
    large = np.random.default_rng(0).bytes(11_000_000)  # two parts
    for part in ("partNumber=1", "partNumber=2", "?uploads", "POST"):
        s3[0].reset()
        s3[0].fail(answer(503, "SlowDown"), part)
        with pytest.raises(StorageError, match="unreachable"):
            put(path, large)
        assert path.read_bytes() == b"old", part
    s3[0].reset()
    s3[0].fail(answer(503, "SlowDown"), "partNumber=2", times=1)
    again = bucket_path(f"{s3[1]}/file", seconds=20)
    put(again, large)
    assert again.read_bytes() == large
    assert again.retry.retries == 1


def test_a_full_cache_disk_is_no_bad_sample(remote: Open, small_disk: Callable[[str], Path]) -> None:
    split = remote(with_cache=False).split("train")
    cache = ShardCache(small_disk("16k"), 10**9)
    with pytest.raises(StorageError, match=r"data.cache = .*small cannot store shards \(No space left"):
        cache.open(bucket_path(split.shard_paths[0]), int(split.shard_bytes[0]), split.shard_sha256[0].as_py())
    assert not list(cache.folder.glob("*.part"))
