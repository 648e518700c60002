"""Writes the masks that a trained layer predicts for images, and draws some of them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from pipeline.architecture.pixels import Pixels
from pipeline.base.errors import UserError
from pipeline.base.files import remove_unfinished
from pipeline.base.gallery import DPI, Tile, folded, gallery
from pipeline.base.page import png
from pipeline.base.words import counted
from pipeline.data.dataset.bad_budget import BadBudget
from pipeline.data.dataset.split import Split
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.values import to_rgb
from pipeline.data.storage.atomic import replacing, write_files
from pipeline.evaluate.adhoc_split import open_adhoc_split
from pipeline.evaluate.loaded_model import LoadedModel, print_unreadable
from pipeline.evaluate.segmentation.linear import LinearHead
from pipeline.evaluate.segmentation.masks import MaskClasses
from pipeline.evaluate.segmentation.pairs import in_order, names_in, read_image, reason_or
from pipeline.evaluate.segmentation.score import segment
from pipeline.settings.commands.segment import SegmentConfig

# The longest side of a picture of a sheet, and the number of classes that it names.
_SIDE, _MAX_NAMED = 360, 24


@dataclass(frozen=True)
class OtherImages:
    """Images without masks. names: name of the predicted mask, a path below `folder` without suffix -> row of `images`.

    pixels: how the model reads them.
    """

    images: Split
    names: dict[str, int]
    folder: Path
    pixels: Pixels


def open_others(config: SegmentConfig, folder: Path, model: Pixels) -> OtherImages:
    """The images of `config.apply`, whose masks are to be written into `folder`. Prints how they were opened.

    model: what the weights read. Raises UserError for names that are not unique or lead out of the folder, images that
    the model cannot read, and if masks that are read are in the folder.
    """
    opened = open_adhoc_split(config.apply, config.apply_split, config.exclude, [], "apply", model)
    for note in [*opened.split.notes(), *model.filled_notes(opened.split.pixels, "apply")]:
        print(note)
    names = names_in(opened, config.apply)
    for name in names:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"apply = {', '.join(config.apply)}: {name!r} would be written outside of {folder}.")
    target = folder.resolve()
    for place in (*config.images, *config.masks, *config.val_images, *config.val_masks, *config.apply):
        path = Path(place).resolve()
        if "://" not in place and (target == path or target in path.parents):
            raise UserError(f"apply writes masks into {folder}, where {place} is read. Set another out.")
    pixels = model.reading(opened.split.pixels, config.weights, f"apply = {', '.join(config.apply)}")
    return OtherImages(opened.split, names, folder, pixels)


def write_masks(
    config: SegmentConfig,
    others: OtherImages,
    loaded: LoadedModel,
    head: LinearHead,
    classes: MaskClasses,
    sheet: Path,
    budget: BadBudget,
) -> None:
    """Write the predicted mask of each image, as a PNG with the values of the masks learnt from, and a sheet of the
    first.

    Raises UserError for more images that cannot be read than the budget allows, and if none can be.
    """
    files = {row: others.folder / f"{name}.png" for name, row in others.names.items()}
    names = {file.name for file in files.values()}
    for folder in {file.parent for file in files.values()}:
        remove_unfinished(folder, names)
    reader, problems = ShardReader(others.images), dict[int, str]()
    tiles: tuple[list[Tile], list[Tile]] = [], []
    colours, seen = classes.colours(), np.zeros(len(classes.values), np.int64)
    head.eval()

    def read(row: int) -> np.ndarray:
        return read_image(reader, row, others.pixels, loaded.pixels)[0]

    with tqdm(total=len(others.names), desc="masks", unit=" images", disable=None) as bar:
        found = in_order(reason_or(read), others.names.values(), config.threads, 2 * config.threads)
        for (row, file), image in zip(files.items(), found, strict=True):
            bar.update()
            if isinstance(image, str):
                problems[row] = image
                continue
            numbers = segment(image, loaded, head, config)
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as out:
                out.write(classes.encoded(numbers))
            if len(tiles[0]) < config.num_drawn:
                step = -(-max(numbers.shape) // _SIDE)
                picture = to_rgb(image[::step, ::step], loaded.pixels).copy()
                tiles[0].append(Tile(picture, [file.stem]))
                tiles[1].append(Tile(colours[numbers[::step, ::step]]))
                seen += np.bincount(numbers.ravel(), minlength=len(seen))
    reader.close()
    print_unreadable(problems, others.images.keys, "no mask")
    excess = budget.excess(problems, others.images, len(files)) or "no image of apply can be read" * (not tiles[0])
    if excess:
        raise UserError(excess)
    named = [number for number in np.argsort(-seen, kind="stable")[:_MAX_NAMED].tolist() if seen[number]]
    legend = [(classes.names[number], colours[number] / 255) for number in named]
    note = "Images, and below each the mask that a linear layer on frozen patch tokens predicts."
    figure = gallery(folded(tiles), f"Masks by {config.weights}", note, legend=legend)
    write_files(sheet.parent, {sheet.name: png(figure, DPI, loaded.pixels.describe_shown())}, mark=sheet.name)
    print(f"{counted(len(files) - len(problems), 'mask')}: {others.folder}; look at {sheet}")
