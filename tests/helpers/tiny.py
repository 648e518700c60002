"""A tiny data set, for the tests that train."""

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.data.dataset.manifest import INFO, ROWS, Shard, targets_field, write_dataset
from pipeline.data.loading.views import Views, ViewWriter, train_views
from pipeline.data.storage.content import content_hash
from pipeline.settings.run import AugmentConfig

NUM_CLASSES = 4


def train_view(config: AugmentConfig, seed: int, image_size: int) -> ViewWriter:
    """`train_views` for one view of 8-bit RGB."""
    return train_views((Views(1, image_size, config),), seed)


def make_dataset(
    path: Path,
    splits: dict[str, int],
    per_shard: int = 40,
    size: int = 16,
    seed: int = 0,
    labelled: bool = True,
    pixels: Pixels = RGB8,
    targets: Sequence[str] = (),
) -> Path:
    """Shards of noisy one-colour pictures, `size` px, whose colour tells their class; splits: name -> samples.

    pixels: other than 8-bit RGB are .npy files, whose channels have the values of red, green and blue in turn,
    stretched to their range. targets: names of at most three numbers, the means of red, green and blue; a third of the
    samples lack the last one.
    """
    ext = "png" if pixels.is_rgb8 else "npy"
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
                    picture = np.clip(colours[label] + rng.normal(0, 40, (size, size, 3)), 0, 255).astype(np.uint8)
                    buffer = io.BytesIO()
                    if pixels.is_rgb8:
                        Image.fromarray(picture).save(buffer, "PNG")
                    else:
                        low, high = np.array(pixels.low), np.array(pixels.high)
                        share = picture[..., np.arange(pixels.num_channels) % 3] / 255
                        np.save(buffer, (low + share * (high - low)).astype(pixels.type))
                    data = buffer.getvalue()
                    for suffix, content in ((ext, data), ("cls", str(label).encode()))[: 2 if labelled else 1]:
                        member = tarfile.TarInfo(f"{split}{i:05d}.{suffix}")
                        member.size = len(content)
                        if suffix == ext:
                            offset = tar.offset + 512
                        tar.addfile(member, io.BytesIO(content))
                    rows.append(
                        {
                            "key": f"{split}{i:05d}",
                            "offset": offset,
                            "size": len(data),
                            "ext": ext,
                            "labels": [label] * labelled,
                            "width": size,
                            "height": size,
                            "xxh128": content_hash(data),
                            **({"targets": means(picture, len(targets), lacks_last=i % 3 == 0)} if targets else {}),
                        }
                    )
            content = (path / name).read_bytes()
            shards.append(Shard(name, split, len(rows), len(content), hashlib.sha256(content).hexdigest()))
            schema = ROWS.append(targets_field(len(targets))) if targets else ROWS
            tables.append(pa.Table.from_pylist(rows, schema))
    classes = [f"class{c}" for c in range(NUM_CLASSES)] if labelled else []
    write_dataset(path, shards, tables, classes, {"made by": "tests"}, {}, pixels=pixels, targets=targets)
    return path


def rename_classes(path: Path, classes: list[str]) -> None:
    """Give the classes of a data set other names."""
    info = json.loads((path / INFO).read_text())
    del info["checksum"]
    (path / INFO).write_text(json.dumps({**info, "classes": classes}))


def means(picture: np.ndarray, count: int, lacks_last: bool) -> list[float | None]:
    found: list[float | None] = picture.mean((0, 1))[:count].tolist()
    return [*found[:-1], None if lacks_last else found[-1]]
