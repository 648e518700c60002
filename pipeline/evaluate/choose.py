"""Chooses the images that are worth labelling first, and writes them as files, a table and a sheet; entry point: `run`.

Shapes: D features, n candidates.
"""

from pathlib import Path

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
from pipeline.evaluate.classify import extract
from pipeline.evaluate.loaded_model import LoadedModel, check_outputs, load_model, print_unreadable
from pipeline.evaluate.predict import class_names, with_readable_labels
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
    images = open_given(config, class_names(config, loaded) or [], loaded.pixels)
    split = images.split
    candidates = np.sort(random_numbers.permutation(len(split), config.seed, _CANDIDATES)[: config.candidates])
    with loaded.reading(split, config) as reader:
        seen = extract(loaded.features, reader, candidates)
    check_outputs(config.weights, config.places, seen, split, candidates)
    print_unreadable(seen.problems, split, "left out")
    rows, found = candidates[seen.readable], coverage.directions(seen.values[seen.readable])
    group_names = split.group_names
    if len(found) < config.num:
        raise UserError(
            f"of {counted(len(candidates), 'candidate')} {len(found):,} can be read, fewer than num = {config.num:,}."
            " Raise candidates, or lower num."
        )
    chosen = coverage.choose(found, config.num)
    with new_output(Path(config.out), is_folder=True) as folder:
        rows = rows[chosen]
        paths = _write_images(folder, split, rows)
        columns = {
            "path": paths,
            "label": [label or "" for label in images.labels(rows)],
            "key": split.keys(rows),
            **({} if group_names is None else {"group": group_names[rows]}),
        }
        table = pa.table(columns).to_pylist()
        (folder / "choice.csv").write_bytes(table_csv(table))
        drawn = dict(zip(rows.tolist(), paths[:_MAX_DRAWN], strict=False))
        (folder / "sheet.png").write_bytes(_draw(config, loaded, images, drawn))
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


def _draw(config: ChooseConfig, loaded: LoadedModel, images: AdhocSplit, paths: dict[int, str]) -> bytes:
    """A PNG of the first images. paths: of their files, by row."""
    kept, pixels = loaded.shown(config, images.split, np.array([*paths]))
    labels = with_readable_labels(images, loaded).labels(kept)
    tiles = [
        Tile(image, [Path(paths[row]).stem, *filter(None, [label])])
        for image, row, label in zip(pixels, kept.tolist(), labels, strict=True)
    ]
    figure = sheet(tiles, "Images to label first", f"{len(kept)} of {config.num:,}.")
    return png(figure, DPI, loaded.pixels.describe_shown())
