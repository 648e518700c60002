"""Images and their masks, found by equal names, and read together; and masks, images whose pixels are classes.

Shapes: H, W height and width, C channels, K classes.
"""

import hashlib
import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np
from matplotlib.colors import hsv_to_rgb
from PIL import Image

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted
from pipeline.data.dataset.split import BadBudget, Split, group_finder
from pipeline.data.loading.decode import DecodeError, decode, is_image, with_pillow
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.values import model_values
from pipeline.data.loading.views import MAX_ASPECT
from pipeline.evaluate.adhoc_split import AdhocSplit, is_dataset, open_adhoc_split
from pipeline.evaluate.loaded_model import refuse_none_readable
from pipeline.process.waits import worked
from pipeline.settings.commands.segment import SegmentConfig

Item = TypeVar("Item")
Result = TypeVar("Result")
# Pixels without a class, in arrays of class numbers.
NO_CLASS = -1
# Added to a colour, to tell it from a class number.
_COLOUR = 1 << 24
# The largest number that a PNG of 16 bits holds.
_MAX_NUMBER = 2**16 - 1
# More different values than any published data set has classes: a photograph, or a mask with smoothed borders.
_MAX_VALUES = 1000
# Formats that keep the values of pixels; of PGM, Pillow stretches them.
_FORMATS = {"PNG", "TIFF", "BMP", "GIF"}
_MODES = {"1", "L", "LA", "P", "PA", "I", "RGB", "RGBA"}  # and those of 16 bits, I;16 and others


def decode_mask(data: bytes) -> np.ndarray:
    """The value of each pixel of a mask file, int32 (H, W): its number, also in a palette, or 0x1RRGGBB for a colour;
    alpha is dropped.

    Raises DecodeError for bytes that are not an image, formats that may change values, and pixels that are
    floating-point, negative or above 65,535.
    """
    values: np.ndarray = with_pillow(data, _values)
    return values


def _values(image: Image.Image) -> np.ndarray:
    if image.format not in _FORMATS:
        raise DecodeError(f"{image.format} may not keep the values of a mask: give PNG files")
    if image.mode not in _MODES and not image.mode.startswith("I;16"):
        raise DecodeError(f"a mask has numbers or colours, not Pillow's mode {image.mode}")
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[2] >= 3:
        red, green, blue = np.moveaxis(pixels[..., :3], 2, 0).astype(np.int32)
        return _COLOUR + (red << 16 | green << 8 | blue)
    numbers = (pixels if pixels.ndim == 2 else pixels[..., 0]).astype(np.int32)
    if numbers.min() < 0 or numbers.max() > _MAX_NUMBER:
        raise DecodeError(f"values from {numbers.min():,} to {numbers.max():,} are not class numbers")
    return numbers


@dataclass(frozen=True)
class MaskClasses:
    """The K classes of masks, by the values of their pixels.

    values: int32 (K,), ascending, as `decode_mask` returns them; a pixel with another value has no class.
    """

    values: np.ndarray

    @property
    def names(self) -> list[str]:
        """The values as text."""
        return [value_text(value) for value in self.values.tolist()]

    def colours(self) -> np.ndarray:
        """uint8 (K, 3): those of the masks, or some that differ where the masks have numbers."""
        if self.values[0] >= _COLOUR:
            return (self.values[:, None] >> [16, 8, 0] & 255).astype(np.uint8)
        # Hues at steps of the golden ratio: neighbours differ, whatever their number.
        places = np.arange(len(self.values))
        hsv = np.stack([places * 0.618034 % 1, 0.85 - 0.3 * (places % 3 == 1), 0.95 - 0.3 * (places % 3 == 2)], 1)
        return (hsv_to_rgb(hsv) * 255).round().astype(np.uint8)

    def numbers(self, mask: np.ndarray) -> np.ndarray:
        """int32 (H, W) values -> int16 (H, W) numbers of classes, NO_CLASS where there is none."""
        places = np.searchsorted(self.values, mask).clip(max=len(self.values) - 1)
        return np.where(self.values[places] == mask, places, NO_CLASS).astype(np.int16)

    def encoded(self, numbers: np.ndarray) -> bytes:
        """int16 (H, W) numbers of classes -> a PNG that `decode_mask` reads as their values."""
        kind = np.uint8 if self.values[-1] < 256 else np.uint16
        values = self.colours() if self.values[0] >= _COLOUR else self.values.astype(kind)
        image = Image.fromarray(values[numbers])
        image.save(buffer := io.BytesIO(), "PNG")
        return buffer.getvalue()


