"""Trains and scores a linear layer on frozen patch tokens; entry point: `run`."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save
from torch import nn

from pipeline.architecture.pixels import Pixels
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import remove_unfinished
from pipeline.base.gallery import DPI, Tile, folded, gallery
from pipeline.base.metric import metric_of
from pipeline.base.page import png
from pipeline.base.trained_on import TRAINED_BY, not_held_out, recorded, trained_by
from pipeline.base.words import counted
from pipeline.data.dataset.split import BadBudget, Split
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.values import to_rgb
from pipeline.data.storage.atomic import replacing, write_files
from pipeline.evaluate import architecture
from pipeline.evaluate.adhoc_split import is_dataset
from pipeline.evaluate.loaded_model import (
    LoadedModel,
    load_model,
    output_folder,
    print_unreadable,
    refuse_without_patches,
)
from pipeline.evaluate.segmentation.linear import (
    count_pixels,
    linear_head,
    score,
    segment,
    train,
)
from pipeline.evaluate.segmentation.pairs import (
    MaskClasses,
    decode_whole,
    in_order,
    open_named,
    open_pairs,
    pair_reader,
    refuse_unreadable,
    scan,
)
from pipeline.monitor.mlflow.weights import find_weights
from pipeline.monitor.run_page import DatasetFacts, RunFacts
from pipeline.monitor.tracking import send_report
from pipeline.process.outputs import hold
from pipeline.process.waits import worked
from pipeline.settings.commands.segment import SegmentConfig
from pipeline.settings.commands.weights import LookConfig

_RESULTS, _HEAD, _SHEET, _MASKS = "segmentation.json", "head.safetensors", "sheet.png", "predicted_masks"
# Folders that name a part of a data set, and not the data set; and the part that is held out of the images.
_SPLITS, _HELD_OUT = {"train", "training", "val", "validation", "test"}, "held-out"
# The longest side of a picture of a sheet, and the number of classes that it names.
_SIDE, _MAX_NAMED = 360, 24


def run(config: SegmentConfig) -> dict[str, Any]:
    """Train and score the layer, print its mIoU, and write the masks of other images; returns the content of
    segmentation.json.

    Its keys include miou and interval, in [0, 1]. Raises UserError for a user's mistake before anything is written.
    """
    # ---------------------------------------------------------------------- the weights, the images and the masks
    config, of_file, origin = find_weights(config)
    loaded = load_model(of_file)
    _check_model(config, loaded)
    learnt, scored = open_pairs(config, loaded.pixels)
    data, split = _scored_on(config)
    folder = output_folder(config.out, config.weights, "segment", f"{data}-{split}", holds="segmentation")
    hold(folder)
    others = open_others(config, folder / _MASKS, loaded.pixels) if config.apply else None
    remedy = "Check the images and masks, or raise max_bad_share."
    budget = BadBudget(config.max_bad_share, "max_bad_share", remedy, config.least_bad)
    classes = scan(config, budget, learnt, scored)
    both, shared = learnt.places() & scored.places(), set(learnt.groups) & set(scored.groups)
    for number, what in ((len(both), "image"), (len(shared), "group")):
        if number:
            print(
                f"warning: learnt from and scored on: {counted(number, what)}, so the score is not of held-out {what}s"
            )
    if runs := trained_by(recorded(loaded.extra), scored.fingerprint, scored.images.name):
        print(not_held_out(scored.images.name, runs))
    print(
        f"{counted(len(classes.values), 'class')}; {counted(len(learnt), 'image')} to learn from,"
        f" {counted(len(scored), 'image')} to be scored on",
        flush=True,
    )

    # ---------------------------------------------------------------------- the layer and its score
    head = linear_head(loaded.model.config.width, len(classes.values), config.seed).to(loaded.device)
    not_learnt = train(head, loaded, learnt, classes, config, budget)
    print_unreadable(not_learnt, learnt.images, "not learnt from")
    head.eval()
    counts, problems = np.zeros((len(scored), 3, len(classes.values)), np.int64), dict[int, str]()
    read = in_order(pair_reader(scored, classes, loaded.pixels), range(len(scored)), config.threads)
    for number, pair in worked(read, "scoring", len(scored)):
        if isinstance(pair, str):
            problems[number] = pair
        else:
            counts[number] = count_pixels(pair[1], segment(pair[0], loaded, head, config), len(classes.values))
    refuse_unreadable(problems, scored.images, budget)
    print_unreadable(problems, scored.images, "not scored")
    known = np.delete(np.arange(len(scored)), list(problems))
    found = score(counts[known], np.array(scored.only(known).groups))
    low, high = found["interval"]
    over = counted(found["num_groups"], "group") if found["num_groups"] else "images"
    interval = "" if np.isnan(low) else f" ({low:.2%} to {high:.2%}, 95 % over {over})"
    told = f"mIoU {found['miou']:.2%}{interval}"
    results: dict[str, Any] = {
        "weights": config.weights,
        **loaded.made_by,
        "data": ", ".join(config.val_source or config.images),
        TRAINED_BY: runs,
        **found,
        "classes": classes.names,
        "num_learnt": len(learnt) - len(not_learnt),
        "num_samples": len(scored),
        "num_unreadable": len(problems),
        "image_size": min(loaded.image_size),
        "short_side": config.short_side or min(loaded.image_size),
        **{name: getattr(config, name) for name in ("steps", "train_batch", "lr", "seed", "precision")},
        "device": str(loaded.device),
        "unreadable": {scored.names[number]: why for number, why in problems.items()},
        "unreadable_learnt": {learnt.names[number]: why for number, why in sorted(not_learnt.items())},
    }

    # ---------------------------------------------------------------------- the files and MLflow
    tensors = {name: tensor.cpu().contiguous() for name, tensor in head.state_dict().items()}
    contents: dict[str, bytes | str | None] = {
        _HEAD: save(tensors, {"classes": json.dumps(classes.names)}),
        _RESULTS: json.dumps(json_record.without_nan(results), indent=1, ensure_ascii=False) + "\n",
    }
    write_files(folder, contents, mark=_RESULTS)
    print(f"{told}; {folder / _RESULTS}")
    if others is not None:
        write_masks(config, *others, folder, loaded, head, classes, replace(budget, least=LookConfig.least_bad))
        contents[_SHEET] = None
    if origin is not None:
        masks = json.dumps([scored.names, counts[:, 2].sum(0).tolist(), scored.images.shard_bytes.tolist()])
        digest = hashlib.sha256(masks.encode()).hexdigest()[:16]
        place, notes = (config.val_source or config.images)[0], {TRAINED_BY: runs} if runs else {}
        facts = DatasetFacts(data, place, digest, split, len(scored), len(classes.values), "evaluation", notes)
        name, metric = facts.title, f"{split}_miou"
        parameters = ("weights", "step", "data", TRAINED_BY, "image_size", "short_side", "lr")
        about = RunFacts(
            f"{loaded.extra.get('run') or Path(config.weights).name} segments {name}",
            "evaluation",
            # "steps" are those of the weights' run.
            {key: results[key] for key in parameters} | {"length": f"{config.steps} steps of {config.train_batch}"},
            {"model": architecture.name_of(loaded.model.config), "data": digest, "dataset": data},
            (facts,),
            f"**Segmentation** of {name} by a linear layer on the frozen patch tokens of `{config.weights}`.",
            {"parent": origin.run_id} if origin.run_id else {},
            score=metric,
            scored_on=f"mIoU {name}",
            metrics={metric: metric_of(metric)},
            origin=origin,
        )
        files, said = [folder / name for name in contents], f"**Result**: {told}."
        send_report(config.mlflow, folder, about, {metric: found["miou"]}, files, config.experiment, said)
    return results


def _check_model(config: SegmentConfig, loaded: LoadedModel) -> None:
    """Raises UserError for a model without patches, and sizes that do not suit."""
    refuse_without_patches(config.weights, loaded.model)
    height, width = loaded.image_size
    if height != width:
        raise UserError(
            f"{config.weights} reads images of {loaded.image_size} pixels; windows are squares: set image_size, the"
            " side of one."
        )
    if 0 < config.short_side < height:
        raise UserError(
            f"short_side = {config.short_side} is smaller than image_size = {loaded.image_size}, the side of the"
            " windows."
        )


def _scored_on(config: SegmentConfig) -> tuple[str, str]:
    """(name of the data, its split) that is scored on: of a data set its own; else by the last folders of the path."""
    place = (config.val_source or config.images)[0].rstrip("/")
    if is_dataset([place]):
        return Path(place).name, config.val_split or _HELD_OUT
    names = [part for part in Path(place).absolute().parts if part != "images"]
    split = names.pop() if names[-1].lower() in _SPLITS else "val"
    return names[-1], split if config.val_source else _HELD_OUT


def open_others(config: SegmentConfig, folder: Path, model: Pixels) -> tuple[Split, dict[str, int]]:
    """The images of `config.apply`, whose masks are to be written into `folder`; and name of each predicted mask, a
    path below `folder` without suffix -> row.

    model: what the weights read. Raises UserError as `open_named`, and if masks that are read are in the folder.
    """
    opened, names = open_named(config, "apply", config.apply_split, model=model)
    target = folder.resolve()
    for place in (*config.images, *config.masks, *config.val_source, *config.val_masks, *config.apply):
        if "://" not in place and Path(place).resolve().is_relative_to(target):
            raise UserError(f"apply writes masks into {folder}, where {place} is read. Set another out.")
    return opened.split, names


def write_masks(
    config: SegmentConfig,
    images: Split,
    names: dict[str, int],
    folder: Path,
    loaded: LoadedModel,
    head: nn.Module,
    classes: MaskClasses,
    budget: BadBudget,
) -> None:
    """Write the predicted mask of each image, as a PNG with the values of the masks learnt from, and a sheet of the
    first.

    images, names: of `open_others`. Raises UserError for more images that cannot be read than the budget
    allows, and if none can be.
    """
    files = {row: folder / _MASKS / f"{name}.png" for name, row in names.items()}
    for parent in {file.parent for file in files.values()}:
        remove_unfinished(parent, {file.name for file in files.values()})
    reader, problems = ShardReader(images), dict[int, str]()
    tiles: tuple[list[Tile], list[Tile]] = [], []
    colours, seen = classes.colours(), np.zeros(len(classes.values), np.int64)

    def read(row: int) -> np.ndarray:
        return decode_whole(reader.read(row), images.pixels, loaded.pixels)

    for row, image in worked(in_order(read, files, config.threads), "predicting masks", len(files)):
        if isinstance(image, str):
            problems[row] = image
            continue
        numbers, file = segment(image, loaded, head, config), files[row]
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as out:
            out.write(classes.encoded(numbers))
        if len(tiles[0]) < config.num_drawn:
            step = -(-max(numbers.shape) // _SIDE)
            tiles[0].append(Tile(to_rgb(image[::step, ::step], loaded.pixels).copy(), [file.stem]))
            tiles[1].append(Tile(colours[numbers[::step, ::step]]))
            seen += np.bincount(numbers.ravel(), minlength=len(seen))
    print_unreadable(problems, images, "no mask")
    refuse_unreadable(problems, images, budget)
    named = [number for number in np.argsort(-seen, kind="stable")[:_MAX_NAMED].tolist() if seen[number]]
    legend = [(classes.names[number], colours[number] / 255) for number in named]
    note = "Images, and below each the mask that a linear layer on frozen patch tokens predicts."
    figure = gallery(folded(tiles), f"Masks by {config.weights}", note, legend=legend)
    write_files(folder, {_SHEET: png(figure, DPI, loaded.pixels.describe_shown())}, mark=_SHEET)
    print(f"{counted(len(files) - len(problems), 'mask')}: {folder / _MASKS}; look at {folder / _SHEET}")
