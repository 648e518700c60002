"""A linear layer on the patch tokens of a frozen ViT: its training on random crops, as in DINOv3 (arXiv 2508.10104;
dinov3/eval/segmentation), the classes that it tells in whole images by overlapping windows, and their mIoU.

Shapes: B images or crops, S side of a crop or a window, C channels, H, W height and width, h x w patches, D width, n
images, K classes.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.random_numbers import Purpose
from pipeline.data.dataset.split import BadBudget
from pipeline.data.loading.views import resize, resize_method
from pipeline.evaluate.intervals import freedom_of_groups, quantile
from pipeline.evaluate.loaded_model import LoadedModel
from pipeline.evaluate.patches import between_centres, between_patches
from pipeline.evaluate.segmentation.pairs import (
    NO_CLASS,
    MaskClasses,
    MaskedPairs,
    in_order,
    pair_reader,
    refuse_unreadable,
)
from pipeline.model import ViTConfig
from pipeline.objectives.parameters.optimizers import learning_rate
from pipeline.process.waits import Work
from pipeline.settings.commands.segment import SegmentConfig
from pipeline.settings.run import AugmentConfig, ScheduleConfig

_ORDER, _CROP = Purpose.named("segmentation order"), Purpose.named("segmentation crop")
# As in DINOv3: weight decay of AdamW, share of warm-up steps, and the short side of an image over short_side.
_WEIGHT_DECAY, _WARMUP, SCALES = 1e-3, 0.0375, (0.5, 2.0)
# Steps after which the loss is read from the device.
_STEPS_BETWEEN_LOOKS = 20
# Batches that are read ahead.
_AHEAD = 2
# Windows begin at multiples of this share of their side: 341 of 512 pixels in DINOv3
# (dinov3/eval/segmentation/config.py).
_STRIDE = 2 / 3
# Logits that are interpolated to an image's own size at a time: 256 MiB.
_MAX_LOGITS = 2**26
# Resamples of the interval, and how many are drawn at a time: 8 bytes of each for each image or group.
_RESAMPLES, _BLOCK = 1000, 50
_BOOTSTRAP = Purpose.named("segmentation bootstrap")


@torch.no_grad()
def patch_tokens(loaded: LoadedModel, images: Tensor) -> Tensor:
    """Images (B, S, S, C) of a batch -> float32 (B, D, h, w), the features of their patches."""
    return loaded.patch_features(images).movedim(3, 1)


def linear_head(width: int, num_classes: int, seed: int) -> nn.Module:
    """BatchNorm, then a dense layer of each place: (B, D, h, w) -> (B, K, h, w)."""
    classify = nn.Conv2d(width, num_classes, 1)
    nn.init.normal_(classify.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
    assert classify.bias is not None
    nn.init.zeros_(classify.bias)
    return nn.Sequential(OrderedDict(norm=nn.BatchNorm2d(width), classify=classify))


def logits_of(loaded: LoadedModel, head: nn.Module, images: Tensor) -> Tensor:
    """Images (B, S, S, C) of a batch -> (B, K, S, S)."""
    return enlarged(head(patch_tokens(loaded, images)), loaded.vit.config)


def enlarged(logits: Tensor, config: ViTConfig) -> Tensor:
    """(B, K, h, w) -> (B, K, H, W): linear between the centres of the patches, constant outside of them.

    Where patches tile the image this is `interpolate(mode="bilinear", align_corners=False)`; as products of matrices
    its gradient is deterministic on a GPU, too, and it knows of patches that leave pixels unseen.
    """
    rows, columns = (of_side.to(logits) for of_side in between_patches(config, config.image_size))
    return rows @ logits @ columns.T


def train(
    head: nn.Module,
    loaded: LoadedModel,
    pairs: MaskedPairs,
    classes: MaskClasses,
    config: SegmentConfig,
    budget: BadBudget,
) -> dict[int, str]:
    """Train on the crops of all steps, with a progress bar. Returns number of a pair -> why it cannot be read.

    The loss is the cross-entropy, a mean over the pixels with a class; shown is its mean over some 50 steps. Raises
    UserError for too many unreadable pairs, and for a loss that is not finite.
    """
    head.train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=config.lr, weight_decay=_WEIGHT_DECAY)
    schedule, warmup = ScheduleConfig(decay="cosine"), round(_WARMUP * config.steps)
    mean, problems = torch.zeros((), device=loaded.device), dict[int, str]()
    crops = batches(pairs, classes, config, loaded, problems)
    with Work("training the layer", config.steps, "step") as work:
        for step, (images, of_pixels) in enumerate(crops, start=1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(schedule, config.lr, step - 1, config.steps, warmup)
            true = of_pixels.to(loaded.device).long().flatten()
            logits = logits_of(loaded, head, images)
            # As a matrix, because the kernel for images is not deterministic on a GPU.
            total = cross_entropy(logits.movedim(1, -1).flatten(0, 2), true, ignore_index=NO_CLASS, reduction="sum")
            loss = total / (true != NO_CLASS).sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach() if step == 1 else 0.98 * mean + 0.02 * loss.detach()
            refuse_unreadable(problems, pairs.images, budget)
            work.advance()
            if step % _STEPS_BETWEEN_LOOKS and step < config.steps:
                continue
            if not mean.isfinite():
                raise UserError(f"step {step:,}: the loss is not finite. Lower lr, or use precision=fp32.")
            work.note = f"loss {float(mean):.3f}"
    return problems


def batches(
    pairs: MaskedPairs, classes: MaskClasses, config: SegmentConfig, loaded: LoadedModel, problems: dict[int, str]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the crops of all steps: images (B, S, S, C) of the type of a batch, and their classes, int16 (B, S, S),
    NO_CLASS where there is none. Each is a function of (seed, epoch, pair) alone.

    problems: number of a pair -> why it cannot be read, filled while reading; its crop has no class.
    """
    side = min(loaded.image_size)
    low, high = map(np.array, loaded.pixels.batch_range())
    outside = ((low + high) / 2).astype(loaded.pixels.batch_type)
    order = (
        (epoch, number)
        for epoch in count()
        for number in random_numbers.permutation(len(pairs), config.seed, _ORDER, epoch).tolist()
    )
    read = pair_reader(pairs, classes, loaded.pixels)

    def crop(place: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        epoch, number = place
        draw = random_numbers.draws(config.seed, _CROP, epoch, number)
        return random_crop(*read(number), outside, config, loaded.view, side, draw)

    batch = config.train_batch
    found = in_order(crop, islice(order, config.steps * batch), config.threads, _AHEAD * batch)
    while part := list(islice(found, batch)):
        problems |= {number: why for (_, number), why in part if isinstance(why, str)}
        empty = np.tile(outside, (side, side, 1)), np.full((side, side), NO_CLASS, np.int16)
        crops = (empty if isinstance(one, str) else one for _, one in part)
        images, of_pixels = (torch.from_numpy(np.stack(parts)) for parts in zip(*crops, strict=True))
        yield images, of_pixels


def random_crop(
    image: np.ndarray,
    classes: np.ndarray,
    outside: np.ndarray,
    config: SegmentConfig,
    view: AugmentConfig,
    side: int,
    draw: Callable[[int], float],
) -> tuple[np.ndarray, np.ndarray]:
    """A square of a randomly scaled image, mirrored by half, its classes with it: (H, W, C) and int16 (H, W) -> (S, S,
    C) and int16 (S, S).

    The short side of the image becomes short_side (S, if that is 0) times a number of `SCALES`. Where the image ends
    before the square, pixels are `outside`, (C,), and have no class. draw: uniform numbers of this crop.
    """
    scale = SCALES[0] + draw(0) * (SCALES[1] - SCALES[0])
    image = resized(image, max(1, int((config.short_side or side) * scale)), view)
    height, width = image.shape[:2]
    top, left = (int(draw(1 + axis) * (max(long - side, 0) + 1)) for axis, long in enumerate((height, width)))
    image = image[top : top + side, left : left + side]
    # The class of the pixel at the centre of each new one.
    rows, columns = (
        ((np.arange(first, first + few) + 0.5) * long / side_of_all).astype(np.int64)
        for first, few, long, side_of_all in zip((top, left), image.shape, classes.shape, (height, width), strict=False)
    )
    out, out_classes = np.tile(outside, (side, side, 1)), np.full((side, side), NO_CLASS, np.int16)
    out[: len(rows), : len(columns)] = image
    out_classes[: len(rows), : len(columns)] = classes[rows[:, None], columns]
    if draw(3) < 0.5:
        out, out_classes = out[:, ::-1], out_classes[:, ::-1]
    return out, out_classes


def resized(image: np.ndarray, short: int, view: AugmentConfig) -> np.ndarray:
    """(H, W, C) -> the image whose short side is `short`."""
    sides = image.shape[:2]
    height, width = (int(short * side / min(sides) + 0.5) for side in sides)
    return resize(image, (width, height), resize_method(image, (height, width), view))


@torch.no_grad()
def segment(image: np.ndarray, loaded: LoadedModel, head: nn.Module, config: SegmentConfig) -> np.ndarray:
    """(H, W, C) of the type of a batch -> int16 (H, W), the class of each pixel.

    The image is resized to a short side of short_side, or S; logits are means over the windows of S x S pixels that
    cover a place, then interpolated to H x W.
    """
    side, size = min(loaded.image_size), (image.shape[0], image.shape[1])
    image = resized(image, config.short_side or side, loaded.view)
    height, width = image.shape[:2]
    places = [(top, left) for top in _starts(height, side) for left in _starts(width, side)]
    total, covered = torch.zeros(()), torch.zeros(height, width, device=loaded.device)
    for first in range(0, len(places), config.batch):
        part = places[first : first + config.batch]
        windows = torch.from_numpy(np.stack([image[top : top + side, left : left + side] for top, left in part]))
        logits = logits_of(loaded, head, windows)
        if not first:
            total = logits.new_zeros(logits.shape[1], height, width)
        for (top, left), of_window in zip(part, logits, strict=True):
            total[:, top : top + side, left : left + side] += of_window
            covered[top : top + side, left : left + side] += 1
    return _largest(total / covered, size).to(torch.int16).cpu().numpy()


def _starts(length: int, side: int) -> list[int]:
    """Where windows begin along a side of the image; the last ends with it."""
    stride = round(side * _STRIDE)
    number = -(-(length - side) // stride) + 1
    return [min(i * stride, length - side) for i in range(number)]


def _largest(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """(K, h, w) -> int64 `size`: the class with the largest logit after interpolation, a few rows of pixels at a
    time.
    """
    rows, columns = (
        between_centres(long, (torch.arange(few) + 0.5) * long / few - 0.5).to(logits)
        for long, few in zip(size, logits.shape[1:], strict=True)
    )
    step = max(1, _MAX_LOGITS // (len(logits) * size[1]))
    return torch.cat([(part @ logits @ columns.T).argmax(0) for part in rows.split(step)])


def count_pixels(true: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """int64 (3, K): of the pixels that have a class, those of each class that are right, predicted as it, and truly of
    it.
    """
    known = true >= 0
    parts = true[known & (true == predicted)], predicted[known], true[known]
    return np.stack([np.bincount(classes, minlength=num_classes) for classes in parts])


def score(counts: np.ndarray, groups: np.ndarray) -> dict[str, Any]:
    """miou, of images together, in [0, 1]; interval, its 95 % interval over images, or over groups of them, NaN for
    one; num_groups, None without groups.

    counts: (n, 3, K) of `count_pixels`. groups: (n,), the group of each, such as a video; empty without.

    The interval is of 1,000 resamples: it holds for other images like these, not for another training. Over images it
    is the resamples' percentiles. Groups are often few, of which percentiles say too much: Student's t on their
    deviation.
    """
    value = float(miou(counts.sum(0)))
    # Products of float64 are many times faster than of int64, and exact below 2**53 pixels.
    units, num_groups = counts.astype(np.float64), None
    if len(groups):
        names, numbers = np.unique(groups, return_inverse=True)
        num_groups = len(names)
        units = np.zeros((num_groups, *counts.shape[1:]))
        np.add.at(units, numbers, counts)
    low = high = np.nan
    if len(units) > 1:
        resampled = _resampled(units)
        low, high = np.quantile(resampled, [0.025, 0.975]).tolist()
        if num_groups is not None:
            half = quantile(freedom_of_groups(units[:, 2].sum(1))) * float(np.std(resampled))
            half *= (num_groups / (num_groups - 1)) ** 0.5
            low, high = max(0.0, value - half), min(1.0, value + half)
    return {"miou": value, "interval": [low, high], "num_groups": num_groups}


def miou(counts: np.ndarray) -> np.ndarray:
    """(..., 3, K) -> float64 (...): the mean over the classes that occur of intersection over union."""
    right, predicted, true = np.moveaxis(counts, -2, 0)
    union = predicted + true - right
    return (right / np.maximum(union, 1)).sum(-1) / np.maximum((union > 0).sum(-1), 1)


def _resampled(units: np.ndarray) -> np.ndarray:
    """float64 (1000,), the mIoU of u images, or groups, drawn with replacement. units: (u, 3, K)."""
    num_units, found = len(units), []
    for first in range(0, _RESAMPLES, _BLOCK):
        resamples = np.arange(first, first + _BLOCK)[:, None]
        rows = random_numbers.bits(0, _BOOTSTRAP, resamples, np.arange(num_units)) % np.uint64(num_units)
        times = np.stack([np.bincount(row, minlength=num_units) for row in rows.astype(np.int64)]).astype(np.float64)
        found.append(miou(np.tensordot(times, units, 1)))
    return np.concatenate(found)