def find_classes(found: Iterable[int], ignore: Sequence[str]) -> MaskClasses:
    """The classes of masks: all values that occur, without those to ignore.

    found: values of pixels. ignore: values, as text. Raises UserError for fewer than two classes, too many, and numbers
    beside colours.
    """
    values = set(found)
    kept = sorted(values - {parse_value(text) for text in ignore})
    if len(kept) > _MAX_VALUES:
        raise UserError(
            f"masks has {len(kept):,} different values: these are photographs, or masks whose borders were smoothed. "
            "A mask has the number of its class in each pixel, or one colour for each class."
        )
    if kept and kept[0] < _COLOUR <= kept[-1]:
        raise UserError(
            f"some masks have numbers, such as {value_text(kept[0])}, and some have colours, such as"
            f" {value_text(kept[-1])}. Give masks of one kind."
        )
    if len(kept) < 2:
        raise UserError(
            f"masks has the values {', '.join(map(value_text, sorted(values)))}, and ignore = {', '.join(ignore)}"
            f" leaves {len(kept)} of the at least two classes that are needed: set ignore=[] if each value is a class."
        )
    return MaskClasses(np.array(kept, np.int32))


def value_text(value: int) -> str:
    """A value of a mask as it is shown, and as `ignore` accepts it."""
    return f"#{value - _COLOUR:06x}" if value >= _COLOUR else str(value)


def parse_value(text: str) -> int:
    """The inverse of `value_text`."""
    return _COLOUR + int(text[1:], 16) if text.startswith("#") else int(text)


@dataclass(frozen=True)
class MaskedPairs:
    """n images and their masks. images: of `open_named`, these alone. mask_rows: int64 (n,), rows of `masks`. names: n,
    without folder of the place and suffix.

    groups: n, names of their groups, such as videos; empty without. fingerprint: of their data set, else "".
    """

    images: Split
    masks: Split
    mask_rows: np.ndarray
    names: list[str]
    groups: list[str]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.names)

    def places(self) -> set[tuple[str, int]]:
        """(file, offset) of each image: the same in another selection of the same files."""
        paths = [os.path.realpath(path) for path in self.images.shard_paths]
        return {(paths[self.images.shard_of(row)], self.images.place_of(row)[0]) for row in range(len(self))}

    def only(self, chosen: np.ndarray) -> "MaskedPairs":
        """Those with these numbers, int64, ascending."""
        names, groups = ([of[number] for number in chosen.tolist() if of] for of in (self.names, self.groups))
        images, mask_rows = self.images.only(chosen), self.mask_rows[chosen]
        return replace(self, images=images, mask_rows=mask_rows, names=names, groups=groups)


