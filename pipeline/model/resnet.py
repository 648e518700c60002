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
from pipeline.model.layers import Dense, check_images, initialize_head, lecun_normal, run_block

GROUPS = 32
STEM_WIDTH = 64  # channels of the root of a hybrid's stem


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


class ResNet(nn.Module):
    """BiT: a root that downsamples 4 times, stages of pre-activation units, global average pooling, a linear head.

    Built on the CPU, or on the meta device for shapes alone; the initial values depend on `seed` only.
    `activation_checkpointing = True` recomputes each unit in the backward pass: less memory, a third more computation.
    """

    def __init__(self, config: ResNetConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
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


def stem_channels(units: tuple[int, ...]) -> int:
    """Number of channels that a hybrid's stem of these units returns."""
    return 4 * STEM_WIDTH * 2 ** (len(units) - 1) if units else STEM_WIDTH


class SameStdConv(StdConv):
    """StdConv as in the hybrid's code: padding "SAME", which may be asymmetric, and 1e-5 added to the deviation."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        deviation, mean = torch.std_mean(weight, dim=(1, 2, 3), keepdim=True, correction=0)
        standard = (weight - mean) / (deviation + 1e-5)
        return F.conv2d(_pad_same(x, self.kernel_size[0], self.stride[0]), standard.to(x.dtype), None, self.stride)


class PostActivationUnit(nn.Module):
    """The hybrid's bottleneck: norm and ReLU after each convolution. (B, C, h, w) -> (B, 4*mid, h/s, w/s)."""

    def __init__(self, inputs: int, mid: int, stride: int):
        super().__init__()
        self.conv1 = SameStdConv(inputs, mid, 1)
        self.norm1 = nn.GroupNorm(GROUPS, mid, eps=1e-6)
        self.conv2 = SameStdConv(mid, mid, 3, stride)
        self.norm2 = nn.GroupNorm(GROUPS, mid, eps=1e-6)
        self.conv3 = SameStdConv(mid, 4 * mid, 1)
        self.norm3 = nn.GroupNorm(GROUPS, 4 * mid, eps=1e-6)
        changes_shape = stride > 1 or inputs != 4 * mid
        self.shortcut = SameStdConv(inputs, 4 * mid, 1, stride) if changes_shape else None
        self.shortcut_norm = nn.GroupNorm(GROUPS, 4 * mid, eps=1e-6) if changes_shape else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu(x + y)


class HybridStem(nn.Module):
    """The ResNet whose output a hybrid ViT reads instead of pixels (ViT paper, section 3.1).

    units: units of each stage. (3, 4, 6, 3) is ResNet-50, which downsamples 32 times; (3, 4, 9) moves the units of its
    last stage into the third and downsamples 16 times; () is the root alone, 4 times.
    (B, C, height, width) -> (B, num_channels, h, w).
    """

    def __init__(self, units: tuple[int, ...], inputs: int = 3):
        super().__init__()
        self.num_channels = stem_channels(units)
        self.root = SameStdConv(inputs, STEM_WIDTH, 7, stride=2)
        self.norm = nn.GroupNorm(GROUPS, STEM_WIDTH, eps=1e-6)
        self.units = nn.Sequential(*(PostActivationUnit(*shape) for shape in unit_shapes(units, STEM_WIDTH)))

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.root(images)))
        # zero padding: after ReLU nothing is below it
        return self.units(F.max_pool2d(_pad_same(x, 3, 2), kernel_size=3, stride=2))

    def initialize(self, generator: torch.Generator) -> None:
        """Kernels as in Flax; the last norm's scale of each unit is 0, so that a new unit computes its shortcut
        alone.
        """
        _initialize_kernels(self, generator)
        for unit in cast(Iterable[PostActivationUnit], self.units):
            nn.init.zeros_(unit.norm3.weight)


class BasicUnit(nn.Module):
    """Two convolutions, norm and ReLU after each. (B, C, h, w) -> (B, outputs, h/s, w/s), s = 2 where channels grow,
    else 1.

    The unit of ResNet-18 (He et al., arXiv 1512.03385, Figure 5 left), with the hybrid's norms; groups of 16 channels.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        stride = 2 if outputs > inputs else 1
        self.conv1 = StdConv(inputs, outputs, 3, stride)
        self.norm1 = nn.GroupNorm(outputs // 16, outputs, eps=1e-6)
        self.conv2 = StdConv(outputs, outputs, 3)
        self.norm2 = nn.GroupNorm(outputs // 16, outputs, eps=1e-6)
        self.shortcut = StdConv(inputs, outputs, 1, stride) if stride > 1 else None
        self.shortcut_norm = nn.GroupNorm(outputs // 16, outputs, eps=1e-6) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu(x + y)


class SmallStem(nn.Module):
    """The stem of a hybrid for small images: a 3 x 3 root that keeps the size, then a `BasicUnit` for each of
    `channels`.

    As the ResNets for CIFAR-10 (arXiv 1512.03385, section 4.2), whose map is halved where the channels grow.
    (B, C, height, width) -> (B, channels[-1], h, w).
    """

    def __init__(self, channels: tuple[int, ...], inputs: int = 3):
        super().__init__()
        self.num_channels = channels[-1]
        self.root = StdConv(inputs, channels[0], 3)
        self.norm = nn.GroupNorm(channels[0] // 16, channels[0], eps=1e-6)
        self.units = nn.Sequential(*(BasicUnit(*pair) for pair in pairwise((channels[0], *channels))))

    def forward(self, images: Tensor) -> Tensor:
        return self.units(F.relu(self.norm(self.root(images))))

    def initialize(self, generator: torch.Generator) -> None:
        """Same as the hybrid's stem: kernels as in Flax; a new unit computes only its shortcut."""
        _initialize_kernels(self, generator)
        for unit in cast(Iterable[BasicUnit], self.units):
            nn.init.zeros_(unit.norm2.weight)


def _initialize_kernels(model: nn.Module, generator: torch.Generator) -> None:
    for module in model.modules():
        if isinstance(module, StdConv):
            lecun_normal(module.weight, generator)


def _pad_same(x: Tensor, kernel_size: int, stride: int) -> Tensor:
    """Zero padding as TensorFlow's "SAME": ceil(side / stride) outputs; an odd row or column goes to the end."""
    height, width = (max((-(-side // stride) - 1) * stride + kernel_size - side, 0) for side in x.shape[2:])
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
