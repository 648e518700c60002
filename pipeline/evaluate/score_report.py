"""Scores weights on a split and writes a report; entry point: `run`."""

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import table_csv
from pipeline.base.metric import MAIN, metric_of
from pipeline.base.page import Block, PngImage, report
from pipeline.base.trained_on import TRAINED_BY, not_held_out, recorded, trained_by
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import Dataset, Split, open_dataset
from pipeline.data.loading.views import default_eval_resize
from pipeline.data.storage.atomic import write_files
from pipeline.data.storage.bucket import to_path
from pipeline.evaluate import architecture, mistakes, multilabel, render
from pipeline.evaluate.classify import (
    Features,
    Predictions,
    extract,
    in_groups,
    label_map,
    label_table,
    outcomes,
    per_class,
    predict,
    score,
)
from pipeline.evaluate.intervals import effective_number
from pipeline.evaluate.loaded_model import LoadedModel, check_outputs, load_model, output_folder
from pipeline.evaluate.probes.out_of_fold import predict_out_of_fold
from pipeline.evaluate.probes.probe import choose_samples, probe, probe_metrics, spread_rows
from pipeline.evaluate.probes.rankme import spread
from pipeline.evaluate.regression import TargetPredictions, predict_targets, score_targets, with_targets_of
from pipeline.monitor.mlflow.weights import find_weights
from pipeline.monitor.run_page import DatasetFacts, RunFacts, WeightsOrigin
from pipeline.monitor.tracking import send_report
from pipeline.objectives.classification import unnamed_note
from pipeline.objectives.regression import metrics_of
from pipeline.process.outputs import hold
from pipeline.settings.commands.weights import ScoreConfig

# Keys of the scores, and settings of the probes, that MLflow shows as parameters.
_PARAMETERS = (
    "weights",
    "step",
    "data",
    "split",
    "image_size",
    "eval_crop",
    "eval_resize",
    "resize_filter",
    "precision",
    "excluded",
    TRAINED_BY,
)
_OF_PROBES = ("train_split", "shots_seeds", "l2", "temperature", "neighbour_images")


