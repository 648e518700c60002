"""Data sets in a bucket are read and written like local ones; a node's ranks share one cache of their shards."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from faulty_s3 import S3, bucket_path, copy_folder, put, slow, stall
from polling import until
from ranks import ROOT

from pipeline.base.errors import UserError
from pipeline.data.dataset.exclusion import EXCLUDED, write_list
from pipeline.data.dataset.manifest import SAMPLES_FILE, open_dataset
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.views import eval_view
from pipeline.data.storage import object_store
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import name_inside, remove_tree, to_path, walk_files
from pipeline.data.storage.cache import ShardCache, Storage
from pipeline.data.storage.retry import Retry
from pipeline.settings.run import AugmentConfig

Server = tuple[S3, str]


def has(split) -> list[bool]:
    return [(split.storage.cache.folder / f"{sha256}.shard").exists() for sha256 in split.shard_sha256.to_pylist()]


def cached(url: str, folder: Path, max_bytes: int = 10**9, in_use_seconds: float = 3600.0):
    """A split of the data set at url, read through a cache."""
    storage = Storage(Retry(60), ShardCache(folder, max_bytes, in_use_seconds))
    return open_dataset(url, storage).split("train")


def downloads(s3: S3) -> list[str]:
    """Names of the requested shards, one for each request."""
    return [request.rpartition("/")[2] for request in s3.requests if request.startswith("GET") and ".tar" in request]


def test_locations() -> None:
    assert to_path("data/x") == Path("data/x")
    path = to_path("s3://bucket//a/b/?region=eu-west-1")
    assert str(path) == "s3://bucket/a/b?region=eu-west-1"
    assert str(path / "c.tar") == "s3://bucket/a/b/c.tar?region=eu-west-1"
    assert str(to_path(str(path / "c.tar"))) == str(path / "c.tar")
    assert (path / "c.tar").name == "c.tar"
    assert name_inside(path / "c.tar", to_path("s3://bucket/a")) == "b/c.tar"
    assert name_inside(to_path("s3://bucket/ab"), to_path("s3://bucket/a")) is None
    assert name_inside(Path("/a/.b/c"), Path("/a")) == ".b/c"
    for wrong in ("hdfs://a/b", "s3://", "s3://a/b?regoin=x"):
        with pytest.raises(UserError):
            to_path(wrong)


def test_linked_folders_are_followed_and_circles_are_not(tmp_path: Path) -> None:
    for name in ("in/a/1", "elsewhere/b/2"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "in/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in/again").symlink_to("linked")
    (tmp_path / "in/a/circle").symlink_to(tmp_path / "in")
    (tmp_path / "elsewhere/b/self").symlink_to(".")
    (tmp_path / "in/broken").symlink_to("nowhere")
    (tmp_path / "start").symlink_to("in")
    for start in ("in", "start"):
        found = {name_inside(path, tmp_path / start): size for path, size, _ in walk_files(tmp_path / start)}
        assert found == {"a/1": 6, "linked/b/2": 13, "again/b/2": 13}


@pytest.mark.slow
@pytest.mark.parametrize("store", ["s3", "gcs"])
def test_objects_are_files(store: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(store)
    folder = bucket_path(f"{server[1]}/set" if store == "s3" else f"gs://models/files{server}")
    large = np.random.default_rng(0).bytes(2**20 * 21)  # three parts
    contents = {"a.gz": b"no gzip at all", "empty": b"", "large": large, "sub/x.tar": b"deep"}
    for name, data in contents.items():
        put(folder / name, data)
    assert {name_inside(path, folder): size for path, size, _ in walk_files(folder)} == {
        k: len(v) for k, v in contents.items()
    }
    sizes = {path.name: size for path, size, _ in folder.walk(recursive=False)}
    assert sizes == {"a.gz": 14, "empty": 0, "large": len(large)}
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["a.gz", "empty", "large", "sub"]
    assert all((folder / name).read_bytes() == data for name, data in contents.items())
    with (folder / "large").open() as file:
        file.seek(-7, os.SEEK_END)
        assert file.read() == large[-7:]
        file.seek(2**20 - 3)
        assert file.read(10) == large[2**20 - 3 : 2**20 + 7]
    assert folder.is_dir()
    assert (folder / "sub").is_dir()
    assert (folder / "a.gz").is_file()
    assert not (folder / "nothing").exists()
    with pytest.raises(FileNotFoundError, match="nothing"):
        (folder / "nothing").read_bytes()
    (folder / "empty").unlink()
    (folder / "empty").unlink(missing_ok=True)
    assert not (folder / "empty").exists()
    remove_tree(folder)
    remove_tree(folder)
    assert list(walk_files(folder)) == []


def test_what_fails_while_it_is_written_is_not_there(s3: Server) -> None:
    path = bucket_path(f"{s3[1]}/file")
    put(path, b"old")
    with pytest.raises(ValueError, match="ours"), replacing(path) as file:  # noqa: PT012
        file.write(b"x" * 10_000_000)
        raise ValueError("ours")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("with_cache", [False, True])
def test_batches_are_those_of_the_local_copy(with_cache: bool, s3: Server, dataset: Path, tmp_path: Path) -> None:
    copy_folder(dataset, f"{s3[1]}/tiny")
    storage = Storage(Retry(5), ShardCache(tmp_path / "cache", 10**9) if with_cache else None)
    rows = np.random.default_rng(0).permutation(150)
    found = []
    for split in (open_dataset(dataset).split("train"), open_dataset(f"{s3[1]}/tiny", storage).split("train")):
        with Loader(split, eval_view(AugmentConfig(), 16), 2, 2, 0.0) as loader:
            found.append(list(loader.batches((rows[i : i + 25], np.zeros(25, int)) for i in range(0, 150, 25))))
        assert split.keys([149, 0]) == ["train00149", "train00000"]
    for local, remote in zip(*found, strict=True):
        assert torch.equal(local.images, remote.images)
        assert torch.equal(local.labels, remote.labels)
        assert remote.valid.all()
    assert storage.retry.retries == 0
    assert len(downloads(s3[0])) == (4 if with_cache else 150)


def content_of_shards(url: str) -> str:
    """A part of each request for the content of a shard. The answer to HEAD has no second half that could be
    missing.
    """
    return f"GET /{url.removeprefix('s3://')}/tiny/train-"


READ_ALL = """
import sys
from pathlib import Path
from pipeline.data.storage.retry import Retry, StorageError
from pipeline.data.storage.cache import ShardCache, Storage
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.shard_reader import ShardReader

