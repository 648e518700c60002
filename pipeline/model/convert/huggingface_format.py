"""Reads and writes state dicts of Hugging Face's transformers, with their config.json and preprocessor_config.json."""

from functools import partial

from pipeline.architecture.config import ViTConfig
from pipeline.base.errors import UserError
from pipeline.model.convert import preprocessing
from pipeline.model.convert.layouts import (
    NAMES,
    TABLES,
    ConfigFiles,
    Names,
    State,
    Weights,
    as_plain,
    move_patch_bias,
    write_model,
)
from pipeline.model.convert.preprocessing import Json, Plain
from pipeline.model.convert.reading import HIDDEN_ACTS, gelu_of, join, pair, read_vit, rename
from pipeline.model.resnet import ResNet
from pipeline.model.vit import VisionTransformer

# Names in memory since transformers 5 -> names in its files, which are still the old ones.
_NEW_NAMES = [
    (r"^layers\.(\d+)\.", r"encoder.layer.\1."),
    (r"attention\.q_proj\.", "attention.attention.query."),
    (r"attention\.k_proj\.", "attention.attention.key."),
    (r"attention\.v_proj\.", "attention.attention.value."),
    (r"attention\.o_proj\.", "attention.output.dense."),
]
_NEW_MLP = [(r"mlp\.fc1\.", "intermediate.dense."), (r"mlp\.fc2\.", "output.dense.")]  # ViT, but not DINOv2

# `problem_type` in config.json of a head whose probabilities transformers computes by sigmoids.
_OF_SIGMOID = "multi_label_classification"


# By family of names: its defaults for config.json, and its models' parts beside those of a plain ViT (tables.toml).
_KINDS: Plain = TABLES["kinds"]


def from_huggingface(tensors: State, kind: str, config_files: ConfigFiles, notes: list[str]) -> Weights:
    """tensors: without a prefix. kind: a key of NAMES, "huggingface" also for DINOv2. Raises UserError."""
    get_any = partial(preprocessing.field, config_files.config, "config.json")
    get = partial(preprocessing.field, get_any("vision_config", dict, config_files.config), "config.json")
    if not config_files.config:
        notes.append("no config.json: number of heads, GELU and eps taken as Hugging Face's own")
    kind, tensors = _in_file(tensors, kind)
    if kind == "clip" and "classifier.weight" in tensors:
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("classifier.")}
        notes.append(
            "its classifier reads patch tokens without the last norm, which our head cannot: left out, so that these"
            " are weights without a head. Fine-tune them, or use their features"
        )
    has_head = "classifier.weight" in tensors
    classes = _class_names(get_any("id2label", dict[str, str], {})) if has_head else None
    extra: Plain = {"classes": classes} if classes else {}
    if has_head and get("problem_type", str) == _OF_SIGMOID:
        extra["loss"] = "sigmoid"
    gated = any(".mlp.weights_in." in key or ".mlp.gate_proj." in key for key in tensors)
    is_silu = gated and kind == "dinov3"
    activation = get("hidden_act", str, _KINDS[kind].get("activation", "gelu"))
    if is_silu and activation != "silu":
        raise UserError(f"its MLP is gated by {activation[:100]}; only silu is supported.")
    told: Plain = {
        "gelu": "erf" if is_silu else gelu_of(activation),
        "layer_norm_eps": get("layer_norm_eps", float, _KINDS[kind]["eps"]),
        "num_heads": get("num_attention_heads", int),
        "image_size": pair("image_size", get("image_size", int | list[int])),
        "kernel": "bicubic_antialias" if kind == "dinov2" and "embeddings.register_tokens" in tensors else "bicubic",
        "layer_scale": get("layerscale_value", float, 1.0),
        "rope_base": get("rope_theta", float, 100.0) if kind == "dinov3" else None,
        "pool": "both" if kind == "dinov2" and has_head else "token",
    }
    processor = config_files.processor
    images = preprocessing.from_huggingface(processor) if processor else None
    return read_vit(tensors, _names(kind, gated), told, images, extra, notes, "none" if kind == "dinov3" else None)


def _names(kind: str, gated: bool) -> Names:
    return NAMES[kind] | (NAMES[kind]["gated"] if gated else {})


def _in_file(tensors: State, kind: str) -> tuple[str, State]:
    """-> (the kind among those of the same names, the tensors with the names that they have in files)."""
    tensors = {key: tensor for key, tensor in tensors.items() if tensor.numel() or "register_tokens" not in key}
    if kind == "dinov3":
        return kind, rename(tensors, [(r"^model\.", "")])
    if kind == "siglip":
        return "clip" if "pre_layrnorm.weight" in tensors else kind, tensors
    tensors = rename(tensors, _NEW_NAMES)
    if "encoder.layer.0.norm1.weight" not in tensors:
        return kind, rename(tensors, _NEW_MLP)
    join(tensors, ("gate_proj", "up_proj"), "weights_in")
    return "dinov2", rename(tensors, [(r"mlp\.down_proj\.", "mlp.weights_out.")])


