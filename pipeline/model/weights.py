"""Weights on disk: one file of our own, in two forms, and one `load` for every place where weights may lie.

A .safetensors of ours, as in checkpoints, holds the state as its tensors and in its metadata, under "vit-weights", the rest
as JSON. A .pt needs no other package, and is a torch zip of plain data, readable with torch.load(weights_only=True):

    {"format": "vit-weights/1", "model": config.to_dict(), "state": {name: fp32 CPU tensor}, "extra": {...}}
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline import json_record
from pipeline.errors import UserError
from pipeline.files import replacing
from pipeline.model import files
from pipeline.model.build import Model, build
from pipeline.model.convert.entries import check_values
from pipeline.model.convert.official import read_npz
from pipeline.model.convert.preprocessing import View
from pipeline.model.convert.state_dicts import from_state_dict
from pipeline.model.files import WAY_OUT
from pipeline.model.position import Kernel, resample_state
from pipeline.model.variants import Config, Gelu, ImageSize, ViTConfig, as_pair, config_from_dict

FORMAT = "vit-weights/1"
METADATA = "vit-weights"  # of our .safetensors


@dataclass(frozen=True)
class _Extra:
    """What the commands read of `extra`; whatever else is in it is nobody's but its writer's."""

    classes: list[str] | None = None
    preprocessing: View | None = None
    loss: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class _Content:
    """A weights file of ours, without its tensors."""

    format: str
    model: dict
    extra: dict = field(default_factory=dict)


StrPath = str | os.PathLike[str]
Say = Callable[[str], object]


def _silent(line: str) -> None:
    pass


def save(model: Model, path: StrPath, extra: Mapping[str, Any] | None = None) -> None:
    """Write the model's weights as fp32; `extra` is plain data that belongs to them: class names, preprocessing.

    The file appears whole or not at all. Raises ValueError when `extra` holds anything but None, bool, int, float,
    str, list, tuple, dict.
    """
    extra = dict(extra or {})
    _check_plain(extra, "extra")
    content = {
        "format": FORMAT,
        "model": model.config.to_dict(),
        # Copies: a parameter may be a view of one flat buffer, and torch.save writes everything that lies behind it.
        "state": {name: _plain_copy(tensor) for name, tensor in model.state_dict().items()},
        "extra": extra,
    }
    with replacing(Path(path)) as file:
        torch.save(content, file)


def save_safetensors(model: Model, path: StrPath, extra: Mapping[str, Any] | None = None) -> None:
    """As `save`, as .safetensors with configuration and `extra` in its metadata."""
    extra = dict(extra or {})
    _check_plain(extra, "extra")
    state = {name: _plain_copy(tensor) for name, tensor in model.state_dict().items()}
    files.write_safetensors(state, Path(path), safetensors_metadata(model.config, extra))


def safetensors_metadata(config: Config, extra: Mapping[str, Any]) -> dict[str, str]:
    """What makes a .safetensors one of ours."""
    return {METADATA: json.dumps({"format": FORMAT, "model": config.to_dict(), "extra": extra})}


def read_weights(path: StrPath, say: Say = _silent) -> tuple[Config, dict[str, Tensor], dict[str, Any]]:
    """-> (configuration, fp32 CPU state, extra) from any place that `load` takes.

    say: told in a line each what was assumed, rewritten and left out.
    extra of weights of others: "classes" and "preprocessing" where files beside them say so.
    Raises UserError, one line with the path and the way out, for a file that is damaged or another model's, for class
    names that do not fit the head, and for weights that are NaN or infinite.
    """
    path = files.find_file(Path(path))
    config, state, extra = _read(path)
    notes = extra.pop("notes", [])
    try:
        notes = [*notes, *_check_extra(extra, config)]
    except UserError as error:
        raise UserError(f"{path}: {files.one_line(error)}") from error
    for note in notes:
        say(note)
    return config, state, extra


def _check_extra(extra: dict[str, Any], config: Config) -> list[str]:
    """Raise UserError for what is not as the commands expect it. Returns what is worth a line."""
    found = json_record.convert(_as_json(extra), _Extra, "extra")
    if found.preprocessing is not None:
        found.preprocessing.check()
    # A body's class names are those of the head that it had.
    if found.classes is None or not config.num_classes:
        return []
    if len(found.classes) != config.num_classes:
        raise UserError(
            f"its class names do not fit its head: {len(found.classes):,} names, {config.num_classes:,} classes. "
            "Correct the names where the file was written."
        )
    # No mistake of the file: ImageNet-1k as it is published has "crane" twice.
    if doubled := len(found.classes) - len(set(found.classes)):
        first = next(name for name in found.classes if found.classes.count(name) > 1)
        return [
            f"{doubled} of {len(found.classes):,} class names stand for more than one class, the first {first[:100]!r}"
        ]
    return []


def _read(path: Path) -> tuple[Config, dict[str, Tensor], dict[str, Any]]:
    """As `read_weights`, of a file; the lines are extra["notes"]."""
    if path.suffix == ".npz":
        config, state, notes = read_npz(path)
        return config, state, {"notes": notes}
    content: Any
    if path.suffix == ".safetensors":
        tensors, about = files.open_safetensors(path)
        content = tensors
        if METADATA in about:
            content = {**json_record.parse(about[METADATA], dict, f"{path}, its metadata {METADATA}"), "state": tensors}
    else:
        content = files.open_torch(path)
    is_ours = isinstance(content, dict) and content.get("format") == FORMAT
    of_others = None if is_ours else files.state_dict_in(content)
    try:
        if of_others is not None:
            return from_state_dict(of_others, files.beside(path))
        if not is_ours:
            raise UserError(f'neither a weights file of ours (no format "{FORMAT}") nor a state dict. {WAY_OUT}')
        config, state, extra = _ours(content)
        if isinstance(config, ViTConfig) and config.masked:
            return _without_masking(config, state, extra)
        return config, state, extra
    except UserError as error:
        raise UserError(f"{path}: {files.one_line(error)}") from error


def _ours(content: dict[str, Any]) -> tuple[Config, dict[str, Tensor], dict[str, Any]]:
    try:
        found = json_record.convert(content, _Content, "its description")
        config = config_from_dict(found.model)
        state = content.get("state")
        if problem := _mismatch(state, config):
            raise UserError(problem)
        assert isinstance(state, Mapping)
        for name, tensor in state.items():
            check_values(name, tensor)
    except UserError as error:
        raise UserError(f"{error} {WAY_OUT}") from error
    return config, {name: tensor.float() for name, tensor in state.items()}, dict(found.extra)


def _without_masking(
    config: ViTConfig, state: dict[str, Tensor], extra: dict[str, Any]
) -> tuple[Config, dict[str, Tensor], dict[str, Any]]:
    """What masked patch prediction leaves behind: a plain ViT, without a head and what is said of it."""
    note = f"pre-trained by masked patch prediction ({config.masked}): its mask token and its head are left out"
    return (
        replace(config, masked=None),
        {name: tensor for name, tensor in state.items() if name != "mask_token" and not name.startswith("head.")},
        {**{name: value for name, value in extra.items() if name not in ("classes", "loss")}, "notes": [note]},
    )


def load(
    path: StrPath,
    image_size: ImageSize | None = None,
    num_classes: int | None = None,
    *,
    new_head: bool = False,
    gelu: Gelu | None = None,
    dropout: float | None = None,
    drop_path: float | None = None,
    representation: bool | None = None,
    seed: int = 0,
    kernel: Kernel = "zoom",
    say: Say = _silent,
) -> Model:
    """Build a model from weights, changed to a new task or resolution where asked.

    path: an official .npz (ViT, hybrid, BiT, big_vision); a state dict of timm, Hugging Face or DINOv2 (.safetensors,
        .bin, .pth), or the folder with config.json; a weights file of ours; a checkpoint folder; or a run
        folder, whose checkpoints/latest names the checkpoint.
    image_size: side or (height, width); positions are resampled to its grid. Where the patches leave a few pixels at the
        edge, these are not seen, as in the official code, and `say` is told.
    num_classes: another number than the file's (or new_head=True) means fine-tuning: a zero head, bias 0, directly on
        the class token, the representation layer dropped (ViT paper, B.1.1). 0: no head, the representation layer kept.
    gelu, dropout, drop_path: default to the file's; an .npz counts as "tanh", 0 and 0, state dicts of others as what
        their project computes. A ResNet has none of them.
    representation: overrides whether the layer stays (or, in front of a new head, is made anew).
    seed: of whatever is new.
    kernel: of resample_positions; "zoom" is the official code's.
    say: told in a line each what was assumed, rewritten and left out.
    Returns a model of fp32 parameters on the CPU, in training mode.
    Raises UserError for a bad file, and for a head that would be kept on features it was not trained on.
    """
    old, state, _ = read_weights(path, say)
    classes = old.num_classes if num_classes is None else num_classes
    if new_head and classes == 0:
        raise UserError(f"{path}: new_head=True needs num_classes above 0.")
    new_head = new_head or classes not in (0, old.num_classes)
    keep_head = classes > 0 and not new_head
    config = replace(
        old,
        image_size=old.image_size if image_size is None else as_pair(image_size),
        num_classes=classes,
        head_bias=old.head_bias if keep_head else 0.0,
    )
    if isinstance(old, ViTConfig) and isinstance(config, ViTConfig):
        if representation is None:
            representation = old.representation and not new_head
        if keep_head and representation != old.representation:
            raise UserError(
                f"{path}: its head was trained with representation={old.representation}, so it cannot be kept with "
                f"representation={representation}. Use new_head=True, or num_classes=0 for the features."
            )
        config = replace(
            config,
            representation=representation,
            gelu=old.gelu if gelu is None else gelu,
            dropout=old.dropout if dropout is None else dropout,
            drop_path=old.drop_path if drop_path is None else drop_path,
        )
        if config.unseen_note:
            say(config.unseen_note)
        state = resample_state(state, old, config, kernel)
    elif gelu or dropout or drop_path or representation:
        raise UserError(
            f"{path}: holds a ResNet, which has no gelu, dropout, drop_path or representation. Leave them out; a dropout that "
            "a config file sets is undone by model.dropout=0."
        )

    model = build(config, seed)
    own = model.state_dict()
    dropped = {name for name in state if name not in own or (name.startswith("head.") and not keep_head)}
    model.load_state_dict({**own, **{n: t for n, t in state.items() if n not in dropped}})
    return model


def _mismatch(state: object, config: Config) -> str | None:
    """The first way in which a state is not one of this configuration, or None."""
    with torch.device("meta"):
        expected = build(config).state_dict()
    if not isinstance(state, Mapping):
        return "it holds no state."
    for name, parameter in expected.items():
        shape = tuple(parameter.shape)
        if name not in state:
            return f'"{name}" {shape} is missing.'
        if not isinstance(state[name], Tensor):
            return f'"{name}" should be a tensor {shape}, but is {json_record.type_name(type(state[name]))}.'
        found = tuple(state[name].shape)
        if found != shape:
            return f'"{name}" should be {shape}, but is {found}.'
    unexpected = sorted(map(str, state.keys() - expected.keys()))
    return f'"{unexpected[0]}" is not part of this model ({len(unexpected)} such).' if unexpected else None


def _as_json(value: Any) -> Any:
    """Plain data as JSON would give it back: tuples, which a .pt keeps, as lists."""
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return {key: _as_json(item) for key, item in value.items()} if isinstance(value, dict) else value


def _plain_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)


def _check_plain(value: object, where: str) -> None:
    # Exact types: numpy.float64 is a float, and would make a file that weights_only refuses to read.
    if type(value) in (list, tuple):
        for i, item in enumerate(value):  # type: ignore[var-annotated, arg-type]
            _check_plain(item, f"{where}[{i}]")
    elif isinstance(value, dict) and type(value) is dict:
        for key, item in value.items():
            _check_plain(key, f"a key of {where}")
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) not in (type(None), bool, int, float, str):
        raise ValueError(
            f"{where} is a {type(value).__name__}; a weights file holds plain data only: str, int, list ..."
        )
