"""Chooses the images that are worth labelling first, and writes them as files, a table and a sheet; entry point: `run`.

Shapes: D features, n images.
"""

from pathlib import Path

import numpy as np

from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.files import new_output, table_csv
from pipeline.base.gallery import DPI, MAX_IMAGES
from pipeline.base.page import png
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted, printable
from pipeline.data.dataset.split import Split
from pipeline.data.loading.decode import inspect
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.evaluate.adhoc_split import AdhocSplit, open_adhoc_split
from pipeline.evaluate.loaded_model import LoadedModel, check_outputs, load_model
from pipeline.evaluate.predict import read_class_names, with_readable_labels
from pipeline.evaluate.probes.features import extract
from pipeline.explain import coverage, galleries
from pipeline.explain.explain import read_images
from pipeline.monitor.mlflow.weights import with_local_weights
from pipeline.settings.commands.weights import ChooseConfig

_CANDIDATES, _AT_RANDOM = Purpose.named("candidates of a choice"), Purpose.named("choice at random")
_MAX_DRAWN = 10 * MAX_IMAGES


def run(config: ChooseConfig) -> list[str]:
    """Choose `config.num` images and write them to `config.out`. Returns their keys, the most typical first.

    Raises UserError before anything is written.
    """
    config = with_local_weights(config)
    loaded = load_model(config)
    names = read_class_names(config.class_names) or loaded.extra.get("classes") or []
    images = with_readable_labels(open_adhoc_split(config.images, config.split, config.exclude, names), loaded)
    labelled = None
    if config.labelled:
        labelled = open_adhoc_split(config.labelled, config.labelled_split, config.exclude, names, "labelled").split
    with new_output(Path(config.out), is_folder=True) as folder:
        for line in images.split.notes():
            print(line)
        candidates = _random_rows(len(images.split), config.candidates, config.seed, _CANDIDATES)
        rows, values = _features(config, loaded, images.split, candidates, "images")
        if len(rows) < config.num:
            raise UserError(f"images has {counted(len(rows), 'readable image')}, fewer than num = {config.num:,}.")
        mean = values.mean(0)
        found = coverage.directions(values, mean)
        covered = None
        if labelled is not None:
            _, theirs = _features(config, loaded, labelled, np.arange(len(labelled)), "labelled")
            covered, _ = coverage.nearest(found, coverage.directions(theirs, mean))
        chosen = coverage.choose(found, config.num, covered)
        folder.mkdir()
        table = _write_images(folder, images, rows[chosen], _stands_for(found, chosen, len(images.split)))
        _draw(config, loaded, images, rows[chosen], table, folder)
    _report(config, found, chosen, covered, len(images.split))
    return [line["key"] for line in table]


def _random_rows(num_rows: int, most: int, seed: int, purpose: Purpose) -> np.ndarray:
    """int64, ascending: all rows, or `most` random ones."""
    rows = np.arange(num_rows)
    return np.sort(rows[np.argsort(random_numbers.bits(seed, purpose, rows), kind="stable")[:most]])


def _features(
    config: ChooseConfig, loaded: LoadedModel, split: Split, rows: np.ndarray, setting: str
) -> tuple[np.ndarray, np.ndarray]:
    """The rows that can be read, and their features, float32 (n, D). The others are reported."""
    with loaded.reading(split, config, len(rows)) as reader:
        seen = extract(loaded.features, reader, rows)
    check_outputs(config.weights, ", ".join(getattr(config, setting)), seen, split.only(rows))
    for row, reason in list(seen.problems.items())[:20]:
        print(printable(f"{split.keys([row])[0]}  cannot be read: {reason}"))
    if seen.problems:
        print(f"{setting}: {counted(len(seen.problems), 'unreadable image')} of {len(rows):,} left out")
    return rows[seen.readable], seen.values[seen.readable]


def _stands_for(found: np.ndarray, chosen: np.ndarray, num_images: int) -> list[int]:
    """About how many of all images each chosen one is the most similar of the chosen ones to."""
    _, at = coverage.nearest(found, found[chosen])
    shares = np.bincount(at, minlength=len(chosen)) / len(found)
    return [max(1, round(share * num_images)) for share in shares.tolist()]


def _write_images(folder: Path, images: AdhocSplit, rows: np.ndarray, stands_for: list[int]) -> list[dict[str, str]]:
    """Write the files and choice.csv. Returns the rows of the table."""
    table, digits = [], len(str(len(rows)))
    reader = ShardReader(images.split)
    try:
        for number, (row, key, label, stands) in enumerate(
            zip(rows.tolist(), images.split.keys(rows), images.labels(rows), stands_for, strict=True), 1
        ):
            data = reader.read(row)
            name = f"{number:0{digits}}.{inspect(data, decode_all=False)[0]}"
            (folder / name).write_bytes(data)
            table.append({"path": name, "label": label or "", "key": key, "stands_for": str(stands)})
    finally:
        reader.close()
    (folder / "choice.csv").write_bytes(table_csv(table))
    return table


def _draw(
    config: ChooseConfig, loaded: LoadedModel, images: AdhocSplit, rows: np.ndarray, table: list[dict[str, str]], folder: Path
) -> None:  # fmt: skip
    drawn = min(len(rows), _MAX_DRAWN)
    _, pixels = read_images(config, loaded, images.split, rows[:drawn])
    captions = [
        [line["path"].partition(".")[0], f"stands for {int(line['stands_for']):,}", *filter(None, [line["label"]])]
        for line in table[:drawn]
    ]
    of_all = "" if drawn == len(rows) else f"The first {drawn} of {len(rows):,}. "
    about = counted(len(images.split), "image")
    note = f"{of_all}Each stands for about so many of {about} that it is the most similar chosen one to."
    figure = galleries.draw_choice(pixels.numpy(), captions, note)
    (folder / "sheet.png").write_bytes(png(figure, DPI))


def _report(
    config: ChooseConfig, found: np.ndarray, chosen: np.ndarray, covered: np.ndarray | None, num_images: int
) -> None:
    """Print how well the choice covers the images, beside as many images at random."""

    def mean_similarity(indices: np.ndarray) -> float:
        similarity, _ = coverage.nearest(found, found[indices])
        return float((similarity if covered is None else np.maximum(similarity, covered)).mean())

    of_all = "" if len(found) == num_images else f" of {len(found):,} candidates"
    print(f"{len(chosen):,}{of_all} of {counted(num_images, 'image')} chosen, in {config.out}")
    at_random = random_numbers.permutation(len(found), config.seed, _AT_RANDOM)
    sizes = sorted({max(1, len(chosen) // part) for part in (8, 4, 2, 1)})
    print("mean cosine of an image and the nearest chosen one, and in brackets the nearest of as many at random: " + ", ".join(
        f"{size:,}: {mean_similarity(chosen[:size]):.3f} ({mean_similarity(at_random[:size]):.3f})" for size in sizes
    ))  # fmt: skip
    print(
        f"fill in the column label of {config.out}/choice.csv, then: python launch/shard.py source={config.out}/choice.csv out=..."
    )
