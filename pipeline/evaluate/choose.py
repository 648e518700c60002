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
from pipeline.evaluate.adhoc_split import AdhocSplit, open_given
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
    images = open_given(config, config.split, names, loaded.pixels)
    candidates = np.sort(random_numbers.permutation(len(images.split), config.seed, _CANDIDATES)[: config.candidates])
    seen = loaded.features_of(config, images.split, candidates, ", ".join(config.images))
    print_unreadable(seen.problems, images.split.keys, "left out")
    rows, found = candidates[seen.readable], coverage.directions(seen.values[seen.readable])
    group_names = images.split.group_names
    if len(found) < config.num:
        raise UserError(
            f"of {counted(len(candidates), 'candidate')} {len(found):,} can be read, fewer than num = {config.num:,}."
            " Raise candidates, or lower num."
        )
    chosen = coverage.choose(found, config.num)
    with new_output(Path(config.out), is_folder=True) as folder:
        rows, of_images = rows[chosen], images.split
        columns = {
            "path": _write_images(folder, of_images, rows),
            "label": [label or "" for label in images.labels(rows)],
            "key": of_images.keys(rows),
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


def _write_images(folder: Path, split: Split, rows: np.ndarray) -> list[str]:
    """Write the files. Returns their paths in the folder."""
    (folder / "images").mkdir(parents=True)
    reader, paths = ShardReader(split), []
    for number, row in enumerate(rows.tolist(), 1):
        data = reader.read(row)
        paths.append(f"images/{number:0{len(str(len(rows)))}}.{inspect(data).ext}")
        (folder / paths[-1]).write_bytes(data)
    return paths


def _draw(
    config: ChooseConfig, loaded: LoadedModel, images: AdhocSplit, rows: np.ndarray, table: list[dict[str, Any]]
) -> bytes:
    """A PNG of the first images. table: a line for each of the rows."""
    kept, pixels = loaded.shown(config, images.split, rows[:_MAX_DRAWN])
    labels = with_readable_labels(images, loaded).labels(kept)
    names = [Path(table[place]["path"]).stem for place in np.flatnonzero(np.isin(rows, kept)).tolist()]
    tiles = [
        Tile(image, [name, *filter(None, [label])]) for image, name, label in zip(pixels, names, labels, strict=True)
    ]
    figure = sheet(tiles, "Images to label first", f"{len(kept)} of {len(rows):,}.")
    return png(figure, DPI, loaded.pixels.describe_shown())
