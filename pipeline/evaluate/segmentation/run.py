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
    SegmentationScore,
    batches,
    count,
    linear_head,
    score,
    segment,
    train,
)
from pipeline.evaluate.segmentation.pairs import (
    MaskClasses,
    MaskedPairs,
    decode_whole,
    in_order,
    open_named,
    open_pairs,
    pair_reader,
    scan,
)
from pipeline.model.files import find_file
from pipeline.monitor.mlflow.weights import with_local_weights
from pipeline.monitor.origin import find_origin
from pipeline.monitor.run_page import DatasetFacts, RunFacts, WeightsOrigin, dataset_name
from pipeline.monitor.tracking import send_report
from pipeline.process.outputs import hold
from pipeline.process.waits import Work, worked
from pipeline.settings.commands.segment import SegmentConfig
from pipeline.settings.commands.weights import LookConfig

_RESULTS, _HEAD, _SHEET, _MASKS = "segmentation.json", "head.safetensors", "sheet.png", "predicted_masks"
# Folders that name a part of a data set, and not the data set; and the part that is held out of the images.
_SPLITS, _HELD_OUT = {"train", "training", "val", "validation", "test"}, "held-out"
# Steps after which the loss is read from the device.
_STEPS_BETWEEN_LOOKS = 20
# The longest side of a picture of a sheet, and the number of classes that it names.
_SIDE, _MAX_NAMED = 360, 24


