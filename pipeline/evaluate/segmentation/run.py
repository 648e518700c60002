"""Trains and scores a linear layer on frozen patch tokens; entry point: `run`."""

import hashlib
import io
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from tqdm import tqdm

from pipeline.base import json_record, random_numbers
from pipeline.base.errors import UserError
from pipeline.base.files import table_csv
from pipeline.base.gallery import DPI
from pipeline.base.page import markdown, png
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted, printable
from pipeline.data.dataset.bad_budget import BadBudget
from pipeline.data.storage.atomic import replacing, write_files
from pipeline.evaluate.adhoc_split import is_dataset, refuse_without_dataset
from pipeline.evaluate.loaded_model import LoadedModel, load_model, output_folder
from pipeline.evaluate.segmentation import report
from pipeline.evaluate.segmentation.apply import open_others, write_masks
from pipeline.evaluate.segmentation.counts import FILE, PixelCounts, as_file
from pipeline.evaluate.segmentation.crops import batches
from pipeline.evaluate.segmentation.draw import SegmentedImage, draw_examples
from pipeline.evaluate.segmentation.linear import HeadTraining, PatchTokens
from pipeline.evaluate.segmentation.masks import MaskClasses
from pipeline.evaluate.segmentation.pairs import MaskedPairs, PairReader, open_pairs, scan
from pipeline.evaluate.segmentation.score import count
from pipeline.model import VisionTransformer
from pipeline.model.files import find_file, open_safetensors
from pipeline.monitor.mlflow.weights import with_local_weights
from pipeline.monitor.origin import find_origin
from pipeline.monitor.run_page import DatasetFacts
from pipeline.settings.commands.segment import SegmentConfig
from pipeline.settings.commands.weights import LookConfig

_RESULTS, _UNFINISHED, _HEAD, _MASKS = "segmentation.json", "unfinished.pt", "head.safetensors", "predicted_masks"
_SECONDS_BETWEEN_SAVES = 60
# Another number makes all layers be trained again: for a change of how they are trained.
_FORMAT = 1
# Settings that change no layer, or only by the pairs that they select.
_NOT_OF_TRAINING = {
    "weights", "images", "masks", "split", "val_images", "val_masks", "val_split", "val_share", "group_pattern", "image_suffix", "mask_suffix", "exclude",
    "class_names", "out", "apply", "apply_split", "mlflow", "experiment", "threads", "batch", "num_drawn", "device", "max_bad_share",
}  # fmt: skip
# Folders that name a part of a data set, and not the data set; and the part that is held out of the images.
_SPLITS, _HELD_OUT = {"train", "training", "val", "validation", "test"}, "held-out"
# Pairs that are tried before training, steps after which the loss is read from the device, and unreadable images that are printed.
_FIRST, _STEPS_BETWEEN_LOOKS, _NUM_TOLD = 4, 20, 20
_DRAWN = Purpose.named("segmentation sheet")


