"""Reading and writing weights: `save` writes our own format, `load` and `read_weights` read any.

Ours, as in checkpoints, is a .safetensors of the state dict, with the rest as JSON in its metadata under the key
"vit-weights":

    {"format": "vit-weights/1", "model": config.to_dict(), "extra": {...}}
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.architecture.config import Config, ViTConfig
from pipeline.architecture.pixels import ANY_TYPE, RGB_CHANNELS, Pixels
from pipeline.architecture.variants import ImageSize, as_pair, config_from_dict
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.trained_on import TrainedSet
from pipeline.base.words import counted
from pipeline.model import files
from pipeline.model.build import Model, build
from pipeline.model.convert.layouts import DecoderFacts, Weights, check_tensors
from pipeline.model.convert.mae import DECODER
from pipeline.model.convert.official import read_npz
from pipeline.model.convert.preprocessing import Plain, SavedPreprocessing, fold_normalisation
from pipeline.model.convert.state_dicts import from_state_dict
from pipeline.model.files import ADVICE, StrPath
from pipeline.model.position import resample_state, resizing_notes

FORMAT = "vit-weights/1"
METADATA = "vit-weights"  # Key in the metadata of our .safetensors.
# Prefix of tensors that belong to the objective that trained the model, not to the model.
ADDITION = "objective."
# Of them, what standardises numbers, which is in the head that is read.
_SCALE = f"{ADDITION}scale."

# Fields of `extra` that hold for a model after it was loaded: of how it reads images, and those of its head.
# Names of the numbers that a head predicts, and, where these are standardised, by which mean and deviation.
TARGETS, TARGET_SCALE = "targets", "target_scale"
_OF_IMAGES, _OF_HEAD = ("preprocessing", "trained_on"), ("classes", "class_names", "loss", TARGETS)

Say = Callable[[str], object]


@dataclass(frozen=True)
class _SavedScale:
    mean: list[float]
    deviation: list[float]


@dataclass(frozen=True)
class _Extra:
    """The fields of `extra` that commands read, and that are checked; a writer may add others."""

    classes: list[str] | None = None
    class_names: list[str] | None = None  # readable ones
    preprocessing: SavedPreprocessing | None = None
    loss: str | None = None
    trained_on: list[TrainedSet] | None = None
    decoder: DecoderFacts | None = None
    targets: list[str] | None = None
    target_scale: _SavedScale | None = None


@dataclass(frozen=True)
class _WeightsContent:
    """A weights file of ours, without its tensors."""

    format: str
    model: dict
    extra: dict = field(default_factory=dict)


def save(model: Model, path: StrPath, extra: Mapping[str, Any] | None = None) -> None:
    """Write the model's weights in fp32 as .safetensors, atomically.

    extra: plain data, such as "classes" (names) and "preprocessing"; None is the model's own, `model.extra`.
    """
    # Copies, because a parameter may be a view of one flat buffer.
    as_saved: Any = {"copy": True, "memory_format": torch.contiguous_format}
    state = {name: tensor.to("cpu", torch.float32, **as_saved) for name, tensor in model.state_dict().items()}
    files.write_safetensors(
        state, Path(path), safetensors_metadata(model.config, model.extra if extra is None else extra)
    )


def safetensors_metadata(config: Config, extra: Mapping[str, Any]) -> dict[str, str]:
    """The metadata by which a .safetensors is recognised as ours. Files of graphs that are made from weights have it,
    too.
    """
    return {METADATA: json.dumps({"format": FORMAT, "model": config.to_dict(), "extra": extra})}


def read_weights(path: StrPath, say: Say = lambda line: None) -> Weights:
    """The content of anything that `load` accepts.

    say: called with one line for each assumption, conversion and omission: the result's `notes`.
    Its `extra` is, for weights of other projects, "classes" and "preprocessing", if their configuration files give
    them. Raises UserError, one line with the path and a remedy, for a damaged file, an unsupported model, class names
    that do not fit the head, and NaN or infinite weights.
    """
    path = files.find_file(Path(path))
    weights = _read(path)
    num_outputs = weights.config.num_classes
    with files.naming(path):
        found = json_record.convert(weights.extra, _Extra, "extra")
        # Without a head, class names may remain from the head that was removed.
        for name, given in (("class names", found.classes), ("targets", found.targets)):
            if given is not None and num_outputs and len(given) != num_outputs:
                raise UserError(
                    f"its {name} do not fit its head: {counted(len(given), 'name')}, {counted(num_outputs, 'output')}."
                    " Correct the names where the file was written."
                )
    for note in weights.notes:
        say(note)
    extra = {name: value for name, value in _known(weights.extra).items() if name != DECODER}
    return weights._replace(extra=extra, decoder=found.decoder or DecoderFacts())


def checkpoint_note(extra: Mapping[str, Any]) -> str:
    """A line that says of which step and run weights are; empty for others than those of a checkpoint."""
    step, run = extra.get("step"), extra.get("run")
    if type(step) is not int:
        return ""
    return f"weights of step {step:,}" + (f" of run {files.one_line(run)}" if run and isinstance(run, str) else "")


def _read(path: Path) -> Weights:
    if path.suffix == ".npz":
        return read_npz(path)
    content: Any
    metadata: dict[str, str] = {}
    if path.name.endswith(files.INDEX):
        content = files.open_shards(path)
    elif files.is_safetensors(path):
        content, metadata = files.open_safetensors(path)
    else:
        content = files.open_torch(path)
    with files.naming(path):
        if METADATA in metadata:
            return _read_ours(metadata[METADATA], content)
        state_dict = files.state_dict_in(content)
        if state_dict is None:
            raise UserError(f"holds no state dict. {ADVICE}")
        return from_state_dict(state_dict, files.config_files(path))


def _read_ours(description: str, tensors: dict[str, Tensor]) -> Weights:
    added = {name: tensor for name, tensor in tensors.items() if name.startswith(ADDITION)}
    state = {name: tensor for name, tensor in tensors.items() if name not in added}
    try:
        found = json_record.parse(description, _WeightsContent, f"its metadata {METADATA}")
        if found.format != FORMAT:
            raise UserError(f'its format is "{found.format}", not "{FORMAT}".')
        config = config_from_dict(found.model)
        with torch.device("meta"):
            expected = build(config).state_dict()
        check_tensors(state, {name: tuple(tensor.shape) for name, tensor in expected.items()})
    except UserError as error:
        raise UserError(f"{error} {ADVICE}") from error
    left = [name for name in added if not name.startswith(_SCALE)]
    notes = [f"{counted(len(left), 'tensor')} of the training objective left out: not part of the model"] * bool(left)
    extra = dict(found.extra)
    if isinstance(config, ViTConfig) and config.masked:  # What remains is a plain ViT without a head.
        notes = [f"pre-trained by masked patch prediction ({config.masked}): its mask token and its head are left out"]
        config = replace(config, masked=None)
        state = {n: tensor for n, tensor in state.items() if n != "mask_token" and not n.startswith("head.")}
        extra = {name: value for name, value in extra.items() if name not in ("classes", "class_names", "loss")}
    own, of_objective = (
        {name.removeprefix(ADDITION): tensor.float() for name, tensor in part.items()} for part in (state, added)
    )
    return Weights(config, own, extra, notes, added=of_objective)


def _known(fields: Plain) -> Plain:
    """Returns the fields, and the fields of inner dicts, that are not None: JSON of other writers has null."""
    known = {name: value for name, value in fields.items() if value is not None}
    return {name: _known(value) if isinstance(value, dict) else value for name, value in known.items()}


def load(
    path: StrPath,
    image_size: ImageSize | None = None,
    num_classes: int | None = None,
    *,
    seed: int = 0,
    content: Weights | None = None,
    say: Say = lambda line: None,
    **changes: Any,
) -> Model:
    """Build a model from weights, for the same or for another task or resolution.

    path: an official .npz (ViT, hybrid, BiT, big_vision); a state dict of timm, Hugging Face or DINOv2 (.safetensors,
        .bin, .pth), or its folder with config.json; OWNER/NAME of such a folder on the Hugging Face hub, in the cache
        of its tools; a weights file of ours; a checkpoint folder; or a run folder, whose checkpoints/latest names the
        checkpoint.
    image_size, num_classes, changes: as of `adapted`. Positions are resampled to the grid of the image size. If the
    patches do not cover
        the last pixels, these are ignored, as in the official code, and `say` is called.
    seed: for the values that are new.
    content: what `read_weights` returned for this path, so that it is not read again.
    say: called with one line for each assumption, conversion and omission.
    Returns a model with fp32 parameters on the CPU, in evaluation mode, with the class names and the preprocessing of
    the weights. A head that was trained on numbers predicts these in their own units.
    Raises UserError for a bad file, and for a head that would be kept on features that it was not trained on.
    """
    weights = content or read_weights(path, say)
    old, state = weights.config, weights.state
    config = adapted(old, path, image_size, num_classes, **changes)
    if isinstance(old, ViTConfig) and isinstance(config, ViTConfig):
        for note in resizing_notes(old, config):
            say(note)
        state = resample_state(state, old, config)
    if not old.pixels.is_measured:
        say(f"no file describes its channels: read as those of the data set, {config.pixels}")
    elif old.pixels.is_rgb8 and not config.pixels.is_rgb8:
        state, note = with_channels(state, old, config)
        say(note)
    model = build(config, seed)
    new = model.state_dict()
    keep_head = config.num_classes == old.num_classes > 0 and not changes.get("new_head")
    fresh = () if keep_head else ("head.", "norm.") if changes.get("mean_pool") else ("head.",)
    kept = {n: tensor for n, tensor in state.items() if n in new and not n.startswith(fresh)}
    model.load_state_dict({**new, **kept})
    if keep_head and (scale := weights.extra.get(TARGET_SCALE)):
        mean, deviation = (torch.tensor(scale[name]) for name in ("mean", "deviation"))
        with torch.no_grad():
            model.get_parameter("head.weight").mul_(deviation[:, None])
            model.get_parameter("head.bias").mul_(deviation).add_(mean)
    model.extra = {name: weights.extra[name] for name in _OF_IMAGES + _OF_HEAD * keep_head if name in weights.extra}
    return model.eval()


def adapted(
    old: Config,
    path: StrPath,
    image_size: ImageSize | None = None,
    num_classes: int | None = None,
    *,
    new_head: bool = False,
    representation: bool = True,
    mean_pool: bool = False,
    attentive_pool: bool = False,
    pixels: Pixels | None = None,
    dropout: float | None = None,
    drop_path: float | None = None,
) -> Config:
    """The configuration of the model that `load` builds from weights. old, path: of these.

    image_size: side or (height, width).
    num_classes: a number other than the file's (or new_head=True) means fine-tuning: a zero head, bias 0, directly on
    the
        class token, without the representation layer (ViT paper, B.1.1). 0: no head.
    representation: without a head, whether the representation layer is kept.
    mean_pool: with a new head, it reads the mean of the patches after a new LayerNorm, which takes the place of the
    last one
        (MAE's fine-tuning); a class token is kept, and not read.
    attentive_pool: with a new head, it reads a new attention pool of all tokens after the last LayerNorm.
    pixels: of the images to read, None for those of the weights. Weights of 8-bit RGB begin on others by
        `with_channels`; other weights read images of their own channels and type only, by their own range.
        Those of another project that do not describe their channels take these pixels, if they are as many.
    dropout, drop_path: None for those of the weights; a ResNet has none.
    """
    num_classes = old.num_classes if num_classes is None else num_classes
    keep_head = not new_head and num_classes == old.num_classes > 0
    config = replace(
        old,
        image_size=old.image_size if image_size is None else as_pair(image_size),
        num_classes=num_classes,
        head_bias=old.head_bias if keep_head else 0.0,
        pixels=_pixels_read(old.pixels, pixels, path),
    )
    changes: Plain = {"dropout": dropout, "drop_path": drop_path}
    changes = {name: value for name, value in changes.items() if value is not None}
    if not isinstance(config, ViTConfig):
        given = changes | {"mean_pool": mean_pool, "attentive_pool": attentive_pool}
        if other := [name for name, value in given.items() if value]:
            raise UserError(f"{path}: is a ResNet, which has no {', '.join(other)}. Leave it out.")
        return config
    if (mean_pool or attentive_pool) and (keep_head or config.pools_by_attention):
        name = "mean_pool" if mean_pool else "attentive_pool"
        raise UserError(f"{path}: {name} needs a new head, and weights without attention pooling.")
    if mean_pool:
        changes |= {"pool": "mean" if config.has_class_token else "gap", "pool_norm": True}
    if attentive_pool:
        changes["pool"] = "attentive" if config.has_class_token else "map"
    has_layer = config.representation and (keep_head or (num_classes == 0 and representation))
    return replace(config, representation=has_layer, **changes)


def _pixels_read(old: Pixels, new: Pixels | None, path: StrPath) -> Pixels:
    """The pixels of a model of weights of `old`, for images of `new`. Raises UserError for those that it cannot
    read.
    """
    if not old.is_measured:
        count = old.num_channels
        if new is None or new.num_channels != count:
            raise UserError(
                f"{path}: reads {counted(count, 'channel')}, and no file of it says their names, type and range:"
                f" fine-tune it (init.weights) on a data set of {counted(count, 'channel')}."
            )
        return replace(new, mean=old.mean or new.mean, std=old.std or new.std)
    if new is None:
        return old
    if old.is_rgb8 and not new.is_rgb8:
        return new
    reads = old.reading(new, str(path), "the data set")
    return old if old.type == ANY_TYPE else reads


def first_layer(state: Collection[str]) -> str:
    """The beginning of the names of the layer that reads the pixels. state: names of a model's tensors."""
    layers = ("root.", "stem.root.", "patch_embedding.")
    return next(layer for layer in layers if f"{layer}weight" in state)


def with_channels(state: Mapping[str, Tensor], old: Config, new: Config) -> tuple[dict[str, Tensor], str]:
    """(the state dict with the kernel that reads `new.pixels`, a line about it), of a model of 8-bit RGB.

    Channels named red, green or blue keep theirs, others get the mean of the three, all times 3 / C; a single channel
    gets the sum. The patch embedding's bias takes up another mean and deviation of the pixels; a stem of convolutions
    has none.
    """
    layer = first_layer(state)
    name, bias_name = f"{layer}weight", f"{layer}bias"
    kernel = state[name].clone()
    bias = state[bias_name].clone() if bias_name in state else None
    if bias is not None:
        fold_normalisation(kernel, bias, old.pixels.mean, old.pixels.std)
    channels = new.pixels.channels
    count = len(channels)
    named = {place: RGB_CHANNELS.index(name) for place, name in enumerate(channels) if name in RGB_CHANNELS}
    if count == 1:
        named = {}
    found = kernel.mean(1, keepdim=True).repeat(1, count, *[1] * (kernel.ndim - 2))
    for place, colour in named.items():
        found[:, place] = kernel[:, colour]
    found *= 3 / count
    if bias is not None:
        half = (0.5,) * count
        fold_normalisation(found, bias, half, half, new.pixels.mean, new.pixels.std)
    added = {name: found} if bias is None else {name: found, bias_name: bias}
    kept = ", ".join(channels[place] for place in named) or "none"
    note = f"the first layer of 8-bit RGB weights reads {new.pixels} (channels that keep their own: {kept})"
    return {**state, **added}, note
