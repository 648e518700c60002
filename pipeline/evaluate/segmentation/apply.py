"""Writes the masks that a trained layer predicts for images."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from tqdm import tqdm

from pipeline.base.errors import UserError
from pipeline.base.files import remove_unfinished
from pipeline.base.words import counted
from pipeline.data.dataset.split import Split
from pipeline.data.loading.decode import DecodeError
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.storage.atomic import replacing
from pipeline.evaluate.adhoc_split import open_adhoc_split
from pipeline.evaluate.segmentation.linear import LinearHead, PatchTokens
from pipeline.evaluate.segmentation.masks import MaskClasses
from pipeline.evaluate.segmentation.pairs import in_order, names_in, read_image
from pipeline.evaluate.segmentation.score import segment
from pipeline.settings.commands.segment import SegmentConfig


@dataclass(frozen=True)
class OtherImages:
    """Images without masks. names: name of the predicted mask, a path below `folder` without suffix -> row of `images`."""

    images: Split
    names: dict[str, int]
    folder: Path


def open_others(config: SegmentConfig, folder: Path) -> OtherImages:
    """The images of `config.apply`, whose masks are to be written into `folder`. Prints how they were opened.

    Raises UserError for names that are not unique or lead out of the folder, and if masks that are read are in it.
    """
    opened = open_adhoc_split(config.apply, config.apply_split, config.exclude, [], "apply")
    for note in opened.split.notes():
        print(note)
    names = names_in(opened, config.apply)
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(
                f"apply = {', '.join(config.apply)}: {name!r} would be written outside of {folder}. Rename it."
            )
    target = folder.resolve()
    for place in (*config.images, *config.masks, *config.val_images, *config.val_masks, *config.apply):
        path = Path(place).resolve()
        is_above = path in target.parents and place in (*config.masks, *config.val_masks)
        if "://" not in place and (target == path or target in path.parents or is_above):
            raise UserError(f"apply writes masks into {folder}, where {place} is read. Set another out.")
    return OtherImages(opened.split, names, folder)


def write_masks(
    config: SegmentConfig, others: OtherImages, tokens: PatchTokens, head: LinearHead, classes: MaskClasses
) -> dict[int, str]:
    """Write the predicted mask of each image, as a PNG with the values of the masks learnt from.

    Prints how many others are in the folder. Returns row of an image -> why it cannot be read. Raises UserError if none can be.
    """
    files = {row: others.folder / f"{name}.png" for name, row in others.names.items()}
    names = {file.name for file in files.values()}
    for folder in {file.parent for file in files.values()}:
        remove_unfinished(folder, names)
    reader, problems = ShardReader(others.images), dict[int, str]()
    head.eval()

    def read(row: int) -> np.ndarray | str:
        try:
            return read_image(reader, row)[0]
        except (DecodeError, OSError) as error:
            return str(error)

    with tqdm(total=len(others.names), desc="masks", unit=" images", disable=None) as bar:
        found = in_order(read, others.names.values(), config.threads, 2 * config.threads)
        for (row, file), pixels in zip(files.items(), found, strict=True):
            if isinstance(pixels, str):
                problems[row] = pixels
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                with replacing(file) as out:
                    out.write(classes.encoded(segment(pixels, tokens, head, config)))
            bar.update()
    reader.close()
    if len(problems) == len(others.names):
        row, why = next(iter(problems.items()))
        raise UserError(
            f"none of the {counted(len(problems), 'image')} of apply can be read; {others.images.keys([row])[0]}: {why}."
        )
    written = {file for row, file in files.items() if row not in problems}
    if older := sum(file not in written for file in others.folder.rglob("*.png")):
        print(f"{others.folder} also has {counted(older, 'mask')} of earlier commands, maybe of another layer")
    return problems