def run(config: SegmentConfig) -> dict[str, Any]:
    """Train and score the layer, write the report, print its table, and apply the layer; returns the content of segmentation.json.

    Its keys include miou, interval, pixel_accuracy, mean_recall (all in [0, 1]) and per_class. A command that was killed goes on from its last
    minute, and one that has trained this layer does not train it again. Raises UserError for a user's mistake before anything is written.
    """
    # ---------------------------------------------------------------------- the weights and the data
    config = with_local_weights(config)
    file = find_file(Path(config.weights))  # Once, because a run in training changes its `latest`.
    origin = find_origin(file, config.weights)
    loaded = load_model(replace(config, weights=str(file)))
    if not loaded.pixels.is_rgb8:
        raise UserError(
            f"{config.weights} reads {loaded.pixels}, and launch/segment.py reads 8-bit RGB only: use such weights."
        )
    tokens = _tokens(config, loaded)
    train, test = open_pairs(config)
    data, split = _scored_on(config)
    folder = output_folder(config.out, config.weights, "segment", f"{data}-{split}", holds="segmentation")
    others = open_others(config, folder / _MASKS) if config.apply else None
    refuse_without_dataset(
        config, split=["images", "masks"], val_split=["images", "masks", "val_images", "val_masks"], apply_split=["apply"],
        exclude=["images", "val_images", "apply"],
    )  # fmt: skip
    classes, (learnt, scored) = scan(config, _budget(config), train, test)
    for pairs in (train, test):
        _try_first(pairs, classes)
    if both := len(train.places() & test.places()):
        verb = "is" if both == 1 else "are"
        print(
            f"warning: {counted(both, 'image')} {verb} learnt from and scored on, so the score is not of held-out images"
        )
    if shared := sorted(set(train.groups) & set(test.groups)):
        print(
            f"warning: {counted(len(shared), 'group')}, such as {shared[0]!r}, {'has' if len(shared) == 1 else 'have'} images that are learnt from and "
            "others that are scored on, so the score is not of unseen groups"
        )
    print(
        f"{counted(len(classes.names), 'class')}; {counted(len(train), 'image')} to learn from, {counted(len(test), 'image')} to be scored "
        f"on, of whose pixels {1 - scored.sum():.1%} have no class"
    )

    # ---------------------------------------------------------------------- the layer and its score
    identity = _identity(config, origin.sha256, train, classes)
    training = HeadTraining(tokens, len(classes.names), config)
    begin = time.perf_counter()
    not_learnt = _train(training, train, classes, folder, identity)
    trained = time.perf_counter()
    counts, examples, problems, num_turned = _score(training, test, classes)
    scores: dict[str, Any] = {
        "weights": config.weights, "run": loaded.extra.get("run"), "step": loaded.extra.get("step"), "data": ", ".join(config.val_images or config.images),
        **report.numbers(counts, classes, learnt, scored),
        "num_learnt": len(train) - len(not_learnt), "num_samples": len(test), "num_unreadable": len(problems), "num_turned": num_turned, "image_size": min(loaded.image_size), "short_side": config.short_side or min(loaded.image_size),
        "grid": list(tokens.model.config.grid), "layers": config.layers, "steps": config.steps, "train_batch": config.train_batch,
        "lr": config.lr, "loss": float(training.loss), "seed": config.seed, "precision": config.precision, "device": str(loaded.device),
        "seconds_training": round(trained - begin, 1), "seconds_scoring": round(time.perf_counter() - trained, 1),
        "unreadable": _named(test, problems), "unreadable_learnt": _named(train, not_learnt),
    }  # fmt: skip

    # ---------------------------------------------------------------------- the files
    title = f"Segmentation by a linear layer on {config.weights}"
    sheet = png(draw_examples(examples, classes, title), DPI) if examples else None
    contents = {
        "sheet.png": sheet,
        "per_class.csv": table_csv(scores["per_class"]),
        FILE: as_file(counts),
        "report.md": markdown(title, report.blocks(scores, sheet)),
        _HEAD: _as_file(training, classes, identity, not_learnt),
        _RESULTS: json.dumps(json_record.without_nan(scores), indent=1, ensure_ascii=False) + "\n",
    }
    write_files(folder, contents, mark=_RESULTS)
    (folder / _UNFINISHED).unlink(missing_ok=True)  # After the layer is there.
    for name, value in report.summary(scores):
        print(f"{name:<44} {value:>12}")
    print(f"report: {folder / 'report.md'}")
    if config.mlflow:
        place = str((config.val_images or config.images)[0])
        digest = hashlib.sha256(
            json.dumps([test.names, scored.tolist(), test.images.shard_bytes.tolist()]).encode()
        ).hexdigest()[:16]
        facts = DatasetFacts(data, place, digest, split, len(test), len(classes.names), "evaluation")
        report.send(
            config, facts, loaded, origin, scores, [folder / name for name, content in contents.items() if content]
        )
    if others is not None:
        unread = write_masks(config, others, tokens, training.head, classes)
        _tell(unread, others.images.keys, "no mask")
        print(f"{counted(len(others.names) - len(unread), 'mask')}: {others.folder}")
        budget = replace(_budget(config), least=LookConfig.least_bad)
        if excess := budget.excess(unread, others.images, len(others.images)):
            raise UserError(excess)
    return scores


def _tokens(config: SegmentConfig, loaded: LoadedModel) -> PatchTokens:
    """Raises UserError for a model without patches, or with too few blocks."""
    model = loaded.model
    if not isinstance(model, VisionTransformer):
        raise UserError(
            f"weights = {config.weights}: a ResNet has no patch tokens. Segmentation needs a ViT, or a hybrid."
        )
    if config.layers > len(model.blocks):
        raise UserError(f"layers = {config.layers}, but {config.weights} has {counted(len(model.blocks), 'block')}.")
    if loaded.image_size[0] != loaded.image_size[1]:
        raise UserError(
            f"{config.weights} reads images of {loaded.image_size} pixels; windows are squares: set image_size, the side of one."
        )
    if 0 < config.short_side < loaded.image_size[0]:
        raise UserError(
            f"short_side = {config.short_side} is smaller than image_size = {loaded.image_size}, the side of the windows."
        )
    return PatchTokens(loaded, config.layers)


