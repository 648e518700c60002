"""Writes the features of images as a table, and draws the images that are most similar to a given one; entry point:
`run`.

Shapes: D features, n images.
"""

from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.base.errors import UserError
from pipeline.base.files import as_bytes
from pipeline.base.gallery import DPI, Tile, sheet
from pipeline.base.page import png
from pipeline.base.words import counted, printable
from pipeline.data.dataset.bad_budget import BadBudget
from pipeline.data.dataset.split import Split
from pipeline.data.storage.atomic import replacing
from pipeline.evaluate.adhoc_split import AdhocSplit, open_adhoc_split
from pipeline.evaluate.classify import extract
from pipeline.evaluate.loaded_model import (
    LoadedModel,
    check_outputs,
    load_model,
    print_unreadable,
    refuse_none_readable,
)
from pipeline.evaluate.predict import open_images
from pipeline.model import checkpoint_note
from pipeline.monitor.mlflow.weights import with_local_weights
from pipeline.process.outputs import try_output
from pipeline.settings.commands.weights import FeaturesConfig

# Images whose features are in memory at a time, about.
_PART = 8192
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
    if config.like:
        try_output("sheet", _sheet(config), "file")
    loaded = load_model(config)
    images, _ = open_images(config, loaded)
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


def _write_table(
    config: FeaturesConfig, loaded: LoadedModel, images: AdhocSplit, wanted: np.ndarray | None
) -> np.ndarray:
    """Write the table, a part at a time. Returns the cosine similarity of each image to `wanted`, float64 (n,).

    It is minus infinity for an unreadable image, and 0 for all if nothing is wanted. An unreadable image has no vector
    in the table, and the reason in `problem`.
    """
    split, out, where = images.split, Path(config.out), ", ".join(config.images)
    similarities, problems = np.full(len(split), -np.inf), dict[int, str]()
    # Whole batches, so that the parts do not change the values.
    step = max(1, _PART // config.batch) * config.batch
    about = {"weights": config.weights, "image_size": str(loaded.image_size), "precision": config.precision}
    if note := checkpoint_note(loaded.extra):
        about["checkpoint"] = note
    schema = TABLE.with_metadata({name: as_bytes(text) for name, text in about.items()})
    with (
        loaded.reading(split, config) as reader,
        replacing(out) as file,
        pq.ParquetWriter(file, schema) as writer,
    ):
        of_part = replace(reader, budget=BadBudget(1.0))  # What may be unreadable is a share of all images.
        for start in range(0, len(split), step):
            rows = np.arange(start, min(start + step, len(split)))
            seen = extract(loaded.features, of_part, rows)
            problems = reader.problems_of_all([problems, seen.problems], len(split))
            if seen.readable.any():
                check_outputs(config.weights, where, seen, split, rows)
            found = 0.0 if wanted is None else _unit(seen.values) @ wanted
            similarities[rows] = np.where(seen.readable, found, -np.inf)
            vectors = [vector if valid else None for vector, valid in zip(seen.values, seen.readable, strict=True)]
            reasons = [problems.get(row) for row in rows.tolist()]
            writer.write_table(pa.table([split.keys(rows), images.labels(rows), vectors, reasons], schema))
        refuse_none_readable(where, problems, split, len(split))
        if config.like:  # A kill before the new sheet is drawn leaves no older one beside the new table.
            _sheet(config).unlink(missing_ok=True)
    print_unreadable(problems, split.keys, "no vector")
    unread = f", {len(problems):,} of them unreadable" if problems else ""
    print(f"{counted(len(split), 'image')}{unread}, {seen.values.shape[1]:,} features each. table: {out}")
    return similarities


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
    figure = sheet(tiles, "Similar images", note, loaded.image_size, of_query)
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
