"""Trains and scores a linear layer on frozen patch tokens; entry point: `run`."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save
from tqdm import tqdm

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.metric import metric_of
from pipeline.base.trained_on import TRAINED_BY, not_held_out, recorded, trained_by
from pipeline.base.words import counted
from pipeline.data.dataset.bad_budget import BadBudget
from pipeline.data.storage.atomic import write_files
from pipeline.evaluate.adhoc_split import is_dataset
from pipeline.evaluate.loaded_model import LoadedModel, load_model, output_folder, print_unreadable
from pipeline.evaluate.score_report import facts_of_scores
from pipeline.evaluate.segmentation.apply import open_others, write_masks
from pipeline.evaluate.segmentation.crops import batches
from pipeline.evaluate.segmentation.linear import LinearHead, train
from pipeline.evaluate.segmentation.masks import MaskClasses
from pipeline.evaluate.segmentation.pairs import MaskedPairs, PairReader, open_pairs, scan
from pipeline.evaluate.segmentation.score import SegmentationScore, count_all, score
from pipeline.model import VisionTransformer
from pipeline.model.files import find_file, open_safetensors
from pipeline.monitor.mlflow.weights import with_local_weights
from pipeline.monitor.origin import find_origin
from pipeline.monitor.run_page import DatasetFacts, RunFacts, WeightsOrigin, dataset_name
from pipeline.monitor.tracking import send_report
from pipeline.process.outputs import hold
from pipeline.settings.commands.segment import SegmentConfig
from pipeline.settings.commands.weights import LookConfig

_RESULTS, _HEAD, _SHEET, _MASKS = "segmentation.json", "head.safetensors", "sheet.png", "predicted_masks"
# Settings that change the layer, besides the weights, the pairs and their classes.
_OF_TRAINING = (
    "image_size",
    "resize_filter",
    "precision",
    "short_side",
    "steps",
    "train_batch",
    "lr",
    "seed",
)
# Folders that name a part of a data set, and not the data set; and the part that is held out of the images.
_SPLITS, _HELD_OUT = {"train", "training", "val", "validation", "test"}, "held-out"
# Steps after which the loss is read from the device.
_STEPS_BETWEEN_LOOKS = 20


def run(config: SegmentConfig) -> dict[str, Any]:
    """Train and score the layer, print its mIoU, and write the masks of other images; returns the content of
    segmentation.json.

    Its keys include miou and interval, in [0, 1]. A layer that this command has trained before is not trained again.
    Raises UserError for a user's mistake before anything is written.
    """
    config = with_local_weights(config)
    file = find_file(Path(config.weights))  # Once, because a run in training changes its `latest`.
    origin = find_origin(file, config.weights)
    loaded = load_model(replace(config, weights=str(file)))
    _check_model(config, loaded)
    learnt, scored = open_pairs(config, loaded.pixels)
    data, split = _scored_on(config)
    folder = output_folder(config.out, config.weights, "segment", f"{data}-{split}", holds="segmentation")
    hold(folder)
    others = open_others(config, folder / _MASKS, loaded.pixels) if config.apply else None
    classes = scan(config, _budget(config), learnt, scored)
    runs = _warn(loaded, learnt, scored)
    print(
        f"{counted(len(classes.values), 'class')}; {counted(len(learnt), 'image')} to learn from,"
        f" {counted(len(scored), 'image')} to be scored on",
        flush=True,
    )

    identity = _identity(config, origin.sha256, learnt, classes)
    head = LinearHead(loaded.model.config.width, len(classes.values), config.seed).to(loaded.device)
    if (not_learnt := _trained_before(folder / _HEAD, head, identity)) is None:
        not_learnt = _train(config, loaded, head, learnt, classes)
    with (
        PairReader(scored, classes) as reader,
        tqdm(total=len(scored), desc="score", unit=" images", disable=None) as bar,
    ):
        counts, problems = count_all(reader, loaded, head, config, bar.update)
    _refuse(problems, scored, config)
    print_unreadable(problems, scored.named, "not scored")
    known = np.array([number for number in range(len(scored)) if number not in problems])
    groups = np.array(scored.groups)
    found = score(counts[known], groups[known] if len(groups) else groups)
    results: dict[str, Any] = {
        "weights": config.weights,
        "run": loaded.extra.get("run"),
        "step": loaded.extra.get("step"),
        "data": ", ".join(config.val_images or config.images),
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
        "unreadable": {scored.names[number]: why for number, why in sorted(problems.items())},
        "unreadable_learnt": {learnt.names[number]: why for number, why in sorted(not_learnt.items())},
    }
    about = {"identity": identity, "classes": classes.names, "unreadable": dict(sorted(not_learnt.items()))}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in head.state_dict().items()}
    contents: dict[str, bytes | str | None] = {
        # One text: safetensors mixes the order of several.
        _HEAD: save(tensors, {"segmentation": json.dumps(about)}),
        _RESULTS: json.dumps(json_record.without_nan(results), indent=1, ensure_ascii=False) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_files(folder, contents, mark=_RESULTS)
    print(f"mIoU {_in_words(found)}; {folder / _RESULTS}")
    files = [folder / name for name in contents]
    if others is not None:
        files.append(folder / _SHEET)
        budget = replace(_budget(config), least=LookConfig.least_bad)
        write_masks(config, others, loaded, head, classes, files[-1], budget)
    if config.mlflow:
        about_scored = json.dumps([scored.names, counts[:, 2].sum(0).tolist(), scored.images.shard_bytes.tolist()])
        facts = DatasetFacts(
            data,
            str((config.val_images or config.images)[0]),
            hashlib.sha256(about_scored.encode()).hexdigest()[:16],
            split,
            len(scored),
            len(classes.values),
            "evaluation",
            {TRAINED_BY: runs} if runs else {},
        )
        _send(config, facts, loaded, origin, results, _in_words(found), files)
    return results


def _check_model(config: SegmentConfig, loaded: LoadedModel) -> None:
    """Raises UserError for a model without patches, and sizes that do not suit."""
    if not isinstance(loaded.model, VisionTransformer):
        raise UserError(
            f"weights = {config.weights}: a ResNet has no patch tokens. Segmentation needs a ViT, or a hybrid."
        )
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
    """(name of the data, its split) that is scored on: of a data set its own; else by the last folders of the path,
    without wildcards.
    """
    place = (config.val_images or config.images)[0].rstrip("/")
    parts = [part for part in Path(place).parts if not set(part) & set("*?[/") and part not in (".", "..", "images")]
    names = [part.removesuffix(".tar") for part in parts] or ["images"]
    if is_dataset([place]):
        return names[-1], config.val_split or _HELD_OUT
    split = names.pop() if names[-1].lower() in _SPLITS and len(names) > 1 else "val"
    return names[-1], split if config.val_images else _HELD_OUT


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


def _identity(config: SegmentConfig, weights: str, learnt: MaskedPairs, classes: MaskClasses) -> str:
    """What a layer belongs to. weights: SHA-256 of theirs. classes: also those that only the masks scored on have."""
    settings = {name: getattr(config, name) for name in _OF_TRAINING}
    about = [settings, weights, learnt.content(), learnt.pixels.to_dict(), classes.values.tolist()]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _trained_before(file: Path, head: LinearHead, identity: str) -> dict[int, str] | None:
    """Load the layer that an earlier command has trained with these settings. Returns its unreadable pairs; None if
    there is none.
    """
    if not file.is_file():
        return None
    tensors, metadata = open_safetensors(file)
    about = json.loads(metadata["segmentation"])
    if about["identity"] != identity:
        print(f"{file} is of other settings: it is trained again")
        return None
    head.load_state_dict(tensors)
    print(f"trained already: {file}")
    return {int(number): why for number, why in about["unreadable"].items()}


def _train(
    config: SegmentConfig, loaded: LoadedModel, head: LinearHead, pairs: MaskedPairs, classes: MaskClasses
) -> dict[int, str]:
    """Train with a progress bar. Returns number of a pair -> why it cannot be read. Raises UserError for too many."""
    problems, allowed = dict[int, str](), _budget(config).allowed(len(pairs))
    with (
        PairReader(pairs, classes) as reader,
        tqdm(total=config.steps, desc="layer", unit=" steps", disable=None) as bar,
    ):
        crops = batches(reader, config, loaded.view, min(loaded.image_size), problems)
        for step, mean in enumerate(train(head, loaded, crops, config), start=1):
            bar.update()
            if len(problems) > allowed:
                _refuse(problems.copy(), pairs, config)  # Threads go on to fill it.
            if step % _STEPS_BETWEEN_LOOKS and step < config.steps:
                continue
            if not np.isfinite(loss := float(mean)):
                raise UserError(f"step {step:,}: the loss is not finite. Lower lr, or use precision=fp32.")
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    _refuse(problems, pairs, config)
    print_unreadable(problems, pairs.named, "not learnt from")
    return problems


def _in_words(found: SegmentationScore) -> str:
    over = counted(found.num_groups, "group") if found.num_groups else "images"
    interval = "" if np.isnan(found.low) else f" ({found.low:.2%} to {found.high:.2%}, 95 % over {over})"
    return f"{found.miou:.2%}{interval}"


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


def _send(
    config: SegmentConfig,
    data: DatasetFacts,
    loaded: LoadedModel,
    origin: WeightsOrigin,
    results: dict[str, Any],
    found: str,
    files: list[Path],
) -> None:
    """Send the score to MLflow. data: what was scored on. found: the score in words."""
    metric = f"{data.split}_miou"
    names = ("weights", "step", "data", TRAINED_BY, "image_size", "short_side", "lr", "precision")
    # "steps" are those of the weights' run.
    parameters = {name: results[name] for name in names} | {"length": f"{config.steps} steps of {config.train_batch}"}
    facts = RunFacts(
        f"segments {dataset_name(data)}",
        "evaluation",
        parameters,
        description=(
            f"**Segmentation** of {dataset_name(data)} by a linear layer on the frozen patch tokens of"
            f" `{config.weights}`: mIoU {found}."
        ),
        score=metric,
        scored_on=f"mIoU {dataset_name(data)}",
        metrics={metric: metric_of(metric)},
    )
    facts = facts_of_scores(config.weights, loaded, origin, data, facts)
    send_report(config.mlflow, files[0].parent, facts, {metric: results["miou"]}, files, config.experiment)
