"""Writes a folder of drawings that explain weights, and what they compute for images; `run` does everything."""

import json
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, cast

import numpy as np
import torch
from matplotlib.figure import Figure

from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.gallery import DPI, Tile
from pipeline.base.page import png
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted
from pipeline.data.dataset.split import BadBudget
from pipeline.data.loading.loader import normalise
from pipeline.data.loading.values import to_rgb
from pipeline.data.storage.atomic import write_files
from pipeline.evaluate.classify import each_sample, outcomes
from pipeline.evaluate.loaded_model import (
    LoadedModel,
    load_model,
    output_folder,
    print_unreadable,
    refuse_none_readable,
)
from pipeline.evaluate.patches import patch_components
from pipeline.evaluate.predict import open_images, predict_all, print_numbered
from pipeline.explain import galleries
from pipeline.explain.attention import compute_attention, patch_distances
from pipeline.explain.parameters import position_similarity, principal_filters
from pipeline.explain.reconstruction import reconstruct
from pipeline.model import VisionTransformer, read_weights
from pipeline.monitor.mlflow.weights import find_weights
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import send_report
from pipeline.objectives.mae import Mae
from pipeline.process.outputs import hold
from pipeline.settings.commands.weights import DRAWINGS, ExplainConfig
from pipeline.settings.quantities import ImageSize, whole_number

_NUM_PREDICTIONS = 48  # Images on the sheet of predictions.
_NUM_PREDICTED = 1000  # Images that are searched for the most confident mistakes.
_NUM_AVERAGED = 128  # Images that attention distance is averaged over, as in the ViT paper.
_ATTENTION_DRAWINGS = {"attention", "rollout", "distance"}
_TOKEN_DRAWINGS = {*_ATTENTION_DRAWINGS, "components", "positions"}
_IMAGE_DRAWINGS = {*_ATTENTION_DRAWINGS, "predictions", "components", "reconstruction"}
_OF_NUMBERS = {"distance", "positions"}  # These show no pixels.
Drawn = dict[str, Figure]


def run(config: ExplainConfig, skip: bool = False) -> dict[str, Any]:
    """Write the drawings, and send them to `config.mlflow`. Returns the content of explain.json.

    skip: leave out drawings of `config.draw` that the model does not have, with a line. Raises UserError for a user's
    mistake, before anything is written.
    """
    config, of_file, origin = find_weights(config)
    content = read_weights(of_file.weights, print)
    loaded = load_model(of_file, config.loss, content)
    mae = None
    if config.images and (not config.draw or "reconstruction" in config.draw):
        mae = Mae.from_weights(content, print, normalise=config.normalise)
    del content  # whose tensors the models have copied
    wanted = _choose_drawings(config, loaded, mae, skip)
    folder = output_folder(config.out, config.weights, "explain", holds="explanation")
    hold(folder)
    numbers: dict[str, Any] = {"weights": config.weights, **loaded.made_by, "model": loaded.model.config.to_dict()}
    drawn = Drawn()
    if "filters" in wanted:
        components, shares, num_filters = principal_filters(loaded.model)
        drawn["filters"] = galleries.draw_filters(components, shares, num_filters, loaded.pixels.shown)
        numbers["filter_variance_shares"] = shares.tolist()
    if "positions" in wanted:
        drawn["positions"] = galleries.draw_positions(position_similarity(loaded.vit))
    if wanted & _IMAGE_DRAWINGS:
        drawn |= _draw_images(config, loaded, mae, wanted, numbers)

    caption = loaded.pixels.describe_shown()
    if caption:
        print(caption)
        numbers["shown_channels"] = [loaded.pixels.channels[place] for place in loaded.pixels.shown]
    contents: dict[str, bytes | str] = {
        f"{name}.png": png(figure, DPI, "" if name in _OF_NUMBERS else caption) for name, figure in drawn.items()
    }
    contents["explain.json"] = json.dumps(numbers, indent=1, ensure_ascii=False) + "\n"
    # What is not drawn now may be of other weights.
    old = [f"{name}.png" for name in DRAWINGS]
    write_files(folder, {**dict.fromkeys(old), **contents}, mark="explain.json")
    print(f"{', '.join(contents)} in {folder}")
    if origin is not None:
        tags = {"weights": config.weights, "weights_run": str(numbers["run"])}
        parents = {"parent": origin.run_id} if origin.run_id else {}
        facts = RunFacts(f"explain {config.weights}", "explain", tags=tags, parents=parents, origin=origin)
        files = [folder / name for name in contents]
        send_report(config.mlflow, folder, facts, {}, files, config.experiment)
    return numbers


