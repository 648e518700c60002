"""Chooses the images that are worth labelling first, and writes them as files, a table and a sheet; entry point: `run`.

Shapes: D features, n candidates.
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
from pipeline.evaluate.adhoc_split import AdhocSplit, is_dataset, open_adhoc_split, refuse_without_dataset
from pipeline.evaluate.loaded_model import LoadedModel, check_outputs, load_model
from pipeline.evaluate.predict import read_class_names, with_readable_labels
from pipeline.evaluate.probes.features import extract
from pipeline.explain import coverage, galleries
from pipeline.explain.explain import read_shown
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
    images = open_adhoc_split(config.images, config.split, config.exclude, names, pixels=loaded.pixels)
    labelled = None
    if config.labelled:
        labelled = open_adhoc_split(
            config.labelled, config.labelled_split, config.exclude, names, "labelled", loaded.pixels
        )
    refuse_without_dataset(config, split=["images"], labelled_split=["labelled"], exclude=["images", "labelled"])
    for line in dict.fromkeys(images.split.notes() + (labelled.split.notes() if labelled else [])):
        print(line)
    candidates = np.sort(random_numbers.permutation(len(images.split), config.seed, _CANDIDATES)[: config.candidates])
    rows, values = _features(config, loaded, images.split, candidates, "images")
    mean = values.mean(0)
    found = coverage.directions(values, mean)
    covered = np.full(len(found), -1, np.float32)
    names, seen = images.split.group_names, None
    of_groups = None if names is None else names[rows]
    if labelled:
        with_labels = _with_labels(labelled, config)
        _, theirs = _features(config, loaded, labelled.split, with_labels, "labelled")
        covered, _ = coverage.nearest(found, coverage.directions(theirs, mean))
        their_names = labelled.split.group_names
        if of_groups is not None and their_names is not None:
            seen = np.isin(of_groups, np.unique(their_names[with_labels]))
        elif of_groups is not None:
            print(
                "note: the images have groups, the labelled ones none: which groups have labels already is not known. Shard the labelled "
                "images with group_column or group_pattern, too"
            )
    groups = None if of_groups is None else np.unique(of_groups, return_inverse=True)[1]
    chosen = coverage.choose(found, config.num, covered, groups, seen)
    if len(chosen) < config.num:
        copies = "no copies of each other" + (" or of labelled ones" if labelled else "")
        more = ". Raise candidates" if len(candidates) < len(images.split) else ""
        raise UserError(
            f"of {counted(len(candidates), 'candidate')} {len(chosen):,} can be read and are {copies}, fewer than num = {config.num:,}{more}."
        )
    with new_output(Path(config.out), is_folder=True) as folder:
        stands_for = _stands_for(found, chosen, len(images.split))
        table = _write_images(
            folder, images, rows[chosen], stands_for, None if of_groups is None else of_groups[chosen].tolist()
        )
        _draw(config, loaded, images, rows[chosen], table, folder / "sheet.png")
    _report(config, found, chosen, covered if labelled else None, len(images.split))
    table_file, has_groups = f"{config.out}/choice.csv", " group_column=group" * (groups is not None)
    print(
        f"fill in the column label of {table_file}, then: python launch/shard.py source={table_file}{has_groups} out=..."
    )
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
    with loaded.reading(split, config, len(rows)) as reader:
        seen = extract(loaded.features, reader, rows)
    check_outputs(config.weights, ", ".join(getattr(config, setting)), seen, split, rows)
    for row, reason in list(seen.problems.items())[:20]:
        print(printable(f"{split.keys([row])[0]}  cannot be read: {reason}"))
    if seen.problems:
        print(f"{setting}: {counted(len(seen.problems), 'unreadable image')} of {len(rows):,} left out")
    return rows[seen.readable], seen.values[seen.readable]


def _stands_for(found: np.ndarray, chosen: np.ndarray, num_images: int) -> list[int]:
    """About how many of all images each chosen one is the most similar of the chosen ones to."""
    _, at = coverage.nearest(found, found[chosen])
    shares = np.bincount(at, minlength=len(chosen)) / len(found)
    return [round(share * num_images) for share in shares.tolist()]


def _write_images(
    folder: Path, images: AdhocSplit, rows: np.ndarray, stands_for: list[int], groups: list[str] | None
) -> list[dict[str, str]]:
    """Write the files and choice.csv. groups: of each image, if they have some. Returns the rows of the table."""
    (folder / "images").mkdir(parents=True)
    table, digits = [], len(str(len(rows)))
    described = zip(rows.tolist(), images.split.keys(rows), images.labels(rows), stands_for, strict=True)
    reader = ShardReader(images.split)
    try:
        for number, (row, key, label, stands) in enumerate(described, 1):
            data = reader.read(row)
            path = f"images/{number:0{digits}}.{inspect(data, decode_all=False).ext}"
            (folder / path).write_bytes(data)
            group = {"group": groups[number - 1]} if groups else {}
            table.append({"path": path, "label": label or "", "key": key, "stands_for": str(stands), **group})
    finally:
        reader.close()
    (folder / "choice.csv").write_bytes(table_csv(table))
    return table


def _draw(
    config: ChooseConfig,
    loaded: LoadedModel,
    images: AdhocSplit,
    rows: np.ndarray,
    table: list[dict[str, str]],
    sheet: Path,
) -> None:
    lines = dict(zip(rows.tolist(), table, strict=True))
    kept, pixels = read_shown(config, loaded, images.split, rows[:_MAX_DRAWN])
    labels = with_readable_labels(images, loaded).labels(kept)
    captions = [
        [Path(line["path"]).stem, f"stands for {int(line['stands_for']):,}", *filter(None, [label])]
        for line, label in zip((lines[row] for row in kept.tolist()), labels, strict=True)
    ]
    of_all = "" if len(kept) == len(rows) else f"{len(kept)} of {len(rows):,}. "
    about = counted(len(images.split), "image")
    note = f"{of_all}Each stands for about so many of {about} that it is the most similar chosen one to."
    figure = galleries.draw_choice(pixels, captions, note, loaded.image_size)
    sheet.write_bytes(png(figure, DPI, loaded.pixels.describe_shown()))


def _report(
    config: ChooseConfig, found: np.ndarray, chosen: np.ndarray, covered: np.ndarray | None, num_images: int
) -> None:
    """Print how well the choice covers the images, beside as many images at random. covered: None without labelled images."""

    def similarity(indices: np.ndarray) -> str:
        nearest, _ = coverage.nearest(found, found[indices])
        return f"{(nearest if covered is None else np.maximum(nearest, covered)).mean():.3f}"

    of_all = "" if len(found) == num_images else f" of {counted(len(found), 'candidate')}"
    print(f"{len(chosen):,}{of_all} of {counted(num_images, 'image')} chosen, in {config.out}")
    at_random = random_numbers.permutation(len(found), config.seed, _AT_RANDOM)
    sizes = sorted({max(1, len(chosen) // part) for part in (8, 4, 2, 1)})
    cells = [f"{size:,}: {similarity(chosen[:size])} ({similarity(at_random[:size])})" for size in sizes]
    kind = "chosen"
    if covered is not None:
        kind, cells = "chosen or labelled", [f"0: {covered.mean():.3f}", *cells]
    print(
        f"mean cosine similarity of an image to the nearest {kind} one, by number of chosen images "
        f"(in brackets: as many random ones): {', '.join(cells)}"
    )
