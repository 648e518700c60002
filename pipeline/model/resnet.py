"""ResNets with GroupNorm and weight standardisation: BiT, and the stem of a hybrid ViT.

BiT (Kolesnikov et al., ECCV 2020, arXiv 1912.11370), the ViT paper's baseline, has pre-activation units; the hybrid's
stem has post-activation units. Their padding and epsilons differ too. Each follows its authors' code exactly, so that
published weights give the published logits: google-research/big_transfer, bit_pytorch/models.py, and
google-research/vision_transformer, vit_jax/models_resnet.py.

Shape letters: B batch, C channels, K classes, h x w cells of a feature map, s stride.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.architecture.config import ResNetConfig
from pipeline.model.layers import Dense, ImageModel, check_images, initialize_head, lecun_normal, run_block

GROUPS = 32
STEM_WIDTH = 64  # channels of the root of a hybrid's stem
# Inputs, outputs, kernel size and stride of each convolution of a unit.
Shapes = list[tuple[int, int, int, int]]


class StdConv(nn.Conv2d):
    """A convolution without bias, its kernel standardised to mean 0 and variance 1 per output channel (Qiao 2019)."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, stride: int = 1):
        super().__init__(inputs, outputs, kernel_size, stride, padding=kernel_size // 2, bias=False)

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()  # in bf16 the statistics would be rounded too
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), keepdim=True, correction=0)
        standard = (weight - mean) / torch.sqrt(variance + 1e-10)
        return F.conv2d(x, standard.to(x.dtype), None, self.stride, self.padding)


class PreActivationUnit(nn.Module):
    """BiT's bottleneck: norm and ReLU before each convolution. (B, C, h, w) -> (B, 4*mid, h/s, w/s)."""

    def __init__(self, inputs: int, mid: int, stride: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, inputs, eps=1e-5)
        self.conv1 = StdConv(inputs, mid, 1)
        self.norm2 = nn.GroupNorm(GROUPS, mid, eps=1e-5)
        self.conv2 = StdConv(mid, mid, 3, stride)
        self.norm3 = nn.GroupNorm(GROUPS, mid, eps=1e-5)
        self.conv3 = StdConv(mid, 4 * mid, 1)
        changes_shape = stride > 1 or inputs != 4 * mid
        self.shortcut = StdConv(inputs, 4 * mid, 1, stride) if changes_shape else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        y = self.conv1(y)
        y = self.conv2(F.relu(self.norm2(y)))
        return self.conv3(F.relu(self.norm3(y))) + shortcut


class ResNet(ImageModel):
    """BiT: a root that downsamples 4 times, stages of pre-activation units, global average pooling, a linear head.

    Built on the CPU, or on the meta device for shapes alone; the initial values depend on `seed` only.
    `activation_checkpointing = True` recomputes each unit in the backward pass: less memory, a third more computation.
    """

    config: ResNetConfig

    def __init__(self, config: ResNetConfig, seed: int = 0):
        super().__init__(config)
        self.root = StdConv(config.pixels.num_channels, config.width, 7, stride=2)
        self.units = nn.ModuleList(PreActivationUnit(*shape) for shape in unit_shapes(config.units, config.width))
        self.norm = nn.GroupNorm(GROUPS, config.num_features, eps=1e-5)
        self.head = Dense(config.num_features, config.num_classes) if config.num_classes else nn.Identity()
        self.initialize(seed)

    def forward(self, images: Tensor, *, any_size: bool = False) -> Tensor:
        """(B, C, height, width) floats in [-1, 1] -> (B, K) logits, or (B, C) features if the model has no head.

        any_size: also read images of another size than `config.image_size`.
        Raises ValueError for images of another shape or of an integer type.
        """
        return self.head(self.features(images, any_size=any_size))

    def features(self, images: Tensor, *, any_size: bool = False) -> Tensor:
        """(B, C, height, width) -> (B, C), the input of the head: the mean of the feature map."""
        return self.feature_map(images, any_size=any_size).mean((2, 3))

    def feature_map(self, images: Tensor, *, any_size: bool = False) -> Tensor:
        """(B, C, height, width) -> (B, C, h, w)"""
        check_images(images, self.config.pixels.num_channels, None if any_size else self.config.image_size)
        # Zero padding as in the authors' code: values may be negative here, and max_pool2d itself pads with minus
        # infinity.
        x = F.max_pool2d(F.pad(self.root(images), (1, 1, 1, 1)), kernel_size=3, stride=2)
        for unit in self.units:
            x = run_block(unit, x, self.activation_checkpointing)
        return F.relu(self.norm(x))

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Kernels as in Flax, a zero head (big_vision, models/bit_paper.py); no-op on the meta device."""
        if self.root.weight.is_meta:
            return
        _initialize_kernels(self, torch.Generator("cpu").manual_seed(seed))
        initialize_head(self.head, self.config.head_bias)


def unit_shapes(units: tuple[int, ...], width: int) -> list[tuple[int, int, int]]:
    """(input channels, inner channels, stride) of every unit in order. Each stage but the first doubles the width and
    halves height and width of the feature map.
    """
    shapes, inputs = [], width
    for stage, count in enumerate(units):
        mid = width * 2**stage
        for i in range(count):
            shapes.append((inputs, mid, 2 if stage > 0 and i == 0 else 1))
            inputs = 4 * mid
    return shapes


class SameStdConv(StdConv):
    """StdConv as in the hybrid's code: padding "SAME", which may be asymmetric, and 1e-5 added to the deviation."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        deviation, mean = torch.std_mean(weight, dim=(1, 2, 3), keepdim=True, correction=0)
        standard = (weight - mean) / (deviation + 1e-5)
        return F.conv2d(_pad_same(x, self.kernel_size[0], self.stride[0]), standard.to(x.dtype), None, self.stride)


