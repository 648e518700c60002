"""Writes the features of images, or of their patches; entry point: `run`.

Shapes: D features, n images, H, W height and width, C channels.
"""

import io
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from pipeline.base.files import as_bytes, new_output
from pipeline.base.words import counted, si
from pipeline.data.dataset.split import Split
from pipeline.evaluate.adhoc_split import AdhocSplit
from pipeline.evaluate.classify import requests
from pipeline.evaluate.loaded_model import (
    LoadedModel,
    load_model,
    print_unreadable,
    refuse_none_readable,
    refuse_not_finite,
    refuse_without_patches,
)
from pipeline.evaluate.predict import open_images
from pipeline.model import checkpoint_note
from pipeline.monitor.mlflow.weights import with_local_weights
from pipeline.process.outputs import hold
from pipeline.settings.commands.weights import FeaturesConfig

# A row and its features; or why its image cannot be read.
Item = tuple[int, np.ndarray | str]
_PART = 8192  # Images whose features are in memory at a time, about.
# Lists of fixed size would fit, but pyarrow cannot read such a column again if it has nulls.
TABLE = pa.schema(
    [("key", pa.string()), ("label", pa.string()), ("vector", pa.list_(pa.float32())), ("problem", pa.string())]
)


def run(config: FeaturesConfig) -> None:
    """Write the features of all images to `config.out`. Raises UserError before anything is written."""
    config = with_local_weights(config)
    if config.tokens == "image":
        hold(Path(config.out), is_file=True)
    loaded = load_model(config)
    if config.tokens == "patches":
        refuse_without_patches(config.weights, loaded.model)
    images, _ = open_images(config, loaded)
    write = _write_patches if config.tokens == "patches" else _write_table
    write(config, loaded, images)


def _metadata(config: FeaturesConfig, loaded: LoadedModel, image_size: str, **more: str) -> dict[str, bytes]:
    about = {"weights": config.weights, "image_size": image_size, "precision": config.precision, **more}
    if note := checkpoint_note(loaded.extra):
        about["checkpoint"] = note
    return {name: as_bytes(text) for name, text in about.items()}


def _features(
    config: FeaturesConfig, loaded: LoadedModel, split: Split, compute: Callable[[Tensor], Tensor]
) -> Generator[Item, None, None]:
    """Yield the features of each image in order. compute: images (B, H, W, C) of a batch -> (B, ...).

    Raises UserError for features that are not finite, and for more unreadable images than the budget allows.
    """
    numbers = np.arange(len(split))
    with (
        loaded.reading(split, config) as reader,
        reader.open(requests(numbers, config.batch), len(split)) as (batches, problems),
    ):
        for batch in batches:
            with torch.no_grad():
                values = compute(batch.images).cpu().numpy()
            rows, readable = batch.rows, batch.valid.numpy()
            finite = np.isfinite(values).reshape(len(rows), -1).all(1)
            refuse_not_finite(config.weights, split, rows, rows[readable & ~finite])
            for row, value, valid in zip(rows.tolist(), values, readable.tolist(), strict=True):
                yield row, value if valid else problems[row]
        reader.problems_of_all([problems], len(split))


def _write_table(config: FeaturesConfig, loaded: LoadedModel, images: AdhocSplit) -> None:
    """Write the table, a part at a time. An unreadable image has no vector in it, and the reason in `problem`."""
    split, out = images.split, Path(config.out)
    problems = dict[int, str]()
    # Whole batches, so that the parts do not change the values.
    step = max(1, _PART // config.batch) * config.batch
    schema = TABLE.with_metadata(_metadata(config, loaded, str(loaded.image_size)))
    items = _features(config, loaded, split, lambda pixels: loaded.features(pixels).float())
    with (
        closing(items),
        new_output(out, is_folder=False) as path,
        path.open("wb") as file,
        pq.ParquetWriter(file, schema) as writer,
    ):
        while part := dict(islice(items, step)):
            problems |= {row: why for row, why in part.items() if isinstance(why, str)}
            found = {row: vector for row, vector in part.items() if not isinstance(vector, str)}
            columns = ([of.get(row) for row in part] for of in (found, problems))
            writer.write_table(pa.table([split.keys([*part]), images.labels(part), *columns], schema))
        refuse_none_readable(", ".join(config.images), problems, split, len(split))
    print_unreadable(problems, split.keys, "no vector")
    print(f"{_counted(split, problems)}, {loaded.model.config.num_features:,} features each. table: {out}")


def _counted(split: Split, problems: dict[int, str]) -> str:
    return counted(len(split), "image") + (f", {len(problems):,} of them unreadable" if problems else "")


def _write_patches(config: FeaturesConfig, loaded: LoadedModel, images: AdhocSplit) -> None:
    """Write the features of the patches of each image that can be read: float16 (rows, columns, D), into a folder."""
    split, out = images.split, Path(config.out)
    vit, crop = loaded.vit.config, loaded.view.eval_crop
    shape = (*vit.grid, vit.width)
    about = f"{counted(len(split), 'image')} of {shape[0]} x {shape[1]} patches with"
    print(f"{about} {shape[2]:,} features as float16: {si(2 * len(split) * math.prod(shape), 'B')}", flush=True)
    items = _features(config, loaded, split, lambda pixels: loaded.patch_features(pixels).half())
    problems = dict[int, str]()

    def readable() -> Iterator[tuple[int, np.ndarray]]:
        for row, value in items:
            if isinstance(value, str):
                problems[row] = value
            else:
                yield row, value

    facts = _metadata(config, loaded, image_size=str(loaded.image_size), eval_crop=crop)
    with closing(items), new_output(out, is_folder=True) as path:
        _fill(path, readable(), images, facts)
        refuse_none_readable(", ".join(config.images), problems, split, len(split))
    print_unreadable(problems, split.keys, "left out")
    print(f"{_counted(split, problems)}. features of patches: {out}")
    if crop != "resize":
        print("note: these are patches of the central crop; eval_crop=resize reads the whole image")


def _fill(path: Path, items: Iterator[tuple[int, np.ndarray]], images: AdhocSplit, facts: dict[str, bytes]) -> None:
    path.mkdir()
    files: dict[int, str] = {}
    for row, values in items:
        files[row] = f"{row:08}.npy"
        np.save(content := io.BytesIO(), values)
        (path / files[row]).write_bytes(content.getbuffer())  # np.save would not say that a disk is full.
    schema = pa.schema([*TABLE][:2], facts).append(pa.field("file", pa.string()))
    columns = [images.split.keys([*files]), images.labels(files), [*files.values()]]
    pq.write_table(pa.table(columns, schema), path / "index.parquet")
