"""Grad-CAM (Selvaraju et al., ICCV 2017), computed by Captum: the regions of an image that support a class."""

from collections.abc import Callable
from typing import cast

import torch
from captum.attr import LayerGradCam
from torch import Tensor, nn

from pipeline.model import Model, ResNet
from pipeline.model.vit import Block


def gradcam(model: Model, images: Tensor, classes: Tensor) -> Tensor:
    """The Grad-CAM map of one class for each image, float32 (B, h, w) on the CPU, at least 0.

    images: (B, 3, height, width). classes: int64 (B,). The map is of the last spatial features: of a ResNet, the feature map
    before the mean; of a ViT, the patch tokens that the last attention reads, after which only the class token reaches the
    head.
    """
    tap = nn.Identity()  # The features pass through it as (B, C, h, w), which is what Captum reads.
    if isinstance(model, ResNet):
        return _attribute(lambda images: model.head(tap(model.feature_map(images)).mean((2, 3))), tap, images, classes)
    rows, columns = model.config.grid

    def through_tap(module: nn.Module, inputs: tuple[Tensor, ...], tokens: Tensor) -> Tensor:
        rest, patches = tokens.tensor_split([tokens.shape[1] - rows * columns], dim=1)
        features = tap(patches.transpose(1, 2).unflatten(2, (rows, columns)))
        return torch.cat([rest, features.flatten(2).transpose(1, 2)], dim=1)

    handle = cast(Block, model.blocks[-1]).attention_norm.register_forward_hook(through_tap)
    try:
        return _attribute(model, tap, images, classes)
    finally:
        handle.remove()


def _attribute(forward: Callable[[Tensor], Tensor], tap: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    cam = LayerGradCam(forward, tap).attribute(images, classes.to(images.device), relu_attributions=True)
    return cam[:, 0].detach().float().cpu()
