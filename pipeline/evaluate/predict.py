"""Predicts the most likely classes of images, or numbers, and writes them as a table; entry point: `run`."""

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.csv import write_csv

from pipeline.base.errors import UserError
from pipeline.base.words import counted, printable
from pipeline.data.dataset.split import Split
from pipeline.data.storage.atomic import replacing
from pipeline.evaluate.adhoc_split import AdhocSplit, open_given
from pipeline.evaluate.classify import Predictions, label_map, predict
from pipeline.evaluate.loaded_model import LoadedModel, check_outputs, load_model
from pipeline.evaluate.regression import predict_targets
from pipeline.monitor.mlflow.weights import with_local_weights
from pipeline.objectives.classification import unnamed_note
from pipeline.process.installed import read_lines
from pipeline.settings.commands.weights import LookConfig, PredictConfig

# One row per image and predicted class. An unreadable image has one row without a class, and the reason in `problem`.
TABLE = pa.schema(
    [
        ("image", pa.string()),
        ("label", pa.string()),  # the true class; null if unknown
        ("rank", pa.int32()),  # 1 is the most likely
        ("class", pa.string()),
        ("class_number", pa.int32()),
        ("probability", pa.float32()),
        ("problem", pa.string()),
    ]
)
_SHOWN = 20


def run(config: PredictConfig) -> pa.Table:
    """Write the predictions of all images to `config.out`, print those of the first ones, and return them (schema:
    TABLE, or of numbers that of `_predict_numbers`).

    Raises UserError before anything is written.
    """
    config = with_local_weights(config)
    loaded = load_model(config, config.loss)
    if not loaded.model.config.num_classes:
        raise UserError(
            f"{config.weights} has no head, so it cannot predict classes. launch/finetune.py trains one on labelled"
            " images; launch/features.py writes the features."
        )
    if loaded.target_names:
        return _predict_numbers(config, loaded)
    images, names = open_images(config, loaded)
    print_numbered(config, names)
    predictions = predict_all(config, loaded, images.true_classes(names).split, config.top)
    keys = images.split.keys(range(len(images.split)))
    table = _table(predictions, images, keys, names)
    likely = (of[:_SHOWN].tolist() for of in (predictions.top, predictions.probabilities))
    said = [
        ", ".join(f"{names[number]} {probability:.1%}" for number, probability in zip(*of_image, strict=True))
        for of_image in zip(*likely, strict=True)
    ]
    _write(table, config.out, keys, predictions.problems, said)
    return table


def _write(table: pa.Table, out: str, keys: list[str], problems: dict[int, str], said: list[str]) -> None:
    """Write the table, and print a readable line of each of the first images, whatever the names of files and classes
    hold. said: of each of these.
    """
    if out:
        with replacing(Path(out)) as file:
            (pq.write_table if out.endswith(".parquet") else write_csv)(table, file)
    shown = [printable(key) for key in keys[:_SHOWN]]
    width = max(map(len, shown))
    for row, (key, text) in enumerate(zip(shown, said, strict=True)):
        text = f"cannot be read: {problems[row]}" if row in problems else text
        print(f"{key:<{width}}  {printable(text)}")
    unread = f", {len(problems):,} of them unreadable" if problems else ""
    more = f", the first {_SHOWN} shown" if len(keys) > _SHOWN else ""
    print(
        f"{counted(len(keys), 'image')}{unread}{more}. " + (f"table: {out}" if out else "Write all with out=FILE.csv")
    )


def _predict_numbers(config: PredictConfig, loaded: LoadedModel) -> pa.Table:
    """`run` of weights that predict numbers: a row for each image, with a column for each number, and the true ones, if
    the data set has them, as NAME_true.
    """
    names = loaded.target_names
    images = open_given(config, [], loaded.pixels)
    split, known = images.split, images.target_names
    with loaded.reading(split, config) as reader:
        found = predict_targets(loaded.logits, reader)
    check_outputs(config.weights, config.places, found, split)
    keys = split.keys(range(len(split)))
    columns = {"image": pa.array(keys, pa.string())}
    columns |= {
        name: pa.array(values, mask=~found.readable) for name, values in zip(names, found.values.T, strict=True)
    }
    for name in names:
        if name in known:
            true = split.target_values[:, known.index(name)]
            columns[f"{name}_true"] = pa.array(true, mask=np.isnan(true))
    columns["problem"] = pa.array([found.problems.get(row) for row in range(len(keys))], pa.string())
    table = pa.table(columns)
    said = [
        ", ".join(f"{name} {value:.5g}" for name, value in zip(names, row, strict=True))
        for row in found.values[:_SHOWN].tolist()
    ]
    _write(table, config.out, keys, found.problems, said)
    return table


