"""A contact sheet: samples of a data set with their classes, decoded from the shards."""

import io

import numpy as np
import pyarrow as pa
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from data_tools.sources import Reader
from data_tools.sources.listing import printable
from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import SAMPLES_FILE, Dataset
from pipeline.data.loading.decode import decode
from pipeline.data.storage.parquet import open_parquet
from pipeline.data.storage.retry import StorageError

_TILE, _GAP, _TEXT = 168, 12, 17
_MARGIN, _TITLE = 24, 58
_BATCH = 2**18
_SEED = 0  # Every sheet of a data set shows the same samples.
_PAPER, _INK, _GREY, _FRAME = (250, 250, 248), (25, 25, 25), (120, 120, 120), (225, 225, 222)


def draw_sheet(dataset: Dataset, num_images: int, class_counts: np.ndarray) -> bytes:
    """A PNG of num_images samples, from the largest class to the smallest, with class names and sizes.

    class_counts: (K,) int64, images of each class; without any, the samples are chosen from all. An unreadable image is a
    grey tile with that word.
    """
    there = np.flatnonzero(class_counts)
    by_size = there[np.argsort(-class_counts[there], kind="stable")]
    # With few classes one row for each; with many, one image of each.
    columns = max(2, round((num_images * 1.2) ** 0.5))
    num_classes = min(len(by_size), num_images)
    per_class = num_images // max(num_classes, 1)
    classes = by_size[np.round(np.linspace(0, len(by_size) - 1, num_classes)).astype(int)] if num_classes else by_size
    samples = _choose(dataset, classes, per_class)
    columns = per_class if 4 <= per_class <= 16 else columns
    rows = -(-len(samples) // columns)
    tile_height = _TILE + 2 * _TEXT + 10
    width = 2 * _MARGIN + columns * (_TILE + _GAP) - _GAP
    shards = dataset.shards()
    sheet = Image.new("RGB", (width, 2 * _MARGIN + _TITLE + rows * (tile_height + _GAP)), _PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((_MARGIN, _MARGIN), printable(dataset.path.name), _INK, _font(24))
    of_classes = f", {len(classes)} of {counted(dataset.num_classes, 'class')}; the largest classes first" * bool(
        len(classes)
    )
    about = f"{len(samples)} of {counted(sum(dataset.info['samples'].values()), 'image')}{of_classes}"
    pen.text((_MARGIN, _MARGIN + 31), _cut(about, _font(14), width - 2 * _MARGIN), _GREY, _font(14))
    for number, sample in enumerate(samples):
        left = _MARGIN + number % columns * (_TILE + _GAP)
        top = _MARGIN + _TITLE + number // columns * (tile_height + _GAP)
        place = str(dataset.shard_path(shards[sample["shard"]].name)), sample["offset"], sample["size"]
        _draw_tile(sheet, pen, left, top, place)
        name, about = sample["key"], f"{sample['width']}×{sample['height']}"
        if len(classes):
            name, number_of = dataset.class_names[sample["class"]], int(class_counts[sample["class"]])
            about = f"{counted(number_of, 'image')} · {about}"
        below = top + _TILE + 3
        pen.text((left, below), _cut(printable(name), _font(15), _TILE), _INK, _font(15))
        pen.text((left, below + _TEXT + 2), _cut(about, _font(12), _TILE), _GREY, _font(12))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


def _choose(dataset: Dataset, classes: np.ndarray, per_class: int) -> list[dict]:
    """Up to per_class rows of samples.parquet for each class, chosen by a hash of the row number; without classes, of all."""
    place = np.full(max(dataset.num_classes, 1), -1)
    place[classes if len(classes) else [0]] = np.arange(max(len(classes), 1))
    best: pa.Table | None = None
    first = 0
    columns = ["offset", "size", "labels", "shard", "width", "height", "key"]
    for batch in open_parquet(dataset.path / SAMPLES_FILE).iter_batches(_BATCH, columns=columns):
        lists = batch.column("labels")
        starts = lists.offsets.to_numpy()
        if len(classes):
            # For a sample with several labels, the first counts.
            rows = np.flatnonzero(np.diff(starts))
            labels = lists.values.to_numpy()[starts[rows]]
        else:
            rows, labels = np.arange(len(batch)), np.zeros(len(batch), np.int64)
        known = (labels >= 0) & (labels < len(place))
        rows, labels = rows[known], labels[known]
        rows, labels = rows[place[labels] >= 0], labels[place[labels] >= 0]
        hashes = random_numbers.bits(_SEED, Purpose.SHEET_SAMPLES, first + rows)
        keep = _first_of_each(place[labels], hashes, per_class)
        chosen = pa.Table.from_batches([batch]).take(pa.array(rows[keep]))
        chosen = chosen.append_column("class", pa.array(labels[keep])).append_column("hash", pa.array(hashes[keep]))
        best = pa.concat_tables([best, chosen]) if best is not None else chosen
        best = best.take(pa.array(_first_of_each(place[best["class"].to_numpy()], best["hash"].to_numpy(), per_class)))
        first += len(batch)
    return best.to_pylist() if best is not None else []


def _first_of_each(groups: np.ndarray, hashes: np.ndarray, num: int) -> np.ndarray:
    """Indices of the `num` lowest hashes of each group, ordered by group."""
    order = np.lexsort([hashes, groups])
    starts = np.searchsorted(groups[order], groups[order], side="left")
    return order[np.arange(len(order)) - starts < num]


def _draw_tile(sheet: Image.Image, pen: ImageDraw.ImageDraw, left: int, top: int, place: tuple[str, int, int]) -> None:
    """Draw one image. place: (path of the tar, offset, size)."""
    pen.rectangle((left, top, left + _TILE - 1, top + _TILE - 1), fill=_FRAME)
    try:
        with Reader() as reader:
            picture = Image.fromarray(decode(reader.read(*place, packed=0)))
        scale = _TILE / max(picture.size)
        size = tuple(max(1, round(side * scale)) for side in picture.size)
        # Small images are enlarged without smoothing.
        method = Image.Resampling.NEAREST if scale >= 3 else Image.Resampling.LANCZOS
        picture = picture.resize(size, method)  # type: ignore[arg-type]
        sheet.paste(picture, (left + (_TILE - size[0]) // 2, top + (_TILE - size[1]) // 2))
    except StorageError:
        raise
    except (OSError, ValueError):
        pen.text((left + _TILE // 2, top + _TILE // 2), "unreadable", _GREY, _font(15), anchor="mm")


def _font(size: int) -> ImageFont.FreeTypeFont:
    # Included in Matplotlib, with more scripts than Pillow's default font.
    return ImageFont.truetype(font_manager.findfont("DejaVu Sans"), size)


def _cut(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The text, shortened in the middle to fit the width: long names differ at either end."""
    if font.getlength(text) <= width:
        return text
    kept = len(text)
    while kept > 2 and font.getlength(f"{text[: (kept + 1) // 2]}…{text[-(kept // 2) :]}") > width:
        kept -= 1
    return f"{text[: (kept + 1) // 2]}…{text[-(kept // 2) :]}"