def run(config: SegmentConfig) -> dict[str, Any]:
    """Train and score the layer, print its mIoU, and write the masks of other images; returns the content of
    segmentation.json.

    Its keys include miou and interval, in [0, 1]. Raises UserError for a user's mistake before anything is written.
    """
    config = with_local_weights(config)
    file = find_file(Path(config.weights))  # Once, because a run in training changes its `latest`.
    origin = find_origin(file, config.weights) if config.mlflow else None
    loaded = load_model(replace(config, weights=str(file)))
    _check_model(config, loaded)
    learnt, scored = open_pairs(config, loaded.pixels)
    folder = output_folder(config.out, config.weights, "segment", "-".join(_scored_on(config)), holds="segmentation")
    hold(folder)
    others = open_others(config, folder / _MASKS, loaded.pixels) if config.apply else None
    remedy = "Check the images and masks, or raise max_bad_share."
    budget = BadBudget(config.max_bad_share, "max_bad_share", remedy, config.least_bad)
    classes = scan(config, budget, learnt, scored)
    runs = _warn(loaded, learnt, scored)
    print(
        f"{counted(len(classes.values), 'class')}; {counted(len(learnt), 'image')} to learn from,"
        f" {counted(len(scored), 'image')} to be scored on",
        flush=True,
    )

    head = linear_head(loaded.model.config.width, len(classes.values), config.seed).to(loaded.device)
    not_learnt = _train(config, loaded, head, learnt, classes, budget)
    head.eval()
    counts, problems = np.zeros((len(scored), 3, len(classes.values)), np.int64), dict[int, str]()
    read = in_order(pair_reader(scored, classes), range(len(scored)), config.threads)
    for number, pair in worked(read, "scoring", len(scored)):
        if isinstance(pair, str):
            problems[number] = pair
        else:
            counts[number] = count(pair[1], segment(pair[0], loaded, head, config), len(classes.values))
    _refuse(problems, scored, budget)
    print_unreadable(problems, lambda rows: [scored.names[row] for row in rows], "not scored")
    known = scored.only(np.delete(np.arange(len(scored)), list(problems)))
    found = score(np.delete(counts, list(problems), 0), np.array(known.groups))
    results: dict[str, Any] = {
        "weights": config.weights,
        "run": loaded.extra.get("run"),
        "step": loaded.extra.get("step"),
        "data": ", ".join(config.val_source or config.images),
        TRAINED_BY: runs,
        "miou": found.miou,
        "interval": [found.low, found.high],
        "num_groups": found.num_groups,
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
    tensors = {name: tensor.cpu().contiguous() for name, tensor in head.state_dict().items()}
    contents: dict[str, bytes | str | None] = {
        _HEAD: save(tensors, {"classes": json.dumps(classes.names)}),
        _RESULTS: json.dumps(json_record.without_nan(results), indent=1, ensure_ascii=False) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_files(folder, contents, mark=_RESULTS)
    print(f"mIoU {_in_words(found)}; {folder / _RESULTS}")
    if others is not None:
        write_masks(config, *others, folder, loaded, head, classes, replace(budget, least=LookConfig.least_bad))
        contents[_SHEET] = None
    if origin is not None:
        masks = json.dumps([scored.names, counts[:, 2].sum(0).tolist(), scored.images.shard_bytes.tolist()])
        digest = hashlib.sha256(masks.encode()).hexdigest()[:16]
        result = f"**Result**: mIoU {_in_words(found)}."
        _send(config, loaded, origin, results, result, digest, folder, [folder / name for name in contents])
    return results


def _send(
    config: SegmentConfig,
    loaded: LoadedModel,
    origin: WeightsOrigin,
    results: dict[str, Any],
    result: str,
    digest: str,
    folder: Path,
    files: list[Path],
) -> None:
    """Send the score to MLflow. result: in words. digest: of the masks that are scored on."""
    data, split = _scored_on(config)
    notes = {TRAINED_BY: results[TRAINED_BY]} if results[TRAINED_BY] else {}
    place, metric = str((config.val_source or config.images)[0]), f"{split}_miou"
    facts = DatasetFacts(
        data, place, digest, split, results["num_samples"], len(results["classes"]), "evaluation", notes
    )
    name, names = dataset_name(facts), ("weights", "step", "data", TRAINED_BY, "image_size", "short_side", "lr")
    about = RunFacts(
        f"{loaded.extra.get('run') or Path(config.weights).name} segments {name}",
        "evaluation",
        # "steps" are those of the weights' run.
        {name: results[name] for name in names} | {"length": f"{config.steps} steps of {config.train_batch}"},
        {"model": architecture.name_of(loaded.model.config), "data": digest, "dataset": data},
        (facts,),
        f"**Segmentation** of {name} by a linear layer on the frozen patch tokens of `{config.weights}`.",
        {"parent": origin.run_id} if origin.run_id else {},
        score=metric,
        scored_on=f"mIoU {name}",
        metrics={metric: metric_of(metric)},
        origin=origin,
    )
    send_report(config.mlflow, folder, about, {metric: results["miou"]}, files, config.experiment, result)


def _check_model(config: SegmentConfig, loaded: LoadedModel) -> None:
    """Raises UserError for a model without patches, and sizes that do not suit."""
    refuse_without_patches(config.weights, loaded.model)
    if loaded.image_size[0] != loaded.image_size[1]:
        raise UserError(
            f"{config.weights} reads images of {loaded.image_size} pixels; windows are squares: set image_size, the"
            " side of one."
        )
    if 0 < config.short_side < loaded.image_size[0]:
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


def _warn(loaded: LoadedModel, learnt: MaskedPairs, scored: MaskedPairs) -> str:
    """Print why the score is not of held-out images or groups. Returns the runs that trained on the scored split; ""
    for none.
    """
    both, shared = learnt.places() & scored.places(), set(learnt.groups) & set(scored.groups)
    for number, what in ((len(both), "image"), (len(shared), "group")):
        if number:
            print(
                f"warning: learnt from and scored on: {counted(number, what)}, so the score is not of held-out {what}s"
            )
    if runs := trained_by(recorded(loaded.extra), scored.fingerprint, scored.images.name):
        print(not_held_out(scored.images.name, runs))
    return runs


def _train(
    config: SegmentConfig,
    loaded: LoadedModel,
    head: nn.Module,
    pairs: MaskedPairs,
    classes: MaskClasses,
    budget: BadBudget,
) -> dict[int, str]:
    """Train with a progress bar. Returns number of a pair -> why it cannot be read. Raises UserError for too many."""
    problems = dict[int, str]()
    crops = batches(pairs, classes, config, loaded.view, min(loaded.image_size), problems)
    with Work("training the layer", config.steps, "step") as work:
        for step, mean in enumerate(train(head, loaded, crops, config), start=1):
            _refuse(problems, pairs, budget)
            work.advance()
            if step % _STEPS_BETWEEN_LOOKS and step < config.steps:
                continue
            if not np.isfinite(loss := float(mean)):
                raise UserError(f"step {step:,}: the loss is not finite. Lower lr, or use precision=fp32.")
            work.note = f"loss {loss:.3f}"
    print_unreadable(problems, lambda rows: [pairs.names[row] for row in rows], "not learnt from")
    return problems


def _in_words(found: SegmentationScore) -> str:
    over = counted(found.num_groups, "group") if found.num_groups else "images"
    interval = "" if np.isnan(found.low) else f" ({found.low:.2%} to {found.high:.2%}, 95 % over {over})"
    return f"{found.miou:.2%}{interval}"


def _refuse(problems: dict[int, str], pairs: MaskedPairs, budget: BadBudget) -> None:
    """Raise UserError for too many unreadable pairs, and if none can be read."""
    by_row = {int(pairs.rows[number]): why for number, why in problems.items()}
    if excess := budget.excess(by_row, pairs.images, len(pairs)):
        raise UserError(excess)
    if len(problems) == len(pairs):
        raise UserError(f"none of the {counted(len(pairs), 'pair')} can be read; {pairs.names[0]}: {problems[0]}.")


def open_others(config: SegmentConfig, folder: Path, model: Pixels) -> tuple[Split, Pixels, dict[str, int]]:
    """The images of `config.apply`, whose masks are to be written into `folder`; how the model reads them; and name of
    each predicted mask, a path below `folder` without suffix -> row.

    model: what the weights read. Raises UserError for names that are not unique, images that
    the model cannot read, and if masks that are read are in the folder.
    """
    opened, names = open_named(config, "apply", config.apply_split, config.exclude, model=model)
    target, apply = folder.resolve(), f"apply = {', '.join(config.apply)}"
    for place in (*config.images, *config.masks, *config.val_source, *config.val_masks, *config.apply):
        if "://" not in place and Path(place).resolve().is_relative_to(target):
            raise UserError(f"apply writes masks into {folder}, where {place} is read. Set another out.")
    return opened.split, model.reading(opened.split.pixels, config.weights, apply), names


def write_masks(
    config: SegmentConfig,
    images: Split,
    pixels: Pixels,
    names: dict[str, int],
    folder: Path,
    loaded: LoadedModel,
    head: nn.Module,
    classes: MaskClasses,
    budget: BadBudget,
) -> None:
    """Write the predicted mask of each image, as a PNG with the values of the masks learnt from, and a sheet of the
    first.

    images, pixels, names: of `open_others`. Raises UserError for more images that cannot be read than the budget
    allows, and if none can be.
    """
    files = {row: folder / _MASKS / f"{name}.png" for name, row in names.items()}
    for parent in {file.parent for file in files.values()}:
        remove_unfinished(parent, {file.name for file in files.values()})
    reader, problems = ShardReader(images), dict[int, str]()
    tiles: tuple[list[Tile], list[Tile]] = [], []
    colours, seen = classes.colours(), np.zeros(len(classes.values), np.int64)

    def read(row: int) -> np.ndarray:
        return decode_whole(reader.read(row), pixels, loaded.pixels)

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
    print_unreadable(problems, images.keys, "no mask")
    if excess := budget.excess(problems, images, len(files)) or "no image of apply can be read" * (not tiles[0]):
        raise UserError(excess)
    named = [number for number in np.argsort(-seen, kind="stable")[:_MAX_NAMED].tolist() if seen[number]]
    legend = [(classes.names[number], colours[number] / 255) for number in named]
    note = "Images, and below each the mask that a linear layer on frozen patch tokens predicts."
    figure = gallery(folded(tiles), f"Masks by {config.weights}", note, legend=legend)
    write_files(folder, {_SHEET: png(figure, DPI, loaded.pixels.describe_shown())}, mark=_SHEET)
    print(f"{counted(len(files) - len(problems), 'mask')}: {folder / _MASKS}; look at {folder / _SHEET}")