def _class_names(labels: dict[str, str]) -> list[str] | None:
    """The names in order; None if they are Hugging Face's placeholders. Raises UserError for a key that is not a class
    number.
    """
    numbers = [str(i) for i in range(len(labels))]
    if {*labels} != {*numbers}:
        raise UserError(f"config.json: the keys of id2label must be the numbers 0 to {len(labels) - 1}.")
    names = [labels[number] for number in numbers]
    return None if names == [f"LABEL_{number}" for number in numbers] else names


def to_huggingface(
    model: VisionTransformer | ResNet, classes: list[str] | None, view: Json, loss: str | None = None
) -> tuple[State, Plain, Plain]:
    """(state dict, config.json, preprocessor_config.json) of the family of transformers that has the parts of the
    model.

    RoPE: DINOv3; a norm before the blocks: CLIP's model for images; attention pooling: SigLIP's; LayerScale, SwiGLU or
    registers: DINOv2; the mean of patches: I-JEPA; else ViT, where the representation layer of a model without a head
    is its pooler.
    loss: with sigmoid, config.json says that probabilities are those of each class by itself.
    Raises UserError for a model that these cannot hold.
    """
    if isinstance(model, ResNet):
        raise UserError("Hugging Face's ViT cannot hold a ResNet; format = safetensors can.")
    kind, model_type, own = _family(model.config)
    cls = TABLES["huggingface"]["classes"][model_type]
    has_head, pools = model.config.num_classes > 0, _KINDS[kind].get("pools", ["token"])
    reads = {"huggingface": ("token", "gap"), "dinov2": ("both",)}.get(kind, ())
    if has_head and model.config.pool in pools and model.config.pool not in reads:
        raise UserError(f"Hugging Face's {cls} has no head that reads what ours does. Leave it out: head=false.")
    height, width = model.config.image_size
    cannot = {
        f"images of {height} x {width} px, which are not square": height != width,
        f"positions = {model.config.positions} beside RoPE": kind == "dinov3" and model.config.positions != "none",
    }
    config, state = as_plain(
        model,
        f"Hugging Face's {cls}",
        pools,
        representation=kind == "huggingface" and not has_head and model.config.pool == "token",
        holds=frozenset(_KINDS[kind].get("holds", ())),
        cannot=cannot,
    )
    if NAMES[kind].get("no_patch_bias"):
        move_patch_bias(state, config.num_patches)
    prefix = {"gap": "ijepa.", "both": f"{model_type}."}.get(config.pool, "vit.") if has_head else ""
    tensors = {
        key if key.startswith("classifier.") else f"{prefix}{key}": tensor
        for key, tensor in write_model(state, config, _names(kind, config.swiglu)).items()
    }
    found = {
        "architectures": [cls.replace("Model", "ForImageClassification") if has_head else cls],
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": HIDDEN_ACTS[config.gelu],
        "layer_norm_eps": config.layer_norm_eps,
        "image_size": config.image_size[0],
        "patch_size": config.patch_size,
        "num_channels": 3,
        "model_type": model_type,
        **own,
    }
    if has_head:
        names = classes or [f"LABEL_{i}" for i in range(config.num_classes)]
        found |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        if loss == "sigmoid":
            found["problem_type"] = _OF_SIGMOID
    return tensors, found, preprocessing.to_huggingface(view, height)


def _family(config: ViTConfig) -> tuple[str, str, Plain]:
    """-> (kind of names, model_type, other fields of config.json) of the family that has the parts of the model."""
    scale = {"layerscale_value": 1.0 if config.layer_scale is None else config.layer_scale, "drop_path_rate": 0.0}
    registers = {"num_register_tokens": config.registers}
    if config.rope_base is not None:
        own: Plain = {
            "use_gated_mlp": config.swiglu,
            "rope_theta": config.rope_base,
            "proj_bias": config.out_bias,
            # With the first letters of those in the setting.
            **{f"{name}_bias": name[0] in config.qkv_bias.replace("none", "") for name in ("query", "key", "value")},
            "mlp_bias": config.mlp_bias,
            **({"hidden_act": "silu"} if config.swiglu else {}),
        }
        return "dinov3", "dinov3_vit", own | scale | registers
    if config.embedding_norm:
        return "clip", "clip_vision_model", {}
    if config.pool == "map":
        return "siglip", "siglip_vision_model", {}
    plain = {"qkv_bias": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if config.layer_scale is None and not config.swiglu and not config.registers and config.pool != "both":
        return "huggingface", "ijepa" if config.pool == "gap" else "vit", plain

    def mlp_width(ratio: int) -> int:
        width = config.width * ratio
        # Of a gated one two thirds, up to a multiple of 8.
        return (int(width * 2 / 3) + 7) // 8 * 8 if config.swiglu else width

    ratio = next((ratio for ratio in range(1, 257) if mlp_width(ratio) == config.mlp_width), None)
    if ratio is None:
        raise UserError(
            f"Hugging Face's DINOv2 of width {config.width} cannot hold an MLP of width {config.mlp_width}."
        )
    own = {"use_swiglu_ffn": config.swiglu, "mlp_ratio": ratio, **plain, **scale}
    return ("dinov2", "dinov2_with_registers", own | registers) if config.registers else ("dinov2", "dinov2", own)