def run(config: ScoreConfig) -> dict[str, Any]:
    """Score `config.weights` on `config.split`, write the report and print its table; returns the content of
    scores.json.

    Its keys include, if scored: top1, top5 (of more than five classes), loss, num_samples, num_unreadable,
    num_unlabelled, images_per_second, macro_precision, macro_recall, macro_f1, per_class; of several labels map,
    label_f1, per_label; of numbers r2, spearman, per_target; fewshot (one row per number of shots and strength), knn.
    Accuracies are in [0, 1]. Raises UserError before anything is written, such as for weights of other classes than the
    data.
    """
    # ---------------------------------------------------------------------- the data and the weights
    config, of_file, origin = find_weights(config)
    if config.folds:
        config = replace(config, classify=False, shots=[], neighbours=0)
    dataset = open_dataset(config.data)
    loaded = load_model(of_file, config.loss)
    names = loaded.target_names if config.classify else []
    if names and not dataset.classes:  # What is probed by default reads labels.
        config = replace(config, shots=[], neighbours=0)
    reads_labels, classifies = config.reads_labels or config.folds > 0, config.classify and not names
    if classifies or reads_labels:
        dataset.refuse_without_labels("data", "Scores need some. Without: launch/features.py.")
    split = dataset.split(config.split, config.exclude)
    split.refuse_without_score(config.data, classifies or reads_labels)
    train = None
    if config.reads_labels:  # Before the forward pass of the other split.
        train = dataset.split(config.train_split, config.exclude)
        train.refuse_without_score(f"train_split of {config.data}", True)
    scored, scored_split = dataset, split
    if names:
        scored_split = with_targets_of(config.weights, names, dataset, split)
    if classifies:
        scored, scored_split = _in_classes_of_weights(config, loaded, dataset, split)
    is_multilabel = classifies and multilabel.is_multilabel(scored_split, scored.num_classes, loaded.loss_kind)
    data = to_path(config.data)
    name = f"{(data.resolve() if isinstance(data, Path) else data).name}-{config.split}{'-folds' * (config.folds > 0)}"
    folder = output_folder(config.out, config.weights, "evaluate", name, holds="evaluation")
    hold(folder)
    trained = trained_by(recorded(loaded.extra), dataset.fingerprint, split.name)
    of_weights = [not_held_out(split.name, trained)] if trained else []
    for line in dict.fromkeys(split.notes() + (train.notes() if train else []) + of_weights):
        print(line)

    # ---------------------------------------------------------------------- one forward pass over the split
    begin = time.perf_counter()
    predictions, features = _forward(config, loaded, scored_split, is_multilabel)
    seconds = time.perf_counter() - begin
    seen = predictions or features
    assert seen is not None, "config.check requires at least one score"
    check_outputs(config.weights, f"{config.data} (split {split.name!r})", seen, split)

    # ---------------------------------------------------------------------- the scores
    size, view = loaded.image_size, loaded.view
    scores: dict[str, Any] = {
        "weights": config.weights,
        **loaded.made_by,
        "data": config.data,
        "split": config.split,
        "fingerprint": dataset.fingerprint,
        "excluded": split.excluded,
        "num_classes": scored.num_classes,
        "image_size": str(size),
        "eval_crop": view.eval_crop,
        "eval_resize": (view.eval_resize or default_eval_resize(size)) if view.eval_crop != "resize" else min(size),
        "resize_filter": view.resize_filter,
        "loss_kind": loaded.loss_kind,
        "precision": config.precision,
        "device": str(loaded.device),
        TRAINED_BY: trained,
        "num_samples": len(split),
        "num_unreadable": len(seen.problems),
        "images_per_second": len(split) / seconds,
        "unreadable": _named(seen.problems, split),
    }
    if split.groups is not None:
        scores["num_groups"] = len(np.unique(split.groups))
    if classifies or reads_labels:
        scores["num_unlabelled"] = int((label_table(scored_split)[:, 0] < 0).sum())
    judged = None
    if isinstance(predictions, TargetPredictions):
        of_targets = score_targets(predictions, names, split.groups)
        scores |= {"targets": names, **of_targets.to_dict(), "per_target": of_targets.records()}
    elif predictions is not None:
        scores |= score(predictions, scored_split, scored.num_classes, loaded.loss_kind).to_dict()
        if is_multilabel:
            scores |= multilabel.score(predictions, scored_split, scored.class_names)
        judged = *outcomes(predictions, scored_split), predictions.probabilities[:, 0], predictions.of_label
    elif config.folds and features is not None:
        true = label_table(split)[:, 0]
        judged = true, *predict_out_of_fold(features, true, scored.num_classes, config.folds, split.groups)
        right = (judged[1] == true) & (true >= 0)
        scores["linear"] = {"folds": config.folds, "top1": float(right.mean())}
        if split.groups is not None:
            scores["linear"]["effective_images"] = effective_number(*in_groups(right, split.groups))
    if features is not None and train is not None:
        scores |= _probe(config, loaded, features, split, train, dataset.num_classes)
    if features is not None and config.rankme_images:
        rows = spread_rows(config, len(split))
        scores["spread"] = spread(Features(features.values[rows], features.readable[rows], {}))

    # ---------------------------------------------------------------------- the files
    written = ("per_class.csv", multilabel.CSV, "confusion.png", "per_target.csv", "scatter.png")
    files: dict[str, bytes | str | None] = {
        **dict.fromkeys(written),
        **mistakes.NO_FILES,
    }
    of_mistakes: list[Block] = []
    if isinstance(predictions, TargetPredictions):
        values = np.where(predictions.readable[:, None], predictions.values, np.nan)
        files["per_target.csv"] = table_csv(scores["per_target"])
        scatter = render.draw_scatter(values, predictions.targets, names)
        of_mistakes = [PngImage("scatter.png", render.SCATTER, scatter)]
    if judged is not None:
        classes = per_class(*judged[:2], scored.num_classes)
        scores |= classes.macro()
        scores["per_class"] = pa.table({"class": scored.class_names, **classes._asdict()}).to_pylist()
        found, pictures = mistakes.find(
            *judged,
            scored.class_names,
            split,
            partial(loaded.shown, config, split),
            mistakes.how_found(split.name, trained, config.folds),
            config.data,
        )
        confusion = render.draw_confusion(*judged[:2], scored.class_names)
        files |= {"per_class.csv": table_csv(scores["per_class"]), **found.files(pictures)}
        picture = PngImage("confusion.png", render.CONFUSION, confusion) if confusion else None
        of_mistakes = mistakes.blocks(found, pictures, folder, picture)
    if "per_label" in scores:
        files[multilabel.CSV] = table_csv(scores["per_label"])
    content = json.dumps(json_record.without_nan(scores), indent=1, ensure_ascii=False)
    # First: with report.html alone, the folder would be one of launch/report.py.
    files = {"scores.json": content, **files, **report(*render.page(scores, of_mistakes))}
    write_files(folder, files, mark="report.html")
    for name, value in render.summary(scores):
        print(f"{name:<44} {value:>18}")
    print(f"report: {folder / 'report.html'}")
    if origin is not None:
        sent = [name for name, content in files.items() if content]
        _send(config, scored, loaded, origin, scores, folder, sent)
    return scores


