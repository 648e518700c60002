"""Reads state dicts of other projects: whose names they have, and which tensors a ViT here does not have."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.model.convert import mae, preprocessing
from pipeline.model.convert.huggingface_format import from_huggingface
from pipeline.model.convert.layouts import NAMES, TABLES, ConfigFiles, State, Weights, check_values
from pipeline.model.convert.reading import is_bit, pair, read_vit
from pipeline.model.convert.timm_format import from_timm

# Tensors that are not weights: counters of BatchNorm in projection heads; DINOv3's zeros of the keys' biases.
_NO_WEIGHTS = ("num_batches_tracked", "attn.qkv.bias_mask")
# Beginnings of the keys of a model with towers for images and text, where the one for images is read.
_TOWERS = ("vision_model.", "visual.trunk.", "visual.")
# Kinds of names whose patch embeddings have different names.
_PROJECTS = ("timm", "huggingface", "dinov3", "siglip", "open_clip")


def from_state_dict(tensors: Mapping[str, Tensor], config_files: ConfigFiles) -> Weights:
    """The weights in our terms; the tensors returned share no memory with the given ones.

    Raises UserError naming the key and the shapes, or the feature of the model that is not supported.
    """
    model_type = preprocessing.field(config_files.config, "config.json", "model_type", str)
    if model_type and model_type not in (known := TABLES["huggingface"]["model_types"]):
        raise UserError(
            f'its config.json says model_type = "{model_type[:100]}", which is another architecture or not supported;'
            " what can be read is "
            f"{', '.join(known)} (docs/weights.md)."
        )
    notes: list[str] = []
    tensors = {key.removeprefix("module."): tensor for key, tensor in tensors.items() if not key.endswith(_NO_WEIGHTS)}
    tensors, decoder = mae.split(tensors)
    if decoder:
        return mae.with_decoder(from_state_dict(tensors, config_files), decoder, config_files.config)
    kind, tensors = _image_tower(tensors, notes)
    for key, tensor in tensors.items():
        check_values(key, tensor)
        for part, feature in TABLES["unsupported"].items():
            if key.startswith(part) or f".{part}" in key:
                raise UserError(f'it has {feature} ("{key}"), which is not supported.')
    if kind == "timm":
        return from_timm(tensors, config_files.config, notes)
    if kind == "open_clip":
        return _from_open_clip(tensors, config_files, notes)
    return from_huggingface(tensors, kind, config_files, notes)


def _image_tower(tensors: State, notes: list[str]) -> tuple[str, State]:
    """-> (kind of names, a key of NAMES; the tensors of the ViT without a prefix). Raises UserError for names of other
    projects.
    """
    if is_bit(tensors):
        return "timm", tensors
    patches = {f"{NAMES[kind]['patch_embedding']}.weight": kind for kind in _PROJECTS}
    for key in tensors:
        patch = next((patch for patch in patches if key == patch or key.endswith(f".{patch}")), None)
        if patch is None or (patches[patch] == "open_clip" and "ln_post" not in "".join(tensors)):
            continue
        prefix = key.removesuffix(patch)
        # Of several towers, only that of the prefix and the classifier are of the model for images.
        of_model = (prefix, "classifier.") if prefix.endswith(_TOWERS) else ""
        own = {k.removeprefix(prefix): tensor for k, tensor in tensors.items() if k.startswith(of_model)}
        if left := len(tensors) - len(own):
            notes.append(f"{counted(left, 'tensor')} outside of {prefix} left out: not part of the model for images")
        return patches[patch], own
    some = ", ".join(sorted(tensors)[:3]) or "nothing"
    raise UserError(f"its tensors are neither named as timm's nor as Hugging Face's ViT ({some} ...).")


def _from_open_clip(tensors: State, config_files: ConfigFiles, notes: list[str]) -> Weights:
    """The model for images of CLIP by open_clip, OpenAI and MetaCLIP."""
    where = "open_clip_config.json"
    get = partial(preprocessing.field, config_files.clip, where)
    model = partial(preprocessing.field, get("model_cfg", dict, {}), f"{where}: model_cfg")
    tower = partial(preprocessing.field, model("vision_cfg", dict, {}), f"{where}: model_cfg.vision_cfg")
    if not config_files.clip:
        notes.append(
            "no open_clip_config.json: exact GELU, as LAION's; for OpenAI's and MetaCLIP's, name the file"
            ' open_clip_pytorch_model.bin and put {"model_cfg": {"quick_gelu": true}} as open_clip_config.json'
            " beside it"
        )
    if tensors.pop("proj", None) is not None:
        notes.append("the projection to the space of texts is left out")
    width, norm = tower("head_width", int), tensors.get("ln_post.weight")
    told: preprocessing.Plain = {
        "gelu": "quick" if model("quick_gelu", bool) else "erf",
        "layer_norm_eps": 1e-5,
        "num_heads": len(norm) // width if width and norm is not None else None,
        "image_size": pair("vision_cfg.image_size", tower("image_size", int | list[int])),
        "kernel": "bicubic_antialias",
        "layer_scale": 1.0,
    }
    cfg = get("preprocess_cfg", dict)
    images = preprocessing.from_open_clip(cfg) if cfg else None
    return read_vit(tensors, NAMES["open_clip"], told, images, {}, notes)