def _scored_on(config: SegmentConfig) -> tuple[str, str]:
    """(name of the data, its split) that is scored on: of a data set its own; else by the last folders of the path, without wildcards."""
    place = (config.val_images or config.images)[0].rstrip("/")
    parts = [part for part in Path(place).parts if not set(part) & set("*?[/") and part not in (".", "..", "images")]
    names = [part.removesuffix(".tar") for part in parts] or ["images"]
    if is_dataset([place]):
        return names[-1], config.val_split or _HELD_OUT
    split = names.pop() if names[-1].lower() in _SPLITS and len(names) > 1 else "val"
    return names[-1], split if config.val_images else _HELD_OUT


def _try_first(pairs: MaskedPairs, classes: MaskClasses) -> None:
    """Raise UserError if none of the first pairs can be read, as with masks of another size: before minutes of training."""
    with PairReader(pairs, classes) as reader:
        found = [reader.read(number) for number in range(min(_FIRST, len(pairs)))]
    if all(isinstance(each, str) for each in found):
        raise UserError(f"none of the first {counted(len(found), 'pair')} can be read; {pairs.names[0]}: {found[0]}.")


def _identity(config: SegmentConfig, weights: str, train: MaskedPairs, classes: MaskClasses) -> str:
    """What a layer belongs to. weights: SHA-256 of theirs. classes: also those that only the masks scored on have."""
    settings = {name: value for name, value in asdict(config).items() if name not in _NOT_OF_TRAINING}
    return hashlib.sha256(
        json.dumps([_FORMAT, settings, weights, train.content(), classes.values.tolist()]).encode()
    ).hexdigest()


def _arithmetic(device: torch.device) -> str:
    """What the last bits of a training depend on beside its settings: on a CPU, how many threads share a sum."""
    return f"{torch.get_num_threads()} threads" if device.type == "cpu" else str(device)


def _train(
    training: HeadTraining, pairs: MaskedPairs, classes: MaskClasses, folder: Path, identity: str
) -> dict[int, str]:
    """Train to the end, with a progress bar. Returns number of a pair -> why it cannot be read. Raises UserError for too many."""
    folder.mkdir(parents=True, exist_ok=True)
    config, loaded = training.config, training.tokens.loaded
    problems = _resume(training, folder, identity)
    _refuse(problems, pairs, config)
    allowed, saved = _budget(config).allowed(len(pairs)), time.monotonic()
    with PairReader(pairs, classes) as reader, tqdm(
        total=config.steps, initial=training.step, desc="layer", unit=" steps", disable=None
    ) as bar:  # fmt: skip
        crops = batches(reader, config, loaded.view, min(loaded.image_size), training.step, problems)
        for step in training.run(crops):
            bar.update()
            if len(problems) > allowed:
                _refuse(problems.copy(), pairs, config)  # Threads go on to fill it.
            if step % _STEPS_BETWEEN_LOOKS and step < config.steps:
                continue
            if not np.isfinite(loss := float(training.loss)):
                raise UserError(f"step {step:,}: the loss is not finite. Lower lr, or use precision=fp32.")
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if time.monotonic() - saved > _SECONDS_BETWEEN_SAVES and step < config.steps:
                with replacing(folder / _UNFINISHED) as out:
                    begun = {
                        "identity": identity,
                        "arithmetic": _arithmetic(loaded.device),
                        "problems": problems.copy(),
                    }
                    torch.save({**begun, **training.state()}, out)
                saved = time.monotonic()
    _tell(problems, pairs.named, "not learnt from")
    _tell_turned(reader, "learnt from")
    return problems


def _as_file(training: HeadTraining, classes: MaskClasses, identity: str, problems: dict[int, str]) -> bytes:
    about = {
        "identity": identity,
        "loss": float(training.loss),
        "classes": classes.names,
        "unreadable": dict(sorted(problems.items())),
    }
    tensors = {name: tensor.cpu().contiguous() for name, tensor in training.head.state_dict().items()}
    return save(tensors, {"segmentation": json.dumps(about)})  # One text: safetensors mixes the order of several.