def open_pairs(config: SegmentConfig, model: Pixels) -> tuple[MaskedPairs, MaskedPairs]:
    """(pairs to learn from, pairs to be scored on). Prints what is left out. Raises UserError where there are none,
    and for images that the model cannot read.

    The second are of `val_source` and `val_masks`; else, of a data set, of its split `val_split`; else `val_share` of
    the others, chosen by a hash of their names, or of their groups' names, so that more images move none from one part
    to the other; at least one.
    model: what the weights read.
    """
    train = _paired(config, model, config.split, "images", "masks")
    if config.val_source or (is_dataset(config.images) and config.val_split):
        settings = ("val_source", "val_masks") if config.val_source else ("images", "masks")
        return train, _paired(config, model, config.val_split, *settings)
    together = train.groups or train.names
    hashes = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) for name in together]
    places = random_numbers.uniform(0, Purpose.named("segmentation held out"), np.array(hashes, np.uint64))
    held_out = places < config.val_share
    if config.val_share:
        held_out[places == places.min()] = True  # At least one image or group.
    if held_out.all() or not held_out.any():
        raise UserError(
            f"val_share = {config.val_share} of {counted(len(train), 'image')} leaves none to learn from or none to be"
            " scored on. Give more images, or val_source and val_masks."
        )
    return train.only(np.flatnonzero(~held_out)), train.only(np.flatnonzero(held_out))


def _paired(config: SegmentConfig, model: Pixels, split: str, *settings: str) -> MaskedPairs:
    """settings: attributes that have the places of the images and of the masks."""
    images, masks = (f"{config.setting_of(name)} = {', '.join(getattr(config, name))}" for name in settings)
    opened, of_images = open_named(config, settings[0], split, config.image_suffix, model)
    opened_masks, of_masks = open_named(config, settings[1], split, config.mask_suffix)
    found = [name for name in of_images if name in of_masks]
    if not found:
        firsts = [each.split.keys([0])[0] for each in (opened, opened_masks)]
        raise UserError(
            f"{images} and {masks} have no name in common: the first are {' and '.join(firsts)}. An image and its mask"
            " have the same path below their folders, except for the suffix; for endings of names set image_suffix and"
            " mask_suffix."
        )
    alone = [len(each.split) - len(found) for each in (opened, opened_masks)]
    if any(alone):
        print(f"left out: {alone[0]:,} of {images} and {alone[1]:,} of {masks} without a partner")
    rows, mask_rows = (np.array([names[name] for name in found], np.int64) for names in (of_images, of_masks))
    groups: list[str] = []
    if config.group_pattern:
        groups = group_finder(config.group_pattern)(found)
    elif (of_all := opened.split.group_names) is not None:
        groups = of_all[rows].tolist()
    return MaskedPairs(opened.split.only(rows), opened_masks.split, mask_rows, found, groups, opened.fingerprint)


def open_named(
    config: SegmentConfig, name: str, split: str, ending: str = "", model: Pixels | None = None
) -> tuple[AdhocSplit, dict[str, int]]:
    """Open the places that an attribute of the settings has. Returns them, and name -> row of those whose names have
    this ending: the path below their place, without suffix and ending.

    model: what the weights read; None for masks. The split's pixels are how they read it. Prints what is left out.
    Raises UserError for names that are not unique, and for images that the model cannot read.
    """
    places, setting = getattr(config, name), config.setting_of(name)
    where = f"{setting} = {', '.join(places)}"
    exclude = config.exclude if model else "none"
    opened = open_adhoc_split(places, split, exclude, [], setting, model or RGB8)
    pixels, notes = opened.split.pixels, opened.split.notes()
    if model:
        notes += model.filled_notes(pixels, setting)
        opened = replace(opened, split=replace(opened.split, pixels=model.reading(pixels, config.weights, where)))
    for note in notes:
        print(note)
    found: dict[str, int] = {}
    for row, key in enumerate(opened.split.keys(np.arange(len(opened.split)))):
        path = PurePosixPath(key if opened.fingerprint else _below(key, places))
        stem = str(path.with_suffix("") if is_image(key) else path)
        if stem.endswith(ending) and found.setdefault(stem.removesuffix(ending), row) != row:
            raise UserError(f"{where}: several files are named {stem!r}. Rename or remove one.")
    return opened, found


def _below(key: str, places: Sequence[str]) -> str:
    """The path of an image below its folder; of a file that is given by name, the name."""
    below = [str(Path(key).relative_to(folder)) for folder in places if Path(key).is_relative_to(folder)]
    return min(below, key=len, default=Path(key).name)


