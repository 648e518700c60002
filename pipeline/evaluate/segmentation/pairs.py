"""Images and their masks, found by equal names, and read together. Shapes: H, W height and width, C channels."""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from pipeline.architecture.pixels import Pixels
from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted
from pipeline.data.dataset.bad_budget import BadBudget
from pipeline.data.dataset.groups import group_finder, refuse_one_group
from pipeline.data.dataset.split import Split
from pipeline.data.loading.augment import MAX_ASPECT
from pipeline.data.loading.decode import EXTENSIONS, DecodeError, decode, exif_orientation, upright
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.values import model_values
from pipeline.evaluate.adhoc_split import AdhocSplit, is_dataset, open_adhoc_split
from pipeline.evaluate.segmentation.masks import MaskClasses, decode_mask, find_classes
from pipeline.settings.commands.segment import SegmentConfig

Result = TypeVar("Result")


@dataclass(frozen=True)
class MaskedPairs:
    """n images and their masks. rows, mask_rows: int64 (n,), rows of `images` and of `masks`. names: n, without folder
    of the place and suffix.

    groups: n, names of their groups, such as videos; empty without. pixels: how the model reads the images. model: what
    it reads.
    fingerprint: of their data set, else "".
    """

    images: Split
    masks: Split
    rows: np.ndarray
    mask_rows: np.ndarray
    names: list[str]
    groups: list[str]
    pixels: Pixels
    model: Pixels
    fingerprint: str

    def __len__(self) -> int:
        return len(self.rows)

    def places(self) -> set[tuple[str, int]]:
        """(file, offset) of each image: the same in another selection of the same files."""
        paths = [str(Path(path).resolve()) for path in self.images.shard_paths]
        shards = self.images.shard_of(self.rows).tolist()
        return {
            (paths[shard], self.images.place_of(row)[0]) for shard, row in zip(shards, self.rows.tolist(), strict=True)
        }

    def content(self) -> str:
        """A hash that changes with the files: of shards with a checksum of these, of others of their sizes and
        times.
        """
        found = hashlib.sha256(json.dumps([self.names, self.rows.tolist(), self.mask_rows.tolist()]).encode())
        for split in (self.images, self.masks):
            for path, checksum in zip(split.shard_paths, split.shard_sha256.to_pylist(), strict=True):
                about = None if checksum else os.stat(path)
                found.update(f"{checksum}{about and (about.st_size, about.st_mtime_ns)}".encode())
        return found.hexdigest()

    def named(self, numbers: list[int]) -> list[str]:
        """Names of pairs."""
        return [self.names[number] for number in numbers]

    def only(self, chosen: np.ndarray) -> "MaskedPairs":
        """Those with these numbers, int64."""
        groups = [self.groups[number] for number in chosen.tolist()] if self.groups else []
        return replace(
            self,
            rows=self.rows[chosen],
            mask_rows=self.mask_rows[chosen],
            names=self.named(chosen.tolist()),
            groups=groups,
        )


def open_pairs(config: SegmentConfig, model: Pixels) -> tuple[MaskedPairs, MaskedPairs]:
    """(pairs to learn from, pairs to be scored on). Prints what is left out. Raises UserError where there are none,
    and for images that the model cannot read.

    The second are of `val_images` and `val_masks`; else, of a data set, of its split `val_split`; else `val_share` of
    the others, chosen by a hash of their names, or of their groups' names, so that more images move none from one part
    to the other; at least one.
    model: what the weights read.
    """
    train = _paired(config, model, config.images, config.masks, config.split)
    if config.val_images:
        return train, _paired(config, model, config.val_images, config.val_masks, config.val_split, "val_")
    if is_dataset(config.images) and config.val_split:
        return train, _paired(config, model, config.images, config.masks, config.val_split)
    together = train.groups or train.names
    hashes = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) for name in together]
    places = random_numbers.uniform(0, Purpose.named("segmentation held out"), np.array(hashes, np.uint64))
    held_out = places < config.val_share
    if config.val_share:
        held_out[places == places.min()] = True  # At least one image or group.
    if held_out.all() or not held_out.any():
        raise UserError(
            f"val_share = {config.val_share} of {counted(len(train), 'image')} leaves none to learn from or none to be"
            " scored on. Give more images, or val_images and val_masks."
        )
    return train.only(np.flatnonzero(~held_out)), train.only(np.flatnonzero(held_out))