url, folder, max_bytes, in_use_seconds = sys.argv[1:]
cache = ShardCache(Path(folder), int(max_bytes), float(in_use_seconds))
split = open_dataset(url, Storage(Retry(20), cache)).split("train")
print("ready", flush=True)
sys.stdin.readline()
reader = ShardReader(split)
for _ in range(2):
    for row in range(len(split)):
        reader.read(row)
reader.close()
"""


def start_reading(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", READ_ALL, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
def test_two_ranks_download_each_shard_once(s3: Server, dataset: Path, tmp_path: Path) -> None:
    copy_folder(dataset, f"{s3[1]}/tiny")
    processes = [start_reading(f"{s3[1]}/tiny", tmp_path, 10**9, 60) for _ in range(2)]
    s3[0].fail(slow, ".tar")  # Each process waits for the other's downloads.
    for process in processes:
        print(file=process.stdin, flush=True)
    for process in processes:
        process.communicate(timeout=300)
    assert sorted(downloads(s3[0])) == sorted(f"train-{i:06d}.tar" for i in range(4))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", *[".shard"] * 4]


@pytest.mark.slow
def test_a_killed_rank_holds_up_nobody(s3: Server, dataset: Path, tmp_path: Path) -> None:
    server, url = s3
    copy_folder(dataset, f"{url}/tiny")
    process = start_reading(f"{url}/tiny", tmp_path, 10**9, 60)
    server.fail(stall, content_of_shards(url), times=1)
    assert process.stdin
    print(file=process.stdin, flush=True)
    until(lambda: list(tmp_path.glob("*.part")))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(tmp_path.glob("*.part"))
    split = cached(f"{url}/tiny", tmp_path)
    reader = ShardReader(split)
    assert all(reader.read(row) for row in range(150))
    assert len(list(tmp_path.glob("*.shard"))) == 4
    assert not list(tmp_path.glob("*.part"))


def test_the_byte_limit_holds_and_the_least_recent_goes(s3: Server, dataset: Path, tmp_path: Path) -> None:
    url = s3[1]
    copy_folder(dataset, f"{url}/tiny")
    split = cached(f"{url}/tiny", tmp_path)
    sizes = split.shard_bytes.tolist()
    # The partial download of a killed rank is removed first.
    (tmp_path / f"{'0' * 64}.part").write_bytes(bytes(10**7))
    split = cached(f"{url}/tiny", tmp_path, sizes[0] + sizes[1], in_use_seconds=0)
    cache = split.storage.cache
    assert cache
    paths = [bucket_path(shard) for shard in split.shard_paths]

    def fetch(shard: int) -> None:
        file = cache.open(paths[shard], sizes[shard], split.shard_sha256[shard].as_py())
        assert file is not None
        os.close(file)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= cache.max_bytes
        time.sleep(0.01)  # Times of last use differ.

    for shard in (0, 1, 0, 2):
        fetch(shard)
    assert has(split) == [True, False, True, False]
    assert sorted(downloads(s3[0])) == [f"train-{shard:06d}.tar" for shard in range(3)]
    # An evicted shard stays readable until its reader closes it.
    reader = ShardReader(split)
    first = reader.read(0)
    fetch(1)
    fetch(2)
    assert not has(split)[0]
    assert reader.read(0) == first
    # A copy that its disk has damaged is named, not only the intact object.
    (tmp_path / f"{split.shard_sha256[2].as_py()}.shard").write_bytes(bytes(sizes[2]))
    with pytest.raises(OSError, match=f"its copy in {tmp_path}"):
        ShardReader(split).read(int(split.shard_starts[2]))


def test_a_shard_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure leaves a file of the right name and size, full of zeros, which no later run downloads
    again.
    """
    steps = []
    rename = os.rename
    monkeypatch.setattr(ShardCache, "_download", lambda cache, path, file, *rest: os.pwrite(file, b"shard", 0))
    monkeypatch.setattr(os, "fsync", lambda file: steps.append(os.pread(file, 9, 0)))
    monkeypatch.setattr(os, "rename", lambda old, new: (steps.append(new.name), rename(old, new)))
    file = ShardCache(tmp_path, 10).open(bucket_path("s3://bucket/x.tar"), 5, "a1")
    assert steps == [b"shard", "a1.shard"]
    assert file is not None
    os.close(file)


