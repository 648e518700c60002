"""Writes the features of images, or of their patches; entry point: `run`.

Shapes: D features, n images, H, W height and width, C channels.
"""

import io
import math
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

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
    out, is_patches = Path(config.out), config.tokens == "patches"
    if not is_patches:
        hold(out, is_file=True)
    loaded = load_model(config)
    if is_patches:
        refuse_without_patches(config.weights, loaded.model)
    images, _ = open_images(config, loaded)
    split, crop = images.split, loaded.view.eval_crop
    about = {"weights": config.weights, "image_size": str(loaded.image_size), "precision": config.precision}
    if is_patches:
        about["eval_crop"] = crop
        rows, columns, width = shape = (*loaded.vit.config.grid, loaded.vit.config.width)
        size = si(2 * len(split) * math.prod(shape), "B")
        of_images = f"{counted(len(split), 'image')} of {rows} x {columns} patches"
        print(f"{of_images} with {width:,} features as float16: {size}", flush=True)
    if note := checkpoint_note(loaded.extra):
        about["checkpoint"] = note
    facts = {name: as_bytes(text) for name, text in about.items()}
    write = _write_patches if is_patches else _write_table
    items = _features(config, loaded, split)
    with closing(items), new_output(out, is_folder=is_patches) as path:
        problems = write(path, items, images, facts)
        refuse_none_readable(config.places, problems, split, len(split))
    print_unreadable(problems, split, "left out" if is_patches else "no vector")
    told = counted(len(split), "image") + (f", {len(problems):,} of them unreadable" if problems else "")
    if not is_patches:
        print(f"{told}, {loaded.model.config.num_features:,} features each. table: {out}")
        return
    print(f"{told}. features of patches: {out}")
    if crop != "resize":
        print("note: these are patches of the central crop; eval_crop=resize reads the whole image")


def _features(config: FeaturesConfig, loaded: LoadedModel, split: Split) -> Generator[Item, None, None]:
    """Yield the features of each image in order, or of its patches: float16 (rows, columns, D).

    Raises UserError for features that are not finite, and for more unreadable images than the budget allows.
    """
    numbers = np.arange(len(split))
    with (
        loaded.reading(split, config) as reader,
        reader.open(requests(numbers, config.batch), len(split)) as (batches, problems),
    ):
        for batch in batches:
            with torch.no_grad():
                if config.tokens == "patches":
                    found = loaded.patch_features(batch.images).half()
                else:
                    found = loaded.features(batch.images).float()
            values, rows, readable = found.cpu().numpy(), batch.rows, batch.valid.numpy()
            finite = np.isfinite(values).reshape(len(rows), -1).all(1)
            refuse_not_finite(config.weights, split, rows, rows[readable & ~finite])
            for row, value, valid in zip(rows.tolist(), values, readable.tolist(), strict=True):
                yield row, value if valid else problems[row]
        reader.problems_of_all([problems], len(split))


def _write_table(path: Path, items: Iterator[Item], images: AdhocSplit, facts: dict[str, bytes]) -> dict[int, str]:
    """Write the table, a part at a time. An unreadable image has no vector in it, and the reason in `problem`.

    Returns row -> reason of these.
    """
    problems, schema = dict[int, str](), TABLE.with_metadata(facts)
    with path.open("wb") as file, pq.ParquetWriter(file, schema) as writer:
        while part := dict(islice(items, _PART)):
            problems |= {row: why for row, why in part.items() if isinstance(why, str)}
            found = {row: vector for row, vector in part.items() if not isinstance(vector, str)}
            columns = ([of.get(row) for row in part] for of in (found, problems))
            writer.write_table(pa.table([images.split.keys([*part]), images.labels(part), *columns], schema))
    return problems


def _write_patches(path: Path, items: Iterator[Item], images: AdhocSplit, facts: dict[str, bytes]) -> dict[int, str]:
    """Write a file for each image that can be read, into a folder. Returns row -> reason of the others."""
    problems, files = dict[int, str](), dict[int, str]()
    path.mkdir()
    for row, value in items:
        if isinstance(value, str):
            problems[row] = value
            continue
        files[row] = f"{row:08}.npy"
        np.save(content := io.BytesIO(), value)
        (path / files[row]).write_bytes(content.getbuffer())  # np.save would not say that a disk is full.
    schema = pa.schema([*TABLE][:2], facts).append(pa.field("file", pa.string()))
    columns = [images.split.keys([*files]), images.labels(files), [*files.values()]]
    pq.write_table(pa.table(columns, schema), path / "index.parquet")
    return problems
