"""Small pictures, and data sets of them, made without Ray."""

import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from pipeline.data.dataset.manifest import ROWS, Dataset, Shard, write_dataset
from pipeline.data.storage.content import content_hash

Encode = Callable[..., bytes]


def encode(pixels: np.ndarray | Image.Image, format: str, **options: object) -> bytes:
    """An image file of these pixels."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


@pytest.fixture(name="encode", scope="session")
def encode_fixture() -> Encode:
    return encode


@pytest.fixture(scope="session")
def make_dataset() -> Callable[[Path, Sequence[bytes], Sequence[list[int]], int], Dataset]:
    def make(path: Path, files: Sequence[bytes], labels: Sequence[list[int]], per_shard: int) -> Dataset:
        """A data set of one split, 'train', with these image files and labels in this order."""
        path.mkdir(parents=True)
        shards, tables = [], []
        for first in range(0, len(files), per_shard):
            name = f"train-{first // per_shard:06d}.tar"
            columns: dict[str, list[object]] = {column: [] for column in ROWS.names}
            with tarfile.open(path / name, "w", format=tarfile.GNU_FORMAT) as tar:
                for row in range(first, min(first + per_shard, len(files))):
                    data = files[row]
                    info = tarfile.TarInfo(f"{row}.jpg")
                    info.size = len(data)
                    sample = [f"class/{row}", tar.offset + tarfile.BLOCKSIZE, len(data), "jpg", labels[row], 1, 1]
                    tar.addfile(info, io.BytesIO(data))
                    for column, value in zip(ROWS.names, [*sample, content_hash(data)], strict=True):
                        columns[column].append(value)
            shards.append(Shard(name, "train", len(columns["key"]), (path / name).stat().st_size, ""))
            tables.append(pa.Table.from_pydict(columns, ROWS))
        num_classes = max((1 + label for of_sample in labels for label in of_sample), default=0)
        return write_dataset(path, shards, tables, [str(label) for label in range(num_classes)], {}, {})

    return make