def test_shards_in_use_are_not_evicted_but_others_read_in_ranges(s3: Server, dataset: Path, tmp_path: Path) -> None:
    server, url = s3
    copy_folder(dataset, f"{url}/tiny")
    split = cached(f"{url}/tiny", tmp_path, max_bytes=int(open_dataset(dataset).split("train").shard_bytes[:2].sum()))
    reader, local = ShardReader(split), ShardReader(open_dataset(dataset).split("train"))
    assert all(reader.read(row) == local.read(row) for row in range(150))
    requests = downloads(server)
    assert [requests.count(f"train-{shard:06d}.tar") for shard in range(4)] == [1, 1, 40, 30]


def test_shards_of_the_next_samples_are_downloaded_ahead(s3: Server, dataset: Path, tmp_path: Path) -> None:
    copy_folder(dataset, f"{s3[1]}/tiny")
    split = cached(f"{s3[1]}/tiny", tmp_path)
    assert split.storage.cache
    reader = ShardReader(split)
    asked = [(np.arange(first, first + 10),) for first in range(0, 150, 10)]
    requests = reader.ahead(iter(asked))
    passed = [next(requests)]
    until(lambda: all(has(split)[:2]))
    passed += requests
    assert [request[0].tolist() for request in passed] == [request[0].tolist() for request in asked]
    reader.close()


