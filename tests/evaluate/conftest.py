"""Data sets whose pixels encode their row, so that a test can choose the model's output for each."""

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from pipeline.data.dataset.manifest import ROWS, Dataset, Shard, write_dataset
from pipeline.data.storage.content import content_hash

SIDE = 8
MakeDataset = Callable[..., Dataset]


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    def make(
        splits: dict[str, list[list[int]]],
        classes: list[str],
        bad: dict[str, list[int]] | None = None,
        groups: Callable[[int], str | None] | None = None,
        drawn: dict[str, list[list[int]]] | None = None,
    ) -> Dataset:
        """splits: name -> the labels of each sample. bad: name -> rows that are not images. groups: row -> its group.
        drawn: name -> the labels by which the images are drawn, if they are others.

        Red and green of the upper left pixel are the row's low and high byte; the rest depends on first label and row.
        """
        path = tmp_path / "photos"
        path.mkdir()
        shards, tables = [], []
        for split, labels in splits.items():
            name, rows = f"{split}-000000.tar", []
            with tarfile.open(path / name, "w", format=tarfile.GNU_FORMAT) as tar:
                for row, own in enumerate(labels):
                    data = (
                        b"no image"
                        if row in (bad or {}).get(split, [])
                        else picture(row, (drawn or splits)[split][row])
                    )
                    member = tarfile.TarInfo(f"{split}{row}.png")
                    member.size = len(data)
                    rows.append(
                        {
                            "key": f"{split}{row}",
                            "offset": tar.offset + 512,
                            "size": len(data),
                            "ext": "png",
                            "labels": own,
                            "width": SIDE,
                            "height": SIDE,
                            "xxh128": content_hash(data),
                        }
                    )
                    tar.addfile(member, io.BytesIO(data))
            content = (path / name).read_bytes()
            shards.append(Shard(name, split, len(rows), len(content), hashlib.sha256(content).hexdigest()))
            table = pa.Table.from_pylist(rows, ROWS)
            tables.append(
                table.append_column("group", [[groups(row) for row in range(len(rows))]]) if groups else table
            )
        return write_dataset(path, shards, tables, classes, {}, {})

    return make


def picture(row: int, labels: list[int]) -> bytes:
    pixels = np.random.default_rng([row, *labels]).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    pixels[SIDE // 2 :, :, :] = 20 + 30 * (labels[0] if labels else 0)
    pixels[0, 0, :2] = row % 256, row // 256
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