def _send(
    config: ScoreConfig,
    dataset: Dataset,
    loaded: LoadedModel,
    origin: WeightsOrigin,
    scores: dict[str, Any],
    folder: Path,
    files: Iterable[str],
) -> None:
    """Send the scores to MLflow."""
    data, split, trained = dataset.path.name, scores["split"], scores[TRAINED_BY]
    of_targets = metrics_of(scores["targets"]) if "targets" in scores else {}
    declared = {f"{split}_{name}": replace(metric, group="eval") for name, metric in of_targets.items()}
    metrics = {
        f"{split}_{name}": float(value)
        for name, value in scores.items()
        # Whatever the split is called.
        if isinstance(value, int | float) and (name in of_targets or metric_of(f"val_{name}").group == "eval")
    }
    probed = probe_metrics(scores, data)
    # Of features alone, the first probe.
    main = [name for of in MAIN if (name := f"{split}_{of}") in metrics]
    score = next(iter([*main, *probed]), f"{split}_top1")
    parameters = {key: value for key, value in scores.items() if key in _PARAMETERS}
    parameters |= {"targets": ", ".join(scores["targets"])} if "targets" in scores else {}
    parameters |= {name: getattr(config, name) for name in _OF_PROBES if config.reads_labels}
    notes = {TRAINED_BY: trained} if trained else {}
    of_data = data, str(dataset.path), dataset.fingerprint, split, scores["num_samples"], dataset.num_classes
    facts = DatasetFacts(*of_data, "evaluation", notes)
    held_out = f" {not_held_out(split, trained)}." if trained else ""
    about = RunFacts(
        f"{loaded.extra.get('run') or Path(config.weights).name} on {data}:{split}",
        "evaluation",
        parameters,
        {"model": architecture.name_of(loaded.model.config), "data": facts.digest, "dataset": data},
        (facts,),
        f"**Scores** of `{config.weights}` on {data}, {split}.{held_out}",
        {"parent": origin.run_id} if origin.run_id else {},
        score=score,
        origin=origin,
        metrics=declared,
    )
    paths = [folder / name for name in files]
    result = f"**Result**: {'; '.join(f'{name.strip()} {value}' for name, value in render.summary(scores))}."
    send_report(config.mlflow, folder, about, metrics | probed, paths, config.experiment, result)


def _in_classes_of_weights(
    config: ScoreConfig, loaded: LoadedModel, dataset: Dataset, split: Split
) -> tuple[Dataset, Split]:
    """(the data set with the classes of the weights, the split with their numbers).

    Raises UserError where the classes of the data are not among those of the weights, as those of each set of a mixture
    are.
    """
    num_classes, own = loaded.model.config.num_classes, dataset.classes
    names = loaded.extra.get("classes") if config.match_classes else None
    if num_classes and names and set(own) <= set(names):
        if names != own:
            split = split.relabelled(label_map(own, names))
            others = ", and a prediction of one of the others is wrong" * (len(own) < len(names))
            known = f"{len(own):,} of {config.data} are among the {len(names):,} of the weights"
            print(f"classes by name: the {known}{others}")
        shown = dict(zip(own, dataset.class_names, strict=True))
        class_names = [shown.get(name, name) for name in names]
        return replace(dataset, info={**dataset.info, "classes": names, "class_names": class_names}), split
    remedy = "Use the data set that these weights were made for, or classify=false to score their features alone."
    if num_classes != len(own):
        raise UserError(
            f"{config.weights} has {counted(num_classes, 'class')}, {config.data} has {counted(len(own), 'class')}."
            f" {remedy}"
        )
    for number, (there, here) in enumerate(zip(names or own, own, strict=False)):
        if there != here:
            raise UserError(
                f"class {number} is {there!r} in {config.weights}, but {here!r} in {config.data}. {remedy} If only the"
                " names differ: match_classes=false."
            )
    if config.match_classes:
        print(unnamed_note(config.weights, config.data, own))
    return dataset, split


def _forward(
    config: ScoreConfig, loaded: LoadedModel, split: Split, keeps_all: bool
) -> tuple[Predictions | TargetPredictions | None, Features | None]:
    """Returns predictions if the head is scored, features if they are probed. keeps_all: see `predict`."""
    with loaded.reading(split, config) as reader:
        if not config.classify:
            return None, extract(loaded.features, reader, np.arange(len(split)))
        features_seen: list[np.ndarray] = []

        def logits(images: Tensor) -> Tensor:
            features = loaded.features(images)
            if config.probes:
                features_seen.append(features.float().cpu().numpy())
            return loaded.outputs(features)

        done: Predictions | TargetPredictions
        if loaded.target_names:
            done = predict_targets(logits, reader)
        else:
            done = predict(logits, reader, loaded.loss_kind, keeps_all=keeps_all)
        # A single rank reads each row once, in order.
        return done, Features(np.concatenate(features_seen), done.readable, done.problems) if config.probes else None


def _probe(
    config: ScoreConfig, loaded: LoadedModel, tested: Features, split: Split, train: Split, num_classes: int
) -> dict[str, Any]:
    """Scores of the probes. Only the training images that they need are run through the model."""
    choice = choose_samples(config, train, num_classes)
    if not len(choice.rows):
        raise UserError(f"{config.data}: no image of split {train.name!r} has a class. Use shots=0 neighbours=0.")
    with loaded.reading(train, config) as reader:
        seen = extract(loaded.features, reader, choice.rows)
    scores = probe(config, choice, seen, tested, label_table(split), reader.ranks, split.groups)
    return {**scores, "probe_split": train.name, "probe_unreadable": _named(seen.problems, train)}


def _named(problems: dict[int, str], split: Split) -> list[dict[str, str]]:
    rows = sorted(problems)
    return [{"key": key, "problem": problems[row]} for key, row in zip(split.keys(rows), rows, strict=True)]