def _choose_drawings(config: ExplainConfig, loaded: LoadedModel, mae: Mae | None, skip: bool) -> set[str]:
    """Names of the drawings to make. Raises UserError if one was asked for that this model does not have, unless it is
    skipped.
    """
    model = loaded.model
    why_not: dict[str, str] = {}
    if mae is None:
        why_not["reconstruction"] = "these weights hold no decoder of MAE"
    elif mae.backbone.config.image_size != model.config.image_size:
        why_not["reconstruction"] = f"its decoder paints images of {ImageSize.parse(mae.backbone.config.image_size)} px"
    if not config.images:
        why_not |= dict.fromkeys(_IMAGE_DRAWINGS, "neither source=... nor data=... is set")
    if not model.config.num_classes:
        why_not["predictions"] = "these weights have no head"
    elif loaded.target_names:
        why_not["predictions"] = "these weights predict numbers, which launch/evaluate.py draws"
    if not isinstance(model, VisionTransformer):
        why_not |= dict.fromkeys(_TOKEN_DRAWINGS, "a ResNet has no tokens")
    else:
        if model.positions is None and model.config.rope_base is None:
            why_not["positions"] = f"positions = {model.config.positions} adds nothing to the tokens"
        limits = {"layer": (config.layer, model.config.num_blocks), "head": (config.head, model.config.num_heads)}
        for name, (value, number) in limits.items():
            if value not in ("all", "mean") and whole_number(value, number) is None:
                raise UserError(f"{name} = {value}, but {config.weights} has {number}.")
    for name in config.draw or DRAWINGS:
        if name in why_not:
            if name in config.draw and not skip:
                raise UserError(f"draw = {name} cannot be drawn of {config.weights}: {why_not[name]}.")
            print(f"not drawn: {name} ({why_not[name]})")
    return {name for name in config.draw or DRAWINGS if name not in why_not}


def _draw_images(
    config: ExplainConfig, loaded: LoadedModel, mae: Mae | None, wanted: set[str], numbers: dict[str, Any]
) -> Drawn:
    """The drawings of images, and of what the model computes for them."""
    pictures, names = open_images(config, loaded)
    split = pictures.split
    order = random_numbers.permutation(len(split), config.seed, Purpose.EXPLAINED_IMAGES)
    if len(order) <= config.num_drawn:
        order = np.sort(order)
    rows = order[: max(config.num_drawn, _NUM_AVERAGED if "distance" in wanted else 0)]
    with loaded.reading(split, config) as reader:
        left_out = {} if "predictions" in wanted else reader.left_out  # Predicting says it.
        any_number = replace(reader, budget=BadBudget(1.0), left_out=left_out)
        (values,), readable, problems = each_sample(lambda batch: [batch.images], any_number, rows)
    print_unreadable(problems, split, "left out")
    refuse_none_readable(config.places, problems, split, len(rows))
    rows, pixels = rows[readable][: config.num_drawn], torch.from_numpy(values[readable])
    few = pixels[: config.num_drawn]
    numbers["images"] = keys = split.keys(rows)
    # Known classes, or else the last part of the key.
    named = zip(pictures.labels(rows), keys, strict=True)
    captions = [[label or PurePosixPath(key).stem] for label, key in named]
    inputs = list(map(Tile, to_rgb(few.numpy(), loaded.pixels), captions))

    drawn, model = Drawn(), cast(VisionTransformer, loaded.model)  # Of others, no tokens are wanted.
    if wanted & _ATTENTION_DRAWINGS:
        attention = compute_attention(model, loaded.images(pixels), config.batch)
        if "attention" in wanted:
            drawn["attention"] = galleries.draw_attention(attention, model.config, config.layer, config.head, inputs)
        if "rollout" in wanted:
            drawn["rollout"] = galleries.draw_rollout(attention, model.config, inputs)
        if "distance" in wanted:
            averaged = attention.distances[:_NUM_AVERAGED]
            mean, uniform = averaged.mean(0), float(patch_distances(model.config).mean())
            title = f"Mean attention distance (over {counted(len(averaged), 'image')})"
            drawn["distance"] = galleries.draw_distances(mean, uniform, title)
            numbers |= {"mean_attention_distance": mean.tolist(), "uniform_attention_distance": uniform}
    if "components" in wanted:
        with torch.no_grad():
            features = torch.cat([loaded.patch_features(part).cpu() for part in few.split(config.batch)])
        colours, shares = patch_components(features)
        drawn["components"] = galleries.draw_components(colours, shares, model.config, inputs)
        numbers["component_variance_shares"] = shares.tolist()
    if "reconstruction" in wanted and mae is not None:
        read = normalise(few, loaded.device, torch.float32, loaded.pixels)
        masked, painted, losses = reconstruct(mae.to(loaded.device), read, rows, config.seed, config.batch)
        drawn["reconstruction"] = galleries.draw_reconstruction(masked, painted, losses, mae.normalise, inputs)
        numbers["reconstruction_losses"] = losses.tolist()
    if "predictions" in wanted:
        print_numbered(config, names)
        chosen = np.sort(order[:_NUM_PREDICTED])
        known = pictures.true_classes(names).split.only(chosen)
        predictions = predict_all(config, loaded, known, num_top=1)
        print_unreadable(predictions.problems, known, "not predicted")
        true, predicted = outcomes(predictions, known)
        judged = (true >= 0) & (predicted >= 0)
        if judged.any():
            wrong = judged & (true != predicted)
            numbers["predictions"] = {"images": int(judged.sum()), "wrong": int(wrong.sum())}
        drawn["predictions"] = galleries.draw_predictions(
            true,
            predicted,
            predictions.probabilities[:, 0],
            names,
            _NUM_PREDICTIONS,
            partial(loaded.shown, config, known),
        )
    return drawn
