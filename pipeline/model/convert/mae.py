"""Weights of MAE with their decoder, as facebookresearch/mae and Hugging Face's ViTMAEForPreTraining have them.

The decoder's names here are those of `pipeline/objectives/mae.py`. The encoder is a ViT with timm's or Hugging Face's
names.
"""

from functools import partial

import torch
from torch import nn

from pipeline.architecture.config import ViTConfig
from pipeline.architecture.pixels import PerChannel
from pipeline.base.errors import UserError
from pipeline.model.convert import huggingface_format, preprocessing
from pipeline.model.convert.layouts import NAMES, DecoderFacts, Layout, State, Tensors, Weights
from pipeline.model.convert.preprocessing import HALF, Json, Plain
from pipeline.model.convert.reading import count_blocks, shape_of
from pipeline.model.vit import Block, SelfAttention, VisionTransformer

# Beginnings of the names of a decoder's tensors, in files and since transformers 5 in memory.
_DECODER = ("decoder", "mask_token")
# Names of a decoder without "decoder." in front, by those of its encoder.
_NAMES = {
    kind: NAMES[kind] | NAMES["mae_decoder"] | {"blocks": blocks}
    for kind, blocks in (("timm", "decoder_blocks.{}."), ("huggingface", "decoder_encoder.layer.{}."))
}
# Key of `extra` for `DecoderFacts`.
DECODER = "decoder"


def split(tensors: Tensors) -> tuple[State, State]:
    """-> (tensors of the encoder, those of the decoder without "decoder." in front); none of a decoder in other
    files.
    """
    if not any(key.removeprefix("decoder.").startswith("decoder_embed.") for key in tensors):
        return dict(tensors), {}
    parts: tuple[State, State] = {}, {}
    for key, tensor in tensors.items():
        own = key.removeprefix("decoder.").replace("decoder_layers.", "decoder_encoder.layer.")
        parts[key.startswith(_DECODER)][own] = tensor
    return parts


def with_decoder(weights: Weights, decoder: State, config: Json) -> Weights:
    """Weights of MAE with their decoder, which only the objective reads. config: of config.json."""
    assert isinstance(weights.config, ViTConfig)
    get = partial(preprocessing.field, config, "config.json")
    facts = {"num_heads": get("decoder_num_attention_heads", int), "normalise": get("norm_pix_loss", bool)}
    note = "the decoder of MAE, which only train.loss=mae uses, is not part of the model"
    return weights._replace(
        added=read_decoder(decoder, weights.config),
        extra=weights.extra | {DECODER: facts | {"mean": list(weights.mean), "std": list(weights.std)}},
        notes=[*weights.notes, note],
    )


def read_decoder(tensors: Tensors, config: ViTConfig) -> State:
    """The decoder in the names of our objective, float32. config: of the encoder. Raises UserError for a missing or odd
    tensor.
    """
    names = _NAMES["timm" if any(key.startswith("decoder_blocks.") for key in tensors) else "huggingface"]
    layout, depth = Layout(names), count_blocks(tensors, names)
    width, _ = shape_of(tensors, layout, "decoder_embed.weight", 2)
    mlp_width, _ = shape_of(tensors, layout, "decoder_blocks.0.mlp.up.weight", 2)
    # The paper's blocks; tensors tell neither the heads nor the image size.
    P = config.patch_size
    block = ViTConfig(width, depth, mlp_width, num_heads=1, patch_size=P, image_size=(P, P), num_classes=0)
    with torch.device("meta"):
        layers = {
            "decoder_embed": nn.Linear(config.width, width),
            "decoder_blocks": nn.ModuleList(Block(block, SelfAttention(block, 1), 0.0) for _ in range(depth)),
            "decoder_norm": nn.LayerNorm(width),
            "decoder_pred": nn.Linear(width, 3 * P**2),
        }
        tables = {
            "mask_token": torch.empty(1, 1, width),
            "decoder_positions": torch.empty(1, config.num_positions, width),
        }
    return layout.read(tensors, tables | nn.ModuleDict(layers).state_dict())


def to_huggingface(
    model: VisionTransformer, decoder: Tensors, facts: DecoderFacts, view: Json
) -> tuple[State, Plain, Plain]:
    """(state dict, config.json, preprocessor_config.json) of a ViTMAEForPreTraining. Raises UserError for a model that
    it cannot hold.
    """
    encoder, found, processor = huggingface_format.to_huggingface(model, None, view)
    if found["model_type"] != "vit":
        raise UserError(
            f"Hugging Face's ViTMAE cannot hold what {found['model_type']} has beside a plain ViT; format = safetensors"
            " or onnx can."
        )
    patch = NAMES["huggingface"]["patch_embedding"]
    weight, bias = (encoder[f"{patch}.{part}"] for part in ("weight", "bias"))
    preprocessing.fold_normalisation(weight, bias, HALF, HALF, facts.mean, facts.std)
    own = Layout(_NAMES["huggingface"]).write(decoder)
    tensors = {f"vit.{name}": tensor for name, tensor in encoder.items()}
    tensors |= {f"decoder.{name}": tensor for name, tensor in own.items()}
    found |= {
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        "mask_ratio": 0.75,
        "decoder_hidden_size": len(decoder["decoder_embed.weight"]),
        "decoder_num_hidden_layers": decoder_depth(decoder),
        "decoder_num_attention_heads": facts.num_heads,
        "decoder_intermediate_size": len(decoder["decoder_blocks.0.mlp.up.weight"]),
        "norm_pix_loss": facts.normalise,
    }
    images = {"image_mean": list(facts.mean), "image_std": list(facts.std)}
    return tensors, found, processor | images


def fold_pixels(decoder: Tensors, facts: DecoderFacts, mean: PerChannel, std: PerChannel) -> State:
    """The decoder, predicting pixels of images of another mean and deviation; those of a normalised patch cannot be
    converted.
    """
    if (facts.mean, facts.std) == (mean, std):
        return dict(decoder)
    assert facts.normalise is False, "the caller refuses it"
    old_mean, old_std, new_mean, new_std = (
        torch.tensor(v, dtype=torch.float64) for v in (facts.mean, facts.std, mean, std)
    )
    weight, bias = (decoder[f"decoder_pred.{part}"].double() for part in ("weight", "bias"))
    scale, shift = (v.repeat(len(bias) // 3) for v in (old_std / new_std, (old_mean - new_mean) / new_std))
    folded = {"weight": weight * scale[:, None], "bias": bias * scale + shift}
    return dict(decoder) | {f"decoder_pred.{part}": tensor.float() for part, tensor in folded.items()}


def decoder_depth(decoder: Tensors) -> int:
    """Number of blocks of a decoder with our objective's names."""
    return count_blocks(decoder, _NAMES["timm"])
