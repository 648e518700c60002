"""Images for benchmarks: generated JPEGs; batches of noise, also of an objective."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
import torch

from pipeline import objectives
from pipeline.data.loading.loader import Batch
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig

# Of models and noise; the generated files have fewer.
NUM_CLASSES = 1000
_CLASSES_OF_FILES, _DISTINCT_FILES = 10, 64


def write_generated(folder: Path, images: int) -> int:
    """Write `images` files folder/<class>/<number>.jpg; returns their bytes together.

    They repeat a few distinct JPEGs of blurred noise, each with as many pixels as ImageNet's, and about as many bytes.
    """
    distinct = []
    for number in range(_DISTINCT_FILES):
        rng = np.random.default_rng(number)
        coarse = rng.integers(0, 256, (375 // 6, 500 // 6, 3), np.uint8)
        pixels = cv2.resize(coarse, (500, 375), interpolation=cv2.INTER_CUBIC)
        distinct.append(simplejpeg.encode_jpeg(pixels, quality=90))
    written = 0
    for number in range(images):
        path = folder / f"class{number % _CLASSES_OF_FILES}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        written += path.write_bytes(distinct[number % _DISTINCT_FILES])
    return written


def objective_run(loss: str, model: str, image_size: int, batch: int) -> RunConfig:
    """A run of a hundred steps with the defaults, which for each objective are those of its recipe for ImageNet-1k."""
    return schema.load(RunConfig, None, [
        "name=bench", "data.path=none", "data.streams=1", "train.length=100 steps", "schedule.warmup=0 steps", f"train.loss={loss}",
        f"train.global_batch={batch}", f"train.micro_batch={batch}", f"model.name={model}", f"model.image_size={image_size}",
        "model.representation=false", "augment.crop=random_resized",
    ])  # fmt: skip


def noise_of(run: RunConfig, batch: int) -> Batch:
    """A batch of noise with the views that a run's objective wants."""
    views = objectives.kind(run.train.loss).views(run)
    return noise_views([(group.count, *ImageSize.parse(group.size)) for group in views], batch)


def noise_batch(size: int, image_size: int) -> Batch:
    """A batch of noise: the time of a step does not depend on the images."""
    return noise_views([(1, image_size, image_size)], size)


def noise_views(
    shapes: Sequence[tuple[int, int, int]], size: int, num_classes: int = NUM_CLASSES, seed: int = 0
) -> Batch:
    """The same with groups of views; shapes: (number, height, width) of each."""
    rng = np.random.default_rng(seed)
    views = [torch.from_numpy(rng.integers(0, 256, (count, size, *side, 3), np.uint8)) for count, *side in shapes]
    labels = torch.from_numpy(rng.integers(0, num_classes, (size, 1)))
    return Batch(tuple(views), labels, torch.ones(size, dtype=torch.bool), np.arange(size), np.zeros(size, np.int64))
