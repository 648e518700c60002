# ruff: noqa: F401 - these names are for importers
"""The models and their weights files. `vit.py` is the ViT, and the file to read first.

Needs only torch and numpy, so that it can be used alone; safetensors is imported when such a file is read or written
(`files.optional`), huggingface_hub for weights named OWNER/NAME, and data/ when a model preprocesses an image.
Imports base/, architecture/ and process/ (which
checkpoints of a folder are complete). Used by most rooms.

    from pipeline.model import create, load
    model = create("ViT-B/16", num_classes=21843)
    model = load("ViT-B_16.npz", image_size=384)
    logits = model(model.preprocess("photo.jpg")[None])
"""

from typing import Any

from pipeline.architecture.config import Config, ResNetConfig, ViTConfig
from pipeline.architecture.variants import ImageSize, config_from_dict, configure
from pipeline.model.build import Model, build, forward_macs, num_parameters, training_flops_per_image
from pipeline.model.convert.huggingface_format import to_huggingface
from pipeline.model.convert.layouts import DecoderFacts, Weights
from pipeline.model.convert.timm_format import to_timm
from pipeline.model.position import resample_positions, resample_state, resizing_notes
from pipeline.model.resnet import ResNet
from pipeline.model.vit import MaskedViT, VisionTransformer
from pipeline.model.weights import (
    adapted,
    checkpoint_note,
    load,
    read_weights,
    safetensors_metadata,
    save,
)


def create(name: str, image_size: ImageSize = 224, num_classes: int = 1000, *, seed: int = 0, **changes: Any) -> Model:
    """A new model, initialised as in its paper; the values depend on `seed` only.

    name: "ViT-L/16": a size (ViT paper, Table 1; Ti, S and others of the authors' code) and a patch side in pixels;
        "Axial-ViT-B/16"; a hybrid such as "R50+ViT-B/16"; a ResNet such as "BiT-R50x1".
    image_size: side or (height, width) in pixels; for a ViT, divisible by the patch side.
    num_classes: 0 for no head: the model returns its features.
    changes: fields of ViTConfig or ResNetConfig (architecture/config.py), such as width=..., pool="gap",
    positions="sincos2d",
        representation=True, drop_path=0.1. Changing one field changes no other.
    Raises UserError for an unknown name or field and for values that do not fit together.
    """
    return build(configure(name, image_size, num_classes, **changes), seed)
