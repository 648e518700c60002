"""Sources in a bucket: the same samples as on a disk, class tars side by side, and faults that are not the source's."""

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_s3 import S3, answer, bucket_path, put
from raw_images import jpeg, settings, write_class_tars, write_folder, write_tar, write_zip
from test_layouts import (
    FILES,
    NAMES,
    SHARD,
    VAL_LABELS,
    cifar10,
    hugging_face,
    imagenet1k,
    listed,
    python2_batch,
    samples,
    table,
)

from data_tools.sharding import shard
from data_tools.sources import Listing, Reader, list_source
from pipeline.base.errors import UserError
from pipeline.data.storage.bucket import walk_files
from pipeline.data.storage.retry import StorageError
from pipeline.settings.commands.data import ShardConfig


def _packed_cifar(at: Path) -> Path:
    return write_tar(cifar10(at, python2_batch), at / "cifar.tar.gz", "w:gz")


def _webdataset(at: Path) -> Path:
    (at / "shards").mkdir()
    return write_tar(SHARD, at / "shards/train-0.tar").parent


IN_BUCKET: dict[str, Callable[[Path], Path]] = {
    "cifar": lambda at: write_folder(cifar10(at, python2_batch), at / "cifar"),
    "cifar.tar.gz": _packed_cifar,
    "folder": lambda at: write_folder({"cat/1.jpg": jpeg(1), "dog/2.jpg": jpeg(2)}, at / "raw"),
    "zip": lambda at: write_zip({"cat/1.jpg": jpeg(1), "dog/2.jpg": jpeg(2), "dog/3.jpg": jpeg(3)}, at / "raw.zip"),
    "images": lambda at: write_folder({"1.jpg": jpeg(1), "a/b/1.jpg": jpeg(2)}, at / "raw"),
    "imagenet1k": lambda at: imagenet1k(at / "raw"),
    "webdataset": _webdataset,
    "parquet": lambda at: hugging_face(at / "raw/data/train-0.parquet", pa.array([2, 0, 0, 1, 2]), NAMES).parents[1],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", IN_BUCKET)
def test_a_source_in_a_bucket_gives_the_same_samples(layout: str, tmp_path: Path, s3: tuple[S3, str]) -> None:
    source = IN_BUCKET[layout](tmp_path)
    labels = {"val_labels": str(VAL_LABELS["map"](tmp_path))} if layout == "imagenet1k" else {}
    if layout == "images":
        write_zip({"2.jpg": jpeg(3)}, source / "a/more.zip")
        labels = {"layout": "images"}
    for path, *_ in walk_files(source) if source.is_dir() else [(source, 0)]:
        put(bucket_path(f"{s3[1]}/{path.relative_to(tmp_path)}"), path.read_bytes())
    there = bucket_path(f"{s3[1]}/{source.name}")
    config = ShardConfig(source=str(there), out="unused", **labels)
    # Twice, so that what was unpacked is used again.
    listings = [list_source(there, config, bucket_path(f"{s3[1]}/out/.staging")) for _ in range(2)]
    local = listed(source, **labels)
    assert all(samples(listing) == samples(local) for listing in listings)
    assert {listing.digest() for listing in listings} == {local.digest()}
    first, again = (listing.table["mtime"].to_pylist() for listing in listings)
    assert first == again
    assert min(first) > time.time_ns() - 600 * 10**9


def _class_tars(at: Path) -> Path:
    return write_class_tars({f"n{i}/{j}.jpg": jpeg(10 * i + j) for i in range(5) for j in range(2)}, at / "tars")


def _listing_of_tars(server: S3, url: str, out: Path) -> tuple[Listing, list[str]]:
    """The listing, and the names of the tars that were read for it."""
    server.requests.clear()
    out.mkdir(exist_ok=True)
    listing = list_source(
        bucket_path(url), ShardConfig(source=url, out="unused", layout="imagenet21k"), out / ".staging"
    )
    assert not (out / "progress.json").exists()
    return listing, sorted({request[-6:] for request in server.requests if re.match(r"GET \S+\.tar$", request)})


def test_class_tars_in_a_bucket_are_read_side_by_side_and_once(tmp_path: Path, s3: tuple[S3, str]) -> None:
    server, url = s3
    source, out, there = _class_tars(tmp_path), tmp_path / "out", f"{url}/tars"
    expected = samples(listed(source))
    names = [path.name for path in sorted(source.iterdir())]
    cut = {name: (source / name).read_bytes()[:3000] for name in names[1:3]}
    for name in names:
        put(bucket_path(f"{there}/{name}"), cut.get(name) or (source / name).read_bytes())
    together, phases = threading.Barrier(len(names)), []

    def wait_for_others(handler: object, head: bytes, body: bytes) -> bytes:
        together.wait(300)
        phases.append(json.loads((out / "progress.json").read_text())["phase"])
        return body

    for name in names:
        server.fail(wait_for_others, f"GET {url[4:]}/tars/{name}", times=1)
    with pytest.raises(UserError, match=r"^s3\S+ has 2 damaged tars.*: n1.tar \(.*\); n2.tar \(.*\)"):
        shard.run(settings(there, out, layout="imagenet21k"))
    assert phases == ["listed"] * len(names)

    # Lists of those that were whole have been kept, and nothing else.
    assert {path.suffix for path, *_ in walk_files(out)} == {".members"}
    for name in cut:
        put(bucket_path(f"{there}/{name}"), (source / name).read_bytes())
    listing, read = _listing_of_tars(server, there, out)
    assert read == list(cut)
    assert samples(listing) == expected
    assert _listing_of_tars(server, there, out)[1] == []

    # As long as it was, but another.
    write_tar({"0.jpg": jpeg(1), "2.jpg": jpeg(11)}, source / "n0.tar")
    put(bucket_path(f"{there}/n0.tar"), (source / "n0.tar").read_bytes())
    listing, read = _listing_of_tars(server, there, out)
    assert read == ["n0.tar"]
    assert samples(listing) == samples(listed(source))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_list_in_a_bucket(ending: str, tmp_path: Path, s3: tuple[S3, str]) -> None:
    """Paths in it are relative to it, or URLs; a list on a disk may name URLs, too."""
    server, url = s3
    for name, data in FILES.items():
        put(bucket_path(f"{url}/raw/{name}"), data)
    rows = [("../cat/1.jpg", "cat"), (f"{url}/raw/dog/2.jpg", "dog"), ("../3.png", ""), ("../dog/gone.jpg", "dog")]
    path = tmp_path / f"list.{ending}"
    if ending == "csv":
        table(path, rows)
    else:
        pq.write_table(pa.table(dict(zip(("path", "label"), zip(*rows, strict=True), strict=True))), path)
    there = bucket_path(f"{url}/raw/lists/{path.name}")
    put(there, path.read_bytes())
    server.reset()
    listing = list_source(there, ShardConfig(source=str(there), out="unused"), tmp_path)
    sizes = dict(zip(listing.table["key"].to_pylist(), listing.table["size"].to_pylist(), strict=True))
    bucket_name = url.removeprefix("s3://")
    dog = f"{bucket_name}/raw/dog/2"
    assert sizes == {
        "cat/1": len(FILES["cat/1.jpg"]),
        dog: len(FILES["dog/2.jpg"]),
        "3": len(FILES["3.png"]),
        "dog/gone": 0,
    }
    # Sizes come of one listing of each folder, not of a question for each file.
    assert not [request for request in server.requests if request.startswith("HEAD") and "dog/" in request]
    with Reader() as reader:
        for image in listing.images(np.arange(4)):
            if image.key != "dog/gone":
                assert reader.read(*image.files[0]) in FILES.values()
            else:
                with pytest.raises(OSError, match=r"raw/dog/gone.jpg"):
                    reader.read(*image.files[0])


def test_parquet_of_a_bucket_that_fails_is_not_called_damaged(tmp_path: Path, s3: tuple[S3, str]) -> None:
    server, url = s3
    path = hugging_face(tmp_path / "a.parquet", pa.array([0, 1, 2, 0, 1]), NAMES)
    there = bucket_path(f"{url}/a.parquet")
    put(there, path.read_bytes())
    for layout in ("auto", "parquet", "list"):
        config = ShardConfig(source=str(there), out="unused", layout=layout)
        server.reset()
        server.fail(answer(403, "AccessDenied"), "GET /")
        with pytest.raises(StorageError, match="access denied"):
            list_source(there, config, tmp_path / "staging")
    server.reset()
    put(there, path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"^s3://\S+a.parquet is damaged \(.*\)\. Fetch it again;"):
        list_source(there, ShardConfig(source=str(there), out="unused"), tmp_path / "staging")
