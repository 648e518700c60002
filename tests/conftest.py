"""A tiny data set, shared by the tests that train; servers that have S3's and Google's API."""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import fake_gcs
import faulty_s3
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from pipeline.data.manifest import ROWS, Shard, write_dataset

NUM_CLASSES = 4


def make_dataset(path: Path, splits: dict[str, int], per_shard: int = 40, size: int = 16, seed: int = 0) -> Path:
    """Shards of noisy one-colour pictures, `size` px, whose colour tells their class; splits: name -> samples."""
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    colours = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200], [180, 180, 40]])
    shards, tables = [], []
    for split, count in splits.items():
        for number, first in enumerate(range(0, count, per_shard)):
            name, rows = f"{split}-{number:06d}.tar", []
            with tarfile.open(path / name, "w") as tar:
                for i in range(first, min(first + per_shard, count)):
                    label = int(rng.integers(NUM_CLASSES))
                    pixels = np.clip(colours[label] + rng.normal(0, 40, (size, size, 3)), 0, 255).astype(np.uint8)
                    buffer = io.BytesIO()
                    Image.fromarray(pixels).save(buffer, "PNG")
                    data = buffer.getvalue()
                    for ext, content in (("png", data), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{split}{i:05d}.{ext}")
                        member.size = len(content)
                        if ext == "png":
                            offset = tar.offset + 512
                        tar.addfile(member, io.BytesIO(content))
                    rows.append({"key": f"{split}{i:05d}", "offset": offset, "size": len(data), "ext": "png", "labels": [label],
                                 "width": size, "height": size, "sha256": hashlib.sha256(data).digest()})  # fmt: skip
            content = (path / name).read_bytes()
            shards.append(Shard(name, split, len(rows), len(content), hashlib.sha256(content).hexdigest()))
            tables.append(pa.Table.from_pylist(rows, ROWS))
    write_dataset(path, shards, tables, [f"class{c}" for c in range(NUM_CLASSES)], {"made by": "tests"}, {})
    return path


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 training and 37 validation samples of 4 classes, 16 px."""
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny", {"train": 150, "val": 37})


@pytest.fixture(scope="session")
def s3_server() -> Iterator[faulty_s3.S3]:
    with faulty_s3.running() as server:
        yield server


@pytest.fixture
def s3(
    s3_server: faulty_s3.S3,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[faulty_s3.S3, str]]:
    """A server without faults, and the URL of an empty bucket of the test's own. Indexes are not kept at home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    bucket = "b" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]
    s3_server.reset()
    s3_server.bucket(bucket)
    yield s3_server, f"s3://{bucket}"
    s3_server.reset()


@pytest.fixture(scope="session")
def gcs() -> Iterator[str]:
    """The end of a gs:// URL that leads to a server of Google's API, where there is a bucket `models`."""
    with fake_gcs.running("models") as options:
        yield options
