"""Weights on disk: one file of our own, and one `load` for every place where weights may lie.

The file is a torch zip of plain data, readable with torch.load(weights_only=True):

    {"format": "vit-weights/1", "model": config.to_dict(), "state": {name: fp32 CPU tensor}, "extra": {...}}
"""

import os
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.model.build import Model, build
from pipeline.model.convert import read_npz
from pipeline.model.position import resample_state
from pipeline.model.variants import Config, Gelu, ImageSize, ViTConfig, as_pair, config_from_dict

FORMAT = "vit-weights/1"
WAY_OUT = "Use the checkpoint before it, or fetch the file again."
StrPath = str | os.PathLike[str]


def save(model: Model, path: StrPath, extra: Mapping[str, Any] | None = None) -> None:
    """Write the model's weights as fp32; `extra` is plain data that belongs to them: class names, preprocessing.

    The file appears whole or not at all. Raises ValueError when `extra` holds anything but None, bool, int, float,
    str, list, tuple, dict.
    """
    save_state(model.state_dict(), model.config, path, extra)


def save_state(
    state: Mapping[str, Tensor], config: Config, path: StrPath, extra: Mapping[str, Any] | None = None
) -> None:
    """As `save`, for a caller that holds gathered tensors and no model. Raises ValueError if they do not fit config."""
    path = Path(path)
    extra = dict(extra or {})
    _check_plain(extra, "extra")
    if problem := _mismatch(state, config):
        raise ValueError(f"{path} is not written: {problem}")
    content = {
        "format": FORMAT,
        "model": config.to_dict(),
        # Copies: a parameter may be a view of one flat buffer, and torch.save writes everything that lies behind it.
        "state": {name: _plain_copy(tensor) for name, tensor in state.items()},
        "extra": extra,
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)  # the rename itself


def read_weights(path: StrPath) -> tuple[Config, dict[str, Tensor], dict[str, Any]]:
    """-> (configuration, fp32 CPU state, extra) from any place that `load` takes; an .npz has no extra.

    Raises UserError, one line with the path and the way out, for a file that is damaged or another model's.
    """
    path = _find_file(Path(path))
    if path.suffix == ".npz":
        return *read_npz(path), {}

    try:
        # torch.load does not compare checksums: a flipped bit would become a wrong weight.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        content = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: not a readable weights file ({reason}). {WAY_OUT}") from error
    if damaged:
        raise UserError(f'{path}: damaged, the checksum of "{damaged}" is wrong. {WAY_OUT}')
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f'{path}: not a weights file of this pipeline (no format "{FORMAT}"). {WAY_OUT}')

    try:
        config = config_from_dict(content.get("model", {}))
    except UserError as error:
        raise UserError(f"{path}: {error} {WAY_OUT}") from error
    if problem := _mismatch(content.get("state"), config):
        raise UserError(f"{path}: {problem} {WAY_OUT}")
    return config, content["state"], content.get("extra", {})


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
) -> Model:
    """Build a model from weights, changed to a new task or resolution where asked.

    path: an official .npz; a weights file of ours; a checkpoint folder that holds model.pt; or a run folder, whose
        checkpoints/latest names the checkpoint.
    image_size: side or (height, width); positions are resampled to its grid as the official code does (kernel "zoom").
    num_classes: another number than the file's (or new_head=True) means fine-tuning: a zero head, bias 0, directly on
        the class token, the representation layer dropped (ViT paper, B.1.1). 0: no head, the representation layer kept.
    gelu, dropout, drop_path: default to the file's; an .npz counts as "tanh", 0 and 0. A ResNet has none of them.
    representation: overrides whether the layer stays (or, in front of a new head, is made anew).
    seed: of whatever is new.
    Returns a model of fp32 parameters on the CPU, in training mode.
    Raises UserError for a bad file, and for a head that would be kept on features it was not trained on.
    """
    old, state, _ = read_weights(path)
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
        state = resample_state(state, old, config)
    elif gelu or dropout or drop_path or representation:
        raise UserError(f"{path}: holds a ResNet, which has no gelu, dropout, drop_path or representation. Leave them.")

    model = build(config, seed)
    own = model.state_dict()
    dropped = {name for name in state if name not in own or (name.startswith("head.") and not keep_head)}
    model.load_state_dict({**own, **{n: t for n, t in state.items() if n not in dropped}})
    return model


def _find_file(path: Path) -> Path:
    """The weights file of a file, a checkpoint folder or a run folder."""
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(f"{path}: no such file or folder.")
    if (path / "model.pt").is_file():
        return path / "model.pt"
    pointer = path / "checkpoints" / "latest"
    if not pointer.is_file():
        raise UserError(f"{path}: holds neither model.pt nor checkpoints/latest. Name a checkpoint, a run, or a file.")
    name = pointer.read_text().strip()
    file = path / "checkpoints" / name / "model.pt"
    if not name or not file.is_file():
        raise UserError(f'{pointer}: names "{name}", but {file} is not there. Name another checkpoint folder.')
    return file


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
        found = tuple(getattr(state[name], "shape", ()))
        if found != shape:
            return f'"{name}" should be {shape}, but is {found}.'
    unexpected = sorted(state.keys() - expected.keys())
    return f'"{unexpected[0]}" is not part of this model ({len(unexpected)} such).' if unexpected else None


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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