def _resume(training: HeadTraining, folder: Path, identity: str) -> dict[int, str]:
    """Continue from the file of a killed command, or take the layer of one that ended, if it is of the same settings. Returns its problems."""
    unfinished, trained, device = folder / _UNFINISHED, folder / _HEAD, training.tokens.loaded.device
    try:
        if unfinished.is_file():
            state = torch.load(io.BytesIO(unfinished.read_bytes()), weights_only=True, map_location=device)
            if (state["identity"], state["arithmetic"]) == (identity, _arithmetic(device)):
                training.load(state)
                print(f"continues at step {training.step:,} of {training.config.steps:,}")
                return dict(state["problems"])
        if trained.is_file():
            tensors, metadata = open_safetensors(trained)
            about = json.loads(metadata["segmentation"])
            if about["identity"] == identity:
                training.head.load_state_dict(tensors)
                training.step, training.loss = training.config.steps, torch.tensor(about["loss"])
                print(f"trained already: {trained}")
                return {int(number): why for number, why in about["unreadable"].items()}
    except (pickle.UnpicklingError, UserError, RuntimeError, KeyError, EOFError, ValueError, TypeError):
        pass
    if unfinished.is_file() or trained.is_file():
        print(f"the layer in {folder} is of other settings or damaged: it is trained from its beginning")
    return {}


def _score(
    training: HeadTraining, pairs: MaskedPairs, classes: MaskClasses
) -> tuple[PixelCounts, list[SegmentedImage], dict[int, str], int]:
    """(counts of the pairs that can be read, images for the sheet, number of a pair -> why it cannot be read, number of `PairReader.turned`)."""
    config = training.config
    order = random_numbers.permutation(len(pairs), config.seed, _DRAWN)[: config.num_drawn]
    drawn: dict[int, SegmentedImage] = {}

    def keep(number: int, pixels: np.ndarray, true: np.ndarray, predicted: np.ndarray) -> None:
        if number in order:
            drawn[number] = SegmentedImage(pixels, true, predicted, Path(pairs.names[number]).name).small()

    with (
        PairReader(pairs, classes) as reader,
        tqdm(total=len(pairs), desc="score", unit=" images", disable=None) as bar,
    ):
        counts, problems = count(reader, training.tokens, training.head, config, bar.update, keep)
    _refuse(problems, pairs, config)
    _tell(problems, pairs.named, "not scored")
    return counts, [drawn[number] for number in sorted(drawn)], problems, _tell_turned(reader, "scored on")


def _budget(config: SegmentConfig) -> BadBudget:
    return BadBudget(
        config.max_bad_share, "max_bad_share", "Check the images and masks, or raise max_bad_share.", config.least_bad
    )


def _refuse(problems: dict[int, str], pairs: MaskedPairs, config: SegmentConfig) -> None:
    """Raise UserError for too many unreadable pairs, and if none can be read."""
    by_row = {int(pairs.rows[number]): why for number, why in problems.items()}
    if excess := _budget(config).excess(by_row, pairs.images, len(pairs)):
        raise UserError(excess)
    if len(problems) == len(pairs):
        raise UserError(f"none of the {counted(len(pairs), 'pair')} can be read; {pairs.names[0]}: {problems[0]}.")


def _tell(problems: dict[int, str], names: Callable[[list[int]], list[str]], what: str) -> None:
    numbers = sorted(problems)[:_NUM_TOLD]
    for number, name in zip(numbers, names(numbers), strict=True):
        print(printable(f"{what}: {name} cannot be read ({problems[number]})"))
    if len(problems) > _NUM_TOLD:
        print(f"{what}: {len(problems) - _NUM_TOLD:,} more")


def _tell_turned(reader: PairReader, what: str) -> int:
    """Warn of `PairReader.turned`. Returns their number."""
    if number := len(reader.turned):
        first = reader.pairs.names[min(reader.turned)]
        print(
            printable(
                f"warning: EXIF turns {counted(number, 'image')} {what}, such as {first}: the masks are taken as upright, which their sizes "
                "cannot confirm"
            )
        )
    return number


def _named(pairs: MaskedPairs, problems: dict[int, str]) -> list[dict[str, str]]:
    return [{"name": pairs.names[number], "problem": why} for number, why in sorted(problems.items())]
