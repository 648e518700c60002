"""Google Cloud Storage, by fake-gcs-server on loopback: what pyarrow does differently there, and a data set from start
to end.
"""

import shutil
import time
from pathlib import Path

import pytest
from faulty_s3 import bucket_path, put

from data_tools.check.verify_shard import VerifyJob, check_shard
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.storage.bucket import remove_tree, version, walk_files
from pipeline.data.storage.cache import ShardCache, Storage
from pipeline.data.storage.retry import Retry, StorageError


def test_versions_of_an_object(gcs: str) -> None:
    folder = bucket_path(f"gs://models/set{gcs}")
    put(folder / "a.gz", b"no gzip at all")
    assert {path.stat().st_mtime_ns - mtime for path, _, mtime in walk_files(folder)} == {0}
    assert (folder / "a.gz").stat().st_mtime_ns > time.time_ns() - 600 * 10**9
    before, reader = version(folder / "a.gz"), (folder / "a.gz").reader()
    assert reader.read_at(3, 5) == b"gzip "
    put(folder / "a.gz", b"another thing")
    assert before
    assert version(folder / "a.gz") != before
    # A reader never returns bytes of another version than the one it opened.
    with pytest.raises(FileNotFoundError, match=r"set/a\.gz"):
        reader.read_at(3, 5)
    for _ in range(2):
        remove_tree(folder)  # A missing folder causes no retries.
    assert folder.retry.retries == 0
    with pytest.raises(StorageError, match="no such bucket"):
        bucket_path(f"gs://nobody/set{gcs}").exists()


def test_a_data_set_is_read_checked_and_listed(
    gcs: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "index"))
    copy = shutil.copytree(dataset, tmp_path / "tiny", ignore=shutil.ignore_patterns("index"))
    url = f"gs://models/tiny{gcs}"
    folder = bucket_path(url)
    for path in copy.iterdir():
        put(folder / path.name, path.read_bytes())
    local = ShardReader(open_dataset(dataset).split("train"))
    for cache in (None, ShardCache(tmp_path / "cache", 10**9)):
        split = open_dataset(url, Storage(Retry(5), cache)).split("train")
        reader = ShardReader(split)
        assert all(reader.read(row) == local.read(row) for row in range(0, 150, 7 if cache is None else 1))
        assert split.storage.retry.retries == 0
    data = open_dataset(url)
    for shard, damage in zip(data.shards(), (False, True), strict=False):
        if damage:
            put(folder / shard.name, bytes(shard.bytes))
        found = check_shard(VerifyJob(url, shard, None, 0, data.num_classes)).findings
        assert ("checksum" in {kind for kind, *_ in found}) == damage