def open_images(config: LookConfig, loaded: LoadedModel) -> tuple[AdhocSplit, list[str]]:
    """Open the images of the settings, and print what is left out. Returns them and the class names of the weights,
    readable ones where they are known.

    Labels of a data set whose classes are among those of the weights become labels of these, as in launch/evaluate.py.

    Names come from `config.class_names`, else the weights, else the data set, else they are numbers ("class 3"). Raises
    UserError if the number of names differs from the number of classes.
    """
    num_classes = 0 if loaded.target_names else loaded.model.config.num_classes
    own = class_names(config, loaded)
    if own is not None and num_classes and len(own) != num_classes:
        raise UserError(
            f"class_names = {config.class_names} has {counted(len(own), 'line')}, {config.weights}"
            f" {counted(num_classes, 'class')}."
        )
    numbers = _numbered(num_classes)
    images = open_given(config, own or numbers, loaded.pixels)
    if own and set(images.label_names) <= set(own):
        with contextlib.suppress(UserError):  # Names that are not unique: no true class is known.
            split = images.split.relabelled(label_map(images.label_names, own))
            images = replace(images, split=split, label_names=list(own))
    named = own or (images.label_names if len(images.label_names) == num_classes else numbers)
    if named not in (own, numbers):
        where = config.places
        print(f"{unnamed_note(config.weights, where, named)}. Other names: class_names=FILE")
    readable = _readable_names(images, loaded)
    return with_readable_labels(images, loaded), [readable.get(name, name) for name in named]


def print_numbered(config: LookConfig, names: list[str]) -> None:
    """Say what the numbers mean, if the classes of the weights have no other names. names: as `open_images` returns."""
    if names == _numbered(len(names)):
        print(
            f"{config.weights} has no class names: classes are numbers, 0 to {len(names) - 1:,} in the order of its"
            f" head. For names: class_names=FILE, one per line in that order"
        )


def _numbered(num_classes: int) -> list[str]:
    return [f"class {number}" for number in range(num_classes)]


def with_readable_labels(images: AdhocSplit, loaded: LoadedModel) -> AdhocSplit:
    """The images, whose labels have readable names where the weights or the data set have some."""
    readable = _readable_names(images, loaded)
    return replace(images, label_names=[readable.get(name, name) for name in images.label_names])


def _readable_names(images: AdhocSplit, loaded: LoadedModel) -> dict[str, str]:
    """Class name, such as a WordNet ID -> name to show."""
    of_weights = zip(loaded.extra.get("classes") or (), loaded.extra.get("class_names") or (), strict=False)
    return {**images.readable, **dict(of_weights)}


def class_names(config: LookConfig, loaded: LoadedModel) -> list[str] | None:
    """The lines of the file that `class_names` sets, else the classes of the weights, None if they have none. Raises
    UserError.
    """
    return read_lines(config.class_names, "class_names") if config.class_names else loaded.extra.get("classes")


def predict_all(config: LookConfig, loaded: LoadedModel, split: Split, num_top: int) -> Predictions:
    """Predict the `num_top` most likely classes of every image, with a progress bar. Raises UserError as
    `check_outputs`.
    """
    with loaded.reading(split, config) as reader:
        done = predict(loaded.logits, reader, loaded.loss_kind, num_top)
    check_outputs(config.weights, config.places, done, split)
    return done


def _table(predictions: Predictions, images: AdhocSplit, keys: list[str], names: list[str]) -> pa.Table:
    num, most = predictions.top.shape
    kept = np.flatnonzero(predictions.readable[:, None] | (np.arange(most) == 0))
    rows, numbers = kept // most, predictions.top.ravel()[kept]
    unknown = ~predictions.readable[rows]
    problems = [predictions.problems.get(row) for row in range(num)]
    image, label, problem = (
        pa.array(texts, pa.string()).take(rows) for texts in (keys, images.labels(range(num)), problems)
    )
    columns = [
        image,
        label,
        pa.array(kept % most + 1, pa.int32(), mask=unknown),
        pa.array(names, pa.string()).take(pa.array(numbers, mask=unknown)),
        pa.array(numbers, pa.int32(), mask=unknown),
        pa.array(predictions.probabilities.ravel()[kept], mask=unknown),
        problem,
    ]
    return pa.table(columns, TABLE)