def test_looking_ahead_is_bounded_by_the_cache(s3: Server, dataset: Path, tmp_path: Path) -> None:
    copy_folder(dataset, f"{s3[1]}/tiny")
    size = int(open_dataset(dataset).split("train").shard_bytes.max())
    reader = ShardReader(
        cached(f"{s3[1]}/tiny", tmp_path, max_bytes=2 * size)
    )  # Half of it, one shard, may be filled ahead.
    asked = []

    def requests():
        for first in range(0, 150, 10):
            asked.append(first)
            yield (np.arange(first, first + 10),)

    passed = reader.ahead(requests())
    for seen in range(1, 16):
        next(passed)
        # The requests of this shard, and the first of the next.
        assert len(asked) - seen <= 5
    reader.close()


def test_a_forked_process_reads_on_also_when_a_thread_was_downloading(s3: Server) -> None:
    path, large, over = bucket_path(f"{s3[1]}/file"), bucket_path(f"{s3[1]}/large"), threading.Event()
    put(path, b"content")
    put(large, bytes(2**22))

    def download() -> None:
        while not over.is_set():
            large.read_bytes()

    threads = [threading.Thread(target=download) for _ in range(2)]
    for thread in threads:
        thread.start()
    statuses = []
    for _ in range(10):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's handler needs Python.
            signal.alarm(30)
            os._exit(0 if path.read_bytes() == b"content" else 1)
        statuses.append(os.waitpid(child, 0)[1])
    over.set()
    for thread in threads:
        thread.join()
    assert statuses == [0] * 10


def test_the_environment_names_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "127.0.0.1,.internal")
    assert object_store._proxy("https://s3.amazonaws.com") == "http://proxy.example:3128"
    assert object_store._proxy("minio.example:9000") == "http://proxy.example:3128"
    assert object_store._proxy("https://minio.internal") is None
    assert object_store._proxy("http://minio.example") is None
    monkeypatch.setenv("https_proxy", "proxy.example:3128")  # As curl takes it.
    assert object_store._proxy("https://s3.amazonaws.com") == "http://proxy.example:3128"


def test_samples_left_out_and_the_index_of_a_data_set_in_a_bucket(s3: Server, dataset: Path, tmp_path: Path) -> None:
    url = f"{s3[1]}/tiny"
    copy_folder(dataset, url)
    local = ShardReader(open_dataset(dataset).split("train"))
    remote = open_dataset(url)
    keys = remote.table("train").keys(range(41))
    rows = [{"split": "train", "row": row, "key": key, "reason": "test"} for row, key in enumerate(keys)]
    write_list(remote, "damaged", pa.Table.from_pylist(rows, EXCLUDED))
    bucket_path(f"{url}/train-000000.tar").unlink()
    split = cached(url, tmp_path)
    assert (len(split), split.excluded_by) == (109, {"damaged": 41})
    reader = ShardReader(split)
    assert all(reader.read(row) == local.read(41 + row) for row in range(109))
    assert not [path for path, *_ in bucket_path(url).walk() if "/index/" in str(path)]
    with pytest.raises(UserError, match=r"train-000000.tar is missing"):
        remote.split("train", "none")
    table = bucket_path(f"{url}/{SAMPLES_FILE}")
    content = bytearray(table.read_bytes())
    content[100] ^= 1
    put(table, bytes(content))
    with pytest.raises(UserError, match=SAMPLES_FILE):
        open_dataset(url).table("train").keys([0])
    # Also a shard of which some samples are excluded: its readers compare its size or checksum.
    put(bucket_path(f"{url}/train-000001.tar"), b"cut")
    with pytest.raises(UserError, match=r"train-000001.tar has 3 bytes"):
        remote.split("train")