def pair_reader(
    pairs: MaskedPairs, classes: MaskClasses, model: Pixels
) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Returns the thread-safe function number of a pair -> (image (H, W, C) as the model reads it, numbers of classes
    int16 (H, W)).

    It raises DecodeError for a pair that cannot be used, and as `ShardReader.read`.
    """
    images, masks = ShardReader(pairs.images), ShardReader(pairs.masks)

    def read(number: int) -> tuple[np.ndarray, np.ndarray]:
        image = decode_whole(images.read(number), pairs.images.pixels, model)
        mask, size = decode_mask(masks.read(int(pairs.mask_rows[number]))), image.shape[:2]
        if mask.shape != size:
            raise DecodeError(f"{size[1]} x {size[0]} pixels, its mask {mask.shape[1]} x {mask.shape[0]}")
        return image, classes.numbers(mask)

    return read


def decode_whole(data: bytes, pixels: Pixels, model: Pixels) -> np.ndarray:
    """Image (H, W, C) as `model` reads it by `pixels`.

    Raises DecodeError, also for an image that is too long to be resized.
    """
    image = model_values(decode(data, pixels=pixels), pixels, model)
    height, width = image.shape[:2]
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise DecodeError(f"{width} x {height} pixels: one side is more than {MAX_ASPECT} times the other")
    return image


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int, ahead: int = 0
) -> Iterator[tuple[Item, Result | str]]:
    """Yield (item, work(item)), or (item, why its image or mask cannot be read), in the order of the items.

    `threads` threads work on the next `ahead` items, by default twice as many, meanwhile. Raises StorageError.
    """

    def result_or_reason(item: Item) -> tuple[Item, Result | str]:
        try:
            return item, work(item)
        except (DecodeError, OSError) as error:
            return item, str(error)

    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[tuple[Item, Result | str]]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(result_or_reason, item))
                if len(waiting) > (ahead or 2 * threads):
                    yield waiting.popleft().result()
            for future in waiting:
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def refuse_unreadable(problems: dict[int, str], images: Split, budget: BadBudget) -> None:
    """Raise UserError for too many unreadable images, row -> reason, and if none can be read."""
    if excess := budget.excess(problems, images, len(images)):
        raise UserError(excess)
    refuse_none_readable(f"split {images.name!r}", problems, images, len(images))


def scan(config: SegmentConfig, budget: BadBudget, *of: MaskedPairs) -> MaskClasses:
    """Read all masks. Returns their classes.

    Masks that cannot be read are counted again by who trains and scores. Raises UserError as `find_classes`, for more
    damaged masks than the budget allows, and for a selection in which no pixel has a class.
    """
    values: list[set[int]] = []
    for pairs in of:
        problems, of_pairs, rows = dict[int, str](), set[int](), pairs.mask_rows.tolist()
        reader = ShardReader(pairs.masks)

        def values_of(row: int, reader: ShardReader = reader) -> list[int]:
            return np.unique(decode_mask(reader.read(row))).tolist()

        all_found = in_order(values_of, rows, config.threads)
        for row, found in worked(all_found, "reading masks", len(rows), "mask"):
            if isinstance(found, str):
                problems[row] = found
            else:
                of_pairs.update(found)
            # Photographs have more values than masks: `find_classes` says so.
            if len(of_pairs) > 2**16 or len(problems) > budget.allowed(len(pairs)):
                break
        if excess := budget.excess(problems, pairs.masks, len(pairs)):
            raise UserError(f"masks: {excess}")
        values.append(of_pairs)
    classes = find_classes(set().union(*values), config.ignore)
    for pairs, of_pairs in zip(of, values, strict=True):
        if of_pairs.isdisjoint(classes.values.tolist()):
            raise UserError(
                f"{counted(len(pairs), 'mask')}, the first {pairs.masks.keys(pairs.mask_rows[:1])[0]}: each pixel has a"
                " value that ignore names."
            )
    return classes
