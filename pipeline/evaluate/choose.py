"""Chooses the images that are worth labelling first, and writes them as files, a table and a sheet; entry point: `run`.

Shapes: D features, n candidates.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.files import new_output, table_csv
from pipeline.base.gallery import DPI, MAX_IMAGES, Tile, sheet
from pipeline.base.page import png
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import command_line, counted
from pipeline.data.dataset.split import Split
from pipeline.data.loading.decode import inspect
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.evaluate import coverage
from pipeline.evaluate.adhoc_split import AdhocSplit, is_dataset, open_places
from pipeline.evaluate.loaded_model import LoadedModel, load_model, print_unreadable
from pipeline.evaluate.predict import read_class_names, with_readable_labels
from pipeline.monitor.mlflow.weights import with_local_weights
from pipeline.settings.commands.weights import ChooseConfig

_CANDIDATES = Purpose.named("candidates of a choice")
_MAX_DRAWN = 10 * MAX_IMAGES


def run(config: ChooseConfig) -> list[str]:
    """Choose `config.num` images and write them to `config.out`. Returns their keys, the most typical first.

    Raises UserError before anything is written.
    """
    config = with_local_weights(config)
    loaded = load_model(config)
    names = read_class_names(config.class_names) or loaded.extra.get("classes") or []
    splits = {"split": "images"} | ({"labelled_split": "labelled"} if config.labelled else {})
    images, *labelled = open_places(config, names, loaded.pixels, **splits)
    candidates = np.sort(random_numbers.permutation(len(images.split), config.seed, _CANDIDATES)[: config.candidates])
    rows, values = _features(config, loaded, images.split, candidates, "images")
    mean = values.mean(0)
    found = coverage.directions(values, mean)
    covered = np.full(len(found), -1, np.float32)
    group_names = images.split.group_names
    for of in labelled:
        _, theirs = _features(config, loaded, of.split, _with_labels(of, config), "labelled")
        covered, _ = coverage.nearest(found, coverage.directions(theirs, mean))
    chosen = coverage.choose(found, config.num, covered)
    if len(chosen) < config.num:
        raise UserError(
            f"of {counted(len(candidates), 'candidate')} {len(chosen):,} can be read and are not copies of each other"
            f" or of labelled ones, fewer than num = {config.num:,}. Raise candidates, or lower num."
        )
    shares = np.bincount(coverage.nearest(found, found[chosen])[1], minlength=len(chosen)) / len(found)
    with new_output(Path(config.out), is_folder=True) as folder:
        rows, of_images = rows[chosen], images.split
        columns = {
            "path": _write_images(folder, of_images, rows),
            "label": [label or "" for label in images.labels(rows)],
            "key": of_images.keys(rows),
            # About how many of all images each chosen one is the most similar of the chosen ones to.
            "stands_for": [round(share * len(of_images)) for share in shares.tolist()],
            **({} if group_names is None else {"group": group_names[rows]}),
        }
        table = pa.table(columns).to_pylist()
        (folder / "choice.csv").write_bytes(table_csv(table))
        (folder / "sheet.png").write_bytes(_draw(config, loaded, images, rows, table))
    print(f"{len(chosen):,} of {counted(len(found), 'candidate')} chosen, in {config.out}")
    table_file, more = f"{config.out}/choice.csv", [] if group_names is None else ["group_column=group"]
    command = command_line("shard", f"source={table_file}", *more)
    print(f"fill in the column label of {table_file}, then: {command} out=...")
    return [line["key"] for line in table]


def _with_labels(labelled: AdhocSplit, config: ChooseConfig) -> np.ndarray:
    """int64: the rows of images with a label, if they are of a data set that has classes; of others, all."""
    if not (is_dataset(config.labelled) and labelled.label_names):
        return np.arange(len(labelled.split))
    rows = np.flatnonzero(np.diff(labelled.split.label_offsets))
    if without := len(labelled.split) - len(rows):
        print(f"labelled: {counted(without, 'image')} without a label not counted")
    if not len(rows):
        raise UserError(f"labelled = {config.labelled[0]}: no image of split {config.labelled_split!r} has a label.")
    return rows


def _features(
    config: ChooseConfig, loaded: LoadedModel, split: Split, rows: np.ndarray, setting: str
) -> tuple[np.ndarray, np.ndarray]:
    """The rows that can be read, and their features, float32 (n, D). The others are reported."""
    seen = loaded.features_of(config, split, rows, ", ".join(getattr(config, setting)))
    print_unreadable(seen.problems, split.keys, setting)
    if seen.problems:
        print(f"{setting}: {counted(len(seen.problems), 'unreadable image')} of {len(rows):,} left out")
    return rows[seen.readable], seen.values[seen.readable]


def _write_images(folder: Path, split: Split, rows: np.ndarray) -> list[str]:
    """Write the files. Returns their paths in the folder."""
    (folder / "images").mkdir(parents=True)
    reader, paths = ShardReader(split), []
    for number, row in enumerate(rows.tolist(), 1):
        data = reader.read(row)
        paths.append(f"images/{number:0{len(str(len(rows)))}}.{inspect(data, decode_all=False).ext}")
        (folder / paths[-1]).write_bytes(data)
    return paths


def _draw(
    config: ChooseConfig, loaded: LoadedModel, images: AdhocSplit, rows: np.ndarray, table: list[dict[str, Any]]
) -> bytes:
    """A PNG of the first images. table: a line for each of the rows."""
    kept, pixels = loaded.shown(config, images.split, rows[:_MAX_DRAWN])
    labels = with_readable_labels(images, loaded).labels(kept)
    lines = [table[place] for place in np.flatnonzero(np.isin(rows, kept)).tolist()]
    tiles = []
    for image, line, label in zip(pixels, lines, labels, strict=True):
        about = f"stands for {line['stands_for']:,}"
        tiles.append(Tile(image, [Path(line["path"]).stem, about, *filter(None, [label])]))
    about = counted(len(images.split), "image")
    note = (
        f"{len(kept)} of {len(rows):,}. Each stands for about so many of {about} that it is the most similar chosen"
        " one to."
    )
    figure = sheet(tiles, "Images to label first", note)
    return png(figure, DPI, loaded.pixels.describe_shown())
