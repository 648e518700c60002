"""Files as timm writes them, for tests of reading."""

from typing import Any

from pipeline.model import ResNet, VisionTransformer
from pipeline.model.convert.layouts import NAMES, State, as_plain, write_model
from pipeline.model.convert.preprocessing import HALF, eval_resize

Files = tuple[State, dict[str, Any]]


def to_timm(model: VisionTransformer | ResNet, classes: list[str] | None, view: dict[str, Any]) -> Files:
    """(state dict, config.json) as timm has them."""
    holds = frozenset({"layer_scale", "registers", "qk_norm", "pool_norm"})
    config, state = as_plain(model, "timm's ViT", ("token", "gap", "map", "mean"), holds=holds)
    tensors = write_model(state, config, NAMES["timm"])
    # timm adds none to the class token of such a model
    if config.registers and config.has_class_token:
        positions = tensors["pos_embed"]
        tensors |= {"cls_token": tensors["cls_token"] + positions[:, :1], "pos_embed": positions[:, 1:].clone()}
    args = {
        "img_size": list(config.image_size),
        "patch_size": config.patch_size,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": (config.mlp_width + 0.5) / config.width,  # timm rounds the product with the width down
        "init_values": config.layer_scale,
        "reg_tokens": config.registers,
        "no_embed_class": config.registers > 0,
        "qk_norm": config.qk_norm,
        "class_token": config.has_class_token,
        "global_pool": {"gap": "avg", "mean": "avg"}.get(config.pool, config.pool),
        "fc_norm": config.pool_norm,
        "act_layer": {"erf": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}[config.gelu],
    }
    found = {
        "architecture": "vit_base_patch16_224",  # any ViT: the arguments override it
        "num_classes": config.num_classes,
        "num_features": config.width,
        "model_args": args,
        "pretrained_cfg": {
            **of_images(view, config.image_size),
            "num_classes": config.num_classes,
            "custom_load": False,
        },
    }
    return tensors, {**found, **({"label_names": classes} if classes else {})}


def of_images(view: dict[str, Any], image_size: tuple[int, int]) -> dict[str, Any]:
    """The fields of timm's `pretrained_cfg` about images. image_size: (height, width)."""
    crop, side = view.get("eval_crop", "center"), min(image_size)
    resize = side if crop == "resize" else eval_resize(view, image_size)
    share = side / resize
    return {
        "input_size": [3, *image_size],
        "mean": list(HALF),
        "std": list(HALF),
        "interpolation": "bicubic" if view.get("resize_filter") == "bicubic" else "bilinear",
        # timm divides the side by it and rounds down.
        "crop_pct": share if int(side / share) == resize else side / (resize + 0.5),
        "crop_mode": "center" if crop == "center" else "squash",
    }