def _paired(
    config: SegmentConfig, model: Pixels, images: Sequence[str], masks: Sequence[str], split: str, prefix: str = ""
) -> MaskedPairs:
    """prefix: of the settings that name the places."""
    opened = open_adhoc_split(images, split, config.exclude, [], f"{prefix}images", model)
    pixels = model.reading(opened.split.pixels, config.weights, f"{prefix}images = {', '.join(images)}")
    opened_masks = open_adhoc_split(masks, split, "none", [], f"{prefix}masks")
    filled = model.filled_notes(opened.split.pixels, f"{prefix}images")
    for note in dict.fromkeys([*opened.split.notes(), *filled, *opened_masks.split.notes()]):
        print(note)
    of_images, of_masks = (
        names_in(opened, images, config.image_suffix),
        names_in(opened_masks, masks, config.mask_suffix),
    )
    found = [name for name in of_images if name in of_masks]
    if not found:
        firsts = [keys[0] for split in (opened.split, opened_masks.split) if (keys := split.keys(range(1)))]
        raise UserError(
            f"{prefix}images = {', '.join(images)} and {prefix}masks = {', '.join(masks)} have no name in common: the"
            f" first are {' and '.join(firsts)}. An image and its mask have the same path below their folders, except"
            " for the suffix; for endings of names set image_suffix and mask_suffix."
        )
    alone = [len(each.split) - len(found) for each in (opened, opened_masks)]
    if any(alone):
        print(f"left out: {alone[0]:,} of {', '.join(images)} and {alone[1]:,} of {', '.join(masks)} without a partner")
    rows, mask_rows = (np.array([names[name] for name in found], np.int64) for names in (of_images, of_masks))
    groups: list[str] = []
    if config.group_pattern:
        groups = group_finder(config.group_pattern)(found)
        refuse_one_group(config.group_pattern, groups, len(groups))
    elif (of_all := opened.split.group_names) is not None:
        groups = of_all[rows].tolist()
    return MaskedPairs(
        opened.split, opened_masks.split, rows, mask_rows, found, groups, pixels, model, opened.fingerprint
    )


def names_in(opened: AdhocSplit, places: Sequence[str], ending: str = "") -> dict[str, int]:
    """Name -> row of the images whose names have this ending: the path below their place, without suffix and ending.

    Raises UserError for names that are not unique.
    """
    keys = opened.split.keys(np.arange(len(opened.split)))
    if not opened.fingerprint:
        keys = [_below(key, places) for key in keys]
    found: dict[str, int] = {}
    for row, key in enumerate(keys):
        path = PurePosixPath(key)
        name = str(path.with_suffix("")) if path.suffix.lower() in EXTENSIONS else key
        if name.endswith(ending) and found.setdefault(name.removesuffix(ending), row) != row:
            raise UserError(f"{', '.join(places)}: several files are named {name!r}. Rename or remove one.")
    return found


def _below(key: str, places: Sequence[str]) -> str:
    """The path of an image below its place: a folder, or a tar; of a file that is given by name, the name."""
    _, is_in_tar, member = key.partition(".tar/")
    if is_in_tar:
        return member
    folders = [folder for folder in map(Path, places) if Path(key).is_relative_to(folder)]
    return str(Path(key).relative_to(max(folders, key=lambda folder: len(folder.parts)))) if folders else Path(key).name


