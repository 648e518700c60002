"""Weights, and images if there are any -> a folder of pictures of what is inside; `run` is the whole of it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from pipeline import random_numbers
from pipeline.data.dataset.split import Split
from pipeline.data.loading.adhoc_split import AdhocSplit
from pipeline.data.loading.loader import Loader, eval_view
from pipeline.data.storage.whole import write_files
from pipeline.errors import UserError
from pipeline.evaluate.classify import outcomes
from pipeline.evaluate.loaded_model import LoadedModel, load_model, output_folder
from pipeline.evaluate.predict import open_images, predict_all
from pipeline.evaluate.probes.features import requests
from pipeline.evaluate.render import table_csv
from pipeline.explain import figures, galleries
from pipeline.explain.attention import distances, join, look
from pipeline.explain.gradcam import gradcam
from pipeline.explain.parameters import Cost, cost, costs, position_similarity, principal_filters
from pipeline.model import VisionTransformer, ViTConfig
from pipeline.outputs import try_output
from pipeline.random_numbers import Purpose
from pipeline.settings.weights import DRAWINGS, ExplainConfig

_SHEET = 48
_OF_ATTENTION = {"attention", "rollout", "distance"}
_OF_TOKENS = {*_OF_ATTENTION, "positions", "patches", "cost"}
_OF_CLASSES = {"gradcam", "predictions"}
_OF_IMAGES = {*_OF_ATTENTION, *_OF_CLASSES, "patches"}


@dataclass
class Found:
    """What goes into the folder. drawings: name -> figure. tables: name -> rows. numbers: for explain.json."""

    drawings: dict[str, Figure]
    tables: dict[str, list[dict[str, Any]]]
    numbers: dict[str, Any]


def run(config: ExplainConfig) -> tuple[dict[str, Any], list[Path]]:
    """Draw what was asked for into the folder; returns what explain.json holds, and the files written.

    Raises UserError for a user's mistake, before anything is written.
    """
    loaded = load_model(config)
    wanted = _wanted(config, loaded)
    folder = output_folder(config.out, config.weights, "explain")
    try_output("out", folder)
    of_weights = {name: loaded.extra.get(name) for name in ("run", "step")}
    found = Found({}, {}, {"weights": config.weights, **of_weights, "model": loaded.model.config.to_dict()})
    _look_at_weights(loaded, wanted, found)
    if wanted & _OF_IMAGES:
        _look_at_images(config, loaded, wanted, found)

    contents = {f"{name}.png": figures.png(figure) for name, figure in found.drawings.items()}
    contents |= {f"{name}.csv": table_csv(rows) for name, rows in found.tables.items()}
    contents["explain.json"] = (json.dumps(found.numbers, indent=1, ensure_ascii=False) + "\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    if "attention" in wanted:
        for old in folder.glob("attention*.png"):
            old.unlink()  # Of an earlier choice of layers and heads.
    write_files(folder, contents)
    print(f"{', '.join(contents)} in {folder}")
    return found.numbers, [folder / name for name in contents]


def metrics(numbers: dict[str, Any]) -> dict[str, float]:
    """Those of explain.json that are numbers of the weights, for MLflow."""
    found = {name: float(value) for name, value in numbers.get("cost", {}).items()}
    for block, heads in enumerate(numbers.get("mean_attention_distance", []), start=1):
        found[f"attention_distance.block_{block:02d}"] = sum(heads) / len(heads)
    if "predictions" in numbers:
        found["wrong_share"] = numbers["predictions"]["wrong"] / numbers["predictions"]["images"]
    return found


def _wanted(config: ExplainConfig, loaded: LoadedModel) -> set[str]:
    """Names of the drawings to make. Raises UserError for one asked for that cannot be made."""
    model = loaded.model
    why_not: dict[str, str] = {}
    if not config.images:
        why_not |= dict.fromkeys(_OF_IMAGES, "images=... is not set")
    if not model.config.num_classes:
        why_not |= dict.fromkeys(_OF_CLASSES, "these weights have no head")
    if not isinstance(model, VisionTransformer):
        why_not |= dict.fromkeys(_OF_TOKENS, "a ResNet has no tokens")
    else:
        if model.positions is None:
            why_not["positions"] = f"positions = {model.config.positions} adds nothing to the tokens"
        there = {"layer": (config.layer, model.config.num_blocks), "head": (config.head, model.config.num_heads)}
        for name, (asked, most) in there.items():
            if asked.isdigit() and int(asked) > most:
                raise UserError(f"{name} = {asked}, but {config.weights} has {most}.")
    for name in config.draw:
        if name in why_not:
            raise UserError(f"draw = {name} cannot be drawn of {config.weights}: {why_not[name]}.")
    if config.draw:
        return set(config.draw)
    for reason in sorted(set(why_not.values())):
        print(f"not drawn: {', '.join(name for name in DRAWINGS if why_not.get(name) == reason)} ({reason})")
    return {name for name in DRAWINGS if name not in why_not}


# ------------------------------------------------------------------------------------------------------ without images


def _look_at_weights(loaded: LoadedModel, wanted: set[str], found: Found) -> None:
    model = loaded.model
    if "filters" in wanted:
        filters = principal_filters(model)
        found.drawings["filters"] = figures.draw_filters(filters, "What the first layer sees")
        found.numbers["filter_variance_shares"] = filters.shares.tolist()
    if not isinstance(model, VisionTransformer):
        return
    if "positions" in wanted and (similarity := position_similarity(model)) is not None:
        found.drawings["positions"] = figures.draw_positions(similarity, "Similarity of position embeddings")
    if "cost" in wanted:
        own, others = cost(model.config), costs(model.config)
        found.drawings["cost"] = figures.draw_costs(others, own, "Tokens and arithmetic of other images and patches")
        found.tables["cost"] = [_cost_row(each) for each in others]
        found.numbers["cost"] = _cost_row(own)
        print(
            f"{own.image} px in patches of {own.patch}: {own.tokens:,} tokens, {own.macs / 1e9:.4g} GMACs an image, "
            f"{own.attention_macs / own.macs:.1%} of them attention"
        )


def _cost_row(of: Cost) -> dict[str, Any]:
    return {**asdict(of), "attention_share": of.attention_macs / of.macs}


# --------------------------------------------------------------------------------------------------------- with images


def _look_at_images(config: ExplainConfig, loaded: LoadedModel, wanted: set[str], found: Found) -> None:
    pictures, names = open_images(config, loaded)
    for line in pictures.split.notes():
        print(line)
    order = random_numbers.permutation(len(pictures.split), Purpose.EXPLAINED_IMAGES, config.seed)
    if len(order) <= config.num_drawn:
        order = np.sort(order)
    num_seen = max(config.num_drawn, config.num_averaged if "distance" in wanted else 0)
    rows, pixels = _views(config, loaded, pictures.split, order[:num_seen])
    rows, drawn = rows[: config.num_drawn], pixels[: config.num_drawn]
    captions = [_caption(pictures, row) for row in rows.tolist()]
    found.numbers["images"] = pictures.split.keys(rows)

    model = loaded.model
    if isinstance(model, VisionTransformer) and "patches" in wanted:
        found.drawings["patches"] = figures.draw_patches(drawn[0].numpy(), model.config, "An image as tokens")
    if isinstance(model, VisionTransformer) and wanted & _OF_ATTENTION:
        images = loaded.images(pixels)
        _look_at_attention(config, model, wanted, images, drawn.numpy(), captions, found)
    if "gradcam" in wanted:
        found.drawings["gradcam"] = _look_for_classes(loaded, names, drawn, captions)
    if "predictions" in wanted:
        chosen = np.sort(order[: config.num_predicted])
        _look_at_predictions(config, loaded, pictures.true_classes(names).split.only(chosen), names, found)


def _views(config: ExplainConfig, loaded: LoadedModel, split: Split, rows: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """The rows that can be read, and what the model sees of them, uint8 (n, S, S, 3). Raises UserError for none."""
    size, view = loaded.image_size, eval_view(loaded.view)
    kept, pixels = [], []
    with Loader(split, view, size, config.threads, prefetch=2, max_bad_share=1.0) as loader:
        for batch in loader.batches(requests(rows, config.batch)):
            kept.append(batch.rows[batch.valid.numpy()])
            pixels.append(batch.images[batch.valid])
    for row, reason in loader.bad.items():
        print(f"left out: {split.keys([row])[0]} cannot be read ({reason})")
    if len(loader.bad) == len(rows):
        raise UserError(f"none of the {len(rows):,} images chosen of {', '.join(config.images)} can be read.")
    return np.concatenate(kept), torch.cat(pixels)


def _caption(pictures: AdhocSplit, row: int) -> str:
    """The true class where it is known, else the name of the file."""
    labels = pictures.split.labels_of(row)
    return pictures.label_names[labels[0]] if len(labels) else PurePosixPath(pictures.split.keys([row])[0]).stem


def _look_at_attention(
    config: ExplainConfig, model: VisionTransformer, wanted: set[str], images: Tensor,
    drawn: np.ndarray, captions: Sequence[str], found: Found,
) -> None:  # fmt: skip
    parts = images.split(config.batch)
    attention = join([look(model, part) for part in tqdm(parts, desc="attention", unit=" batches", disable=None)])
    if "attention" in wanted:
        found.drawings |= galleries.draw_attention(attention, model.config, config.layer, config.head, drawn, captions)
    if "rollout" in wanted:
        found.drawings["rollout"] = galleries.draw_rollout(attention, model.config, drawn, captions)
    if "distance" in wanted:
        averaged = attention.distances[: config.num_averaged]
        mean, uniform = averaged.mean(0), float(distances(model.config).mean())
        title = f"How far heads look (mean of {len(averaged)} images)"
        found.drawings["distance"] = figures.draw_distances(mean, uniform, title)
        found.numbers |= {"mean_attention_distance": mean.tolist(), "uniform_attention_distance": uniform}


def _look_for_classes(loaded: LoadedModel, names: Sequence[str], drawn: Tensor, captions: Sequence[str]) -> Figure:
    with torch.no_grad():
        shares = loaded.probabilities(drawn)
    maps, said = [], []
    for classes in shares.topk(min(2, shares.shape[1])).indices.T:
        maps.append(gradcam(loaded.model, loaded.images(drawn), classes))
        said.append([f"{names[c]}: {shares[i, c]:.0%}" for i, c in enumerate(classes.tolist())])
    config = loaded.model.config if isinstance(loaded.model.config, ViTConfig) else None
    return galleries.draw_gradcam(maps, said, config, drawn.numpy(), captions)


def _look_at_predictions(
    config: ExplainConfig, loaded: LoadedModel, split: Split, names: Sequence[str], found: Found
) -> None:
    """Of a split whose labels are of the classes `names`, or that has none."""
    done = predict_all(config, loaded, split, num_top=1)
    true, predicted = outcomes(done, split)
    confidence = done.probabilities[:, 0]
    known = np.flatnonzero(done.readable & (true >= 0))
    if len(known):
        right = (true == predicted)[known]
        rows = known[galleries.order_by_mistake(right, confidence[known], _SHEET)]
        num_wrong = int((~right).sum())
        note = (
            f"True class, then what it was taken for: {num_wrong:,} of {len(known):,} are wrong. "
            "The most confident mistakes first; then what is right, the least confident first."
        )
        found.numbers["predictions"] = {"images": len(known), "wrong": num_wrong}
    else:
        readable = np.flatnonzero(done.readable)
        rows = readable[np.argsort(-confidence[readable], kind="stable")[:_SHEET]]
        note = "The true classes are not known. The most confident first."
    _, pixels = _views(config, loaded, split, rows)
    of_rows = [None if true[row] < 0 else names[true[row]] for row in rows]
    taken_for = [names[number] for number in predicted[rows]]
    found.drawings["predictions"] = galleries.draw_predictions(
        pixels.numpy(), of_rows, taken_for, confidence[rows], note
    )
