"""Writes the features of images, or of their patches, and draws the images that are most similar to a given one; entry
point: `run`.

Shapes: D features, n images, H, W height and width, C channels.
"""

import io
import math
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from pipeline.base.errors import UserError
from pipeline.base.files import as_bytes, new_output
from pipeline.base.gallery import DPI, Tile, sheet
from pipeline.base.page import png
from pipeline.base.words import counted, printable, si
from pipeline.data.dataset.split import Split
from pipeline.data.storage.atomic import replacing
from pipeline.evaluate.adhoc_split import AdhocSplit, open_adhoc_split
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
from pipeline.process.outputs import existing_folder, hold, try_output
from pipeline.settings.commands.weights import FeaturesConfig

# A row and its features; or why its image cannot be read.
Item = tuple[int, np.ndarray | str]
_PART = 8192  # Images whose features are in memory at a time, about.
# Lists of fixed size would fit, but pyarrow cannot read such a column again if it has nulls.
TABLE = pa.schema(
    [("key", pa.string()), ("label", pa.string()), ("vector", pa.list_(pa.float32())), ("problem", pa.string())]
)
# Similar images that are drawn, at most.
_NUM_LIKE = 16


def run(config: FeaturesConfig) -> list[tuple[str, float]]:
    """Write the features of all images to `config.out`, and with `config.like` the sheet of the most similar ones.

    Returns (key, cosine similarity) of these, the most similar first; none without `config.like`. Raises UserError
    before anything is written.
    """
    config = with_local_weights(config)
    if config.tokens == "image":
        hold(Path(config.out), is_file=True)
        if config.like:
            try_output("sheet", _sheet(config), "new")
    loaded = load_model(config)
    if config.tokens == "patches":
        refuse_without_patches(config.weights, loaded.model)
    images, _ = open_images(config, loaded)
    if config.tokens == "patches":
        _write_patches(config, loaded, images)
        return []
    if not config.like:
        _write_table(config, loaded, images, None)
        return []
    query = open_adhoc_split([config.like], "", "none", [], "like", loaded.pixels).split
    if len(query) != 1:
        raise UserError(f"like = {config.like} has {counted(len(query), 'image')}. Give the path of one.")
    wanted = _unit(loaded.features_of(config, query, np.zeros(1, np.int64), f"like = {config.like}").values)[0]
    similarities = _write_table(config, loaded, images, wanted)
    # Stable: of equally similar images, the first comes first.
    rows = np.argsort(-similarities, kind="stable")[: min(_NUM_LIKE, int(np.isfinite(similarities).sum()))]
    return _draw_neighbours(config, loaded, query, images, rows, similarities[rows])


def _sheet(config: FeaturesConfig) -> Path:
    return Path(config.out).with_suffix(".similar.png")


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


def _write_table(
    config: FeaturesConfig, loaded: LoadedModel, images: AdhocSplit, wanted: np.ndarray | None
) -> np.ndarray:
    """Write the table, a part at a time. Returns the cosine similarity of each image to `wanted`, float64 (n,).

    It is minus infinity for an unreadable image, and 0 for all if nothing is wanted. An unreadable image has no vector
    in the table, and the reason in `problem`.
    """
    split, out = images.split, Path(config.out)
    similarities, problems = np.full(len(split), -np.inf), dict[int, str]()
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
            if found:
                similarities[[*found]] = 0.0 if wanted is None else _unit(np.stack([*found.values()])) @ wanted
            columns = ([of.get(row) for row in part] for of in (found, problems))
            writer.write_table(pa.table([split.keys([*part]), images.labels(part), *columns], schema))
        refuse_none_readable(", ".join(config.images), problems, split, len(split))
        if config.like:  # A kill before the new sheet is drawn leaves no older one beside the new table.
            _sheet(config).unlink(missing_ok=True)
    print_unreadable(problems, split.keys, "no vector")
    print(f"{_counted(split, problems)}, {loaded.model.config.num_features:,} features each. table: {out}")
    return similarities


def _counted(split: Split, problems: dict[int, str]) -> str:
    return counted(len(split), "image") + (f", {len(problems):,} of them unreadable" if problems else "")


def _write_patches(config: FeaturesConfig, loaded: LoadedModel, images: AdhocSplit) -> None:
    """Write the features of the patches of each image: float16 (rows, columns, D), into a folder.

    Images that cannot be read are left out. Raises UserError for a disk that is too small, before anything is computed.
    """
    split, out = images.split, Path(config.out)
    vit, crop = loaded.vit.config, loaded.view.eval_crop
    shape = (*vit.grid, vit.width)
    size, free = 2 * len(split) * math.prod(shape), shutil.disk_usage(existing_folder(out)).free
    about = f"{counted(len(split), 'image')} of {shape[0]} x {shape[1]} patches with"
    print(f"{about} {shape[2]:,} features as float16: {si(size, 'B')}", flush=True)
    if size > free:
        raise UserError(
            f"out = {out}: {si(size, 'B')} are needed, and {si(free, 'B')} are free there. Choose another disk, fewer"
            " images, or a smaller image_size."
        )
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


def _draw_neighbours(
    config: FeaturesConfig,
    loaded: LoadedModel,
    query: Split,
    images: AdhocSplit,
    rows: np.ndarray,
    similarities: np.ndarray,
) -> list[tuple[str, float]]:
    _, (image,) = loaded.shown(config, query, np.zeros(1, np.int64))
    _, pixels = loaded.shown(config, images.split, rows)
    keys, labels = images.split.keys(rows), images.labels(rows)
    about = list(zip(keys, similarities.tolist(), labels, strict=True))
    tiles = [
        Tile(shown, [*filter(None, [label]), PurePosixPath(key).stem, f"{similarity:.3f}"])
        for shown, (key, similarity, label) in zip(pixels, about, strict=True)
    ]
    note = "The first image, and those whose features have the largest cosine similarity to its own."
    of_query = [[Tile(image, [Path(config.like).stem])]]
    figure = sheet(tiles, "Similar images", note, of_query)
    with replacing(_sheet(config)) as file:
        file.write(png(figure, DPI, loaded.pixels.describe_shown()))
    for key, similarity, label in about:
        print(printable(f"{similarity:.4f}  {key}  {label or ''}".rstrip()))
    print(f"sheet: {_sheet(config)}")
    return [(key, similarity) for key, similarity, _ in about]


def _unit(values: np.ndarray) -> np.ndarray:
    """(n, D) -> float64 (n, D), each row of length 1, or 0 if it is 0."""
    values = values.astype(np.float64)
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-300)