class PairReader:
    """Reads pairs. Thread-safe. Use it as a context manager."""

    def __init__(self, pairs: MaskedPairs, classes: MaskClasses) -> None:
        self.pairs, self.classes = pairs, classes
        self._images, self._masks = ShardReader(pairs.images), ShardReader(pairs.masks)

    def __enter__(self) -> "PairReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._images.close()
        self._masks.close()

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray] | str:
        """(image (H, W, C) of the type of a batch, numbers of classes int16 (H, W)) of a pair, or why it cannot be
        used. Raises StorageError as `ShardReader.read`.
        """
        return reason_or(self._read)(number)

    def _read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        row, mask_row = int(self.pairs.rows[number]), int(self.pairs.mask_rows[number])
        image, orientation = read_image(self._images, row, self.pairs.pixels, self.pairs.model)
        mask = decode_mask(self._masks.read(mask_row))
        height, width = image.shape[:2]
        stored = (width, height) if orientation >= 5 else (height, width)
        if mask.shape == stored != (height, width):  # It was drawn on the image as stored.
            mask = upright(mask, orientation)
        if mask.shape != (height, width):
            raise DecodeError(f"{width} x {height} pixels, its mask {mask.shape[1]} x {mask.shape[0]}")
        return image, self.classes.numbers(mask)


def read_image(reader: ShardReader, row: int, pixels: Pixels, model: Pixels) -> tuple[np.ndarray, int]:
    """(image (H, W, C) as `model` reads it by `pixels`, EXIF orientation of a JPEG).

    Raises DecodeError, also for an image that is too long to be resized, and as `ShardReader.read`.
    """
    data = reader.read(row)
    image = model_values(decode(data, pixels=pixels), pixels, model)
    height, width = image.shape[:2]
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise DecodeError(f"{width} x {height} pixels: one side is more than {MAX_ASPECT} times the other")
    return image, exif_orientation(data)


def in_order(work: Callable[[int], Result], items: Iterable[int], threads: int, ahead: int) -> Iterator[Result]:
    """Yield work(item) of each, in their order; `threads` threads work on the next `ahead` items meanwhile."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def scan(config: SegmentConfig, budget: BadBudget, *of: MaskedPairs) -> MaskClasses:
    """Read all masks. Returns their classes.

    Masks that cannot be read are counted again by who trains and scores. Raises UserError as `find_classes`, for more
    damaged masks than the budget allows, and for a selection in which no pixel has a class.
    """
    values = [set[int]() for _ in of]
    with tqdm(total=sum(map(len, of)), desc="masks", unit=" masks", disable=None) as bar:
        for pairs, of_pairs in zip(of, values, strict=True):
            problems: dict[int, str] = {}
            reader, rows = ShardReader(pairs.masks), pairs.mask_rows.tolist()

            def values_of(row: int, reader: ShardReader = reader) -> set[int]:
                return set(np.unique(decode_mask(reader.read(row))).tolist())

            all_found = in_order(reason_or(values_of), rows, config.threads, 2 * config.threads)
            for row, found in zip(rows, all_found, strict=True):
                if isinstance(found, str):
                    problems[row] = found
                else:
                    of_pairs |= found
                bar.update()
                # Photographs have more values than masks: `find_classes` says so.
                if len(of_pairs) > 2**16 or len(problems) > budget.allowed(len(pairs)):
                    break
            reader.close()
            if excess := budget.excess(problems, pairs.masks, len(pairs)):
                raise UserError(f"masks: {excess}")
    classes = find_classes(set().union(*values), config.ignore)
    for pairs, of_pairs in zip(of, values, strict=True):
        if of_pairs.isdisjoint(classes.values.tolist()):
            raise UserError(
                f"{counted(len(pairs), 'mask')}, the first {pairs.masks.keys(pairs.mask_rows[:1])[0]}: each pixel has a"
                " value that ignore names."
            )
    return classes


def reason_or(work: Callable[[int], Result]) -> Callable[[int], Result | str]:
    """`work`, which returns why an image or mask cannot be read instead of raising. Raises StorageError."""

    def found(item: int) -> Result | str:
        try:
            return work(item)
        except (DecodeError, OSError) as error:
            return str(error)

    return found
