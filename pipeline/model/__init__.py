"""The model, for use by itself: needs torch and numpy, and nothing else that this project installs.

    from pipeline.model import create, load
    model = create("ViT-B/16", num_classes=21843)
    model = load("ViT-B_16.npz", image_size=384, num_classes=10)

`vit.py` is the model, and the file to read first.
"""

from pipeline.model.convert import to_npz
from pipeline.model.flops import forward_macs, num_parameters, training_flops_per_image
from pipeline.model.position import resample_positions
from pipeline.model.variants import Gelu, ImageSize, ViTConfig, configure, parse_name
from pipeline.model.vit import VisionTransformer
from pipeline.model.weights import load, read_weights, save, save_state

__all__ = [
    "ViTConfig",
    "VisionTransformer",
    "configure",
    "create",
    "forward_macs",
    "load",
    "num_parameters",
    "parse_name",
    "read_weights",
    "resample_positions",
    "save",
    "save_state",
    "to_npz",
    "training_flops_per_image",
]


def create(
    name: str,
    image_size: ImageSize = 224,
    num_classes: int = 1000,
    *,
    representation: bool = False,
    gelu: Gelu = "tanh",
    dropout: float = 0.0,
    head_bias: float = 0.0,
    seed: int = 0,
    width: int | None = None,
    depth: int | None = None,
    mlp_width: int | None = None,
    num_heads: int | None = None,
) -> VisionTransformer:
    """A new ViT with the paper's initial values, which depend on `seed` alone.

    name: "ViT-L/16": a size (ViT paper, Table 1; Ti, S and others of the authors' code) and a patch side in pixels.
    image_size: side or (height, width) in pixels, divisible by the patch side.
    num_classes: 0 for no head: the model returns its features.
    representation: Dense(D) and tanh before the head, as in the official ImageNet-21k weights.
    gelu: "tanh" (the official code) or "erf" (timm, HF).
    dropout: probability; 0.1 for ImageNet and ImageNet-21k, 0 for JFT (ViT paper, Table 3).
    head_bias: initial bias of the head; -10 is usual with a sigmoid loss over 21k classes (big_vision, vit_i21k.py).
    width, depth, mlp_width, num_heads: replace a number of the named size; each alone, nothing else follows it.
    Raises UserError for an unknown name and for numbers that do not fit together.
    """
    config = configure(
        name,
        image_size,
        num_classes,
        representation=representation,
        gelu=gelu,
        dropout=dropout,
        head_bias=head_bias,
        width=width,
        depth=depth,
        mlp_width=mlp_width,
        num_heads=num_heads,
    )
    return VisionTransformer(config, seed)