class PostActivationUnit(nn.Module):
    """Convolutions, norm and ReLU after each. (B, C, h, w) -> (B, outputs, h/s, w/s).

    The hybrid's bottleneck has three, 1 x 1, 3 x 3 and 1 x 1; the unit of ResNet-18 (He et al., arXiv 1512.03385,
    Figure 5 left), for small images, two of 3 x 3. shapes: inputs, outputs, kernel size and stride of each.
    """

    def __init__(self, shapes: Shapes, is_small: bool):
        super().__init__()
        conv = StdConv if is_small else SameStdConv
        self.num_convs = len(shapes)
        for i, shape in enumerate(shapes, start=1):
            self.add_module(f"conv{i}", conv(*shape))
            self.add_module(f"norm{i}", _stem_norm(shape[1], is_small))
        inputs, outputs, stride = shapes[0][0], shapes[-1][1], max(shape[3] for shape in shapes)
        changes_shape = stride > 1 or inputs != outputs
        self.shortcut = conv(inputs, outputs, 1, stride) if changes_shape else None
        self.shortcut_norm = _stem_norm(outputs, is_small) if changes_shape else None

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i in range(1, self.num_convs + 1):
            y = getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(F.relu(y) if i > 1 else y))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu(x + y)


def _stem_norm(channels: int, is_small: bool) -> nn.GroupNorm:
    return nn.GroupNorm(channels // 16 if is_small else GROUPS, channels, eps=1e-6)


class Stem(nn.Module):
    """The ResNet whose output a hybrid ViT reads instead of pixels: (B, C, height, width) -> (B, channels, h, w).

    width: channels of the root. units: the shapes of each.
    """

    def __init__(self, inputs: int, width: int, units: list[Shapes], is_small: bool):
        super().__init__()
        self.num_channels, self.is_small = units[-1][-1][1] if units else width, is_small
        self.root = StdConv(inputs, width, 3) if is_small else SameStdConv(inputs, width, 7, stride=2)
        self.norm = _stem_norm(width, is_small)
        self.units = nn.Sequential(*(PostActivationUnit(shapes, is_small) for shapes in units))

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.root(images)))
        if not self.is_small:  # zero padding: after ReLU nothing is below it
            x = F.max_pool2d(_pad_same(x, 3, 2), kernel_size=3, stride=2)
        return self.units(x)

    def initialize(self, generator: torch.Generator) -> None:
        """Kernels as in Flax; the last norm's scale of each unit is 0, so that a new unit computes its shortcut
        alone.
        """
        _initialize_kernels(self, generator)
        for unit in cast(Iterable[PostActivationUnit], self.units):
            nn.init.zeros_(getattr(unit, f"norm{unit.num_convs}").weight)


def hybrid_stem(units: tuple[int, ...], inputs: int) -> Stem:
    """The stem of a hybrid (ViT paper, section 3.1).

    units: units of each stage. (3, 4, 6, 3) is ResNet-50, which downsamples 32 times; (3, 4, 9) moves the units of its
    last stage into the third and downsamples 16 times; () is the root alone, 4 times.
    """
    bottlenecks: list[Shapes] = [
        [(read, mid, 1, 1), (mid, mid, 3, stride), (mid, 4 * mid, 1, 1)]
        for read, mid, stride in unit_shapes(units, STEM_WIDTH)
    ]
    return Stem(inputs, STEM_WIDTH, bottlenecks, is_small=False)


def small_stem(channels: tuple[int, ...], inputs: int) -> Stem:
    """The stem of a hybrid for small images: a 3 x 3 root that keeps the size, then a unit for each of `channels`, with
    norms of 16 channels a group.

    As the ResNets for CIFAR-10 (arXiv 1512.03385, section 4.2), whose map is halved where the channels grow.
    """
    units: list[Shapes] = [
        [(read, made, 3, 2 if made > read else 1), (made, made, 3, 1)]
        for read, made in pairwise((channels[0], *channels))
    ]
    return Stem(inputs, channels[0], units, is_small=True)


def _initialize_kernels(model: nn.Module, generator: torch.Generator) -> None:
    for module in model.modules():
        if isinstance(module, StdConv):
            lecun_normal(module.weight, generator)


def _pad_same(x: Tensor, kernel_size: int, stride: int) -> Tensor:
    """Zero padding as TensorFlow's "SAME": ceil(side / stride) outputs; an odd row or column goes to the end."""
    height, width = (max((-(-side // stride) - 1) * stride + kernel_size - side, 0) for side in x.shape[2:])
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
