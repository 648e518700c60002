"""CPU time of augmentation, the operations after the crop, and of mixing: `python tests/measure/measure_augmentation.py photos.tar --images 200 --rounds 9`.

CPU time of one thread is measured, because other load on the machine hardly affects it. Settings alternate, and medians are
printed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import cv2
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import of_jpegs

from data_tools.bench.record import BenchRecord
from pipeline.architecture.pixels import RGB8
from pipeline.base.errors import UserError
from pipeline.data.loading.loader import normalise
from pipeline.data.loading.mix import Mixing, mix_images
from pipeline.data.loading.views import Views, train_views
from pipeline.settings.run import AugmentConfig

SETTINGS = {
    "decode, crop, flip": AugmentConfig(),
    "+ color_jitter 0.4": AugmentConfig(color_jitter=0.4),
    "+ color_jitter 0.4, saturation 0.2, hue 0.1": AugmentConfig(color_jitter=0.4, saturation=0.2, hue=0.1),
    "+ three_augment 1.0": AugmentConfig(three_augment=1.0),
    "+ grey 1.0": AugmentConfig(grey=1.0),
    "+ blur 1.0": AugmentConfig(blur=1.0),
    "+ solarise 1.0": AugmentConfig(solarise=1.0),
    "random_resized, bicubic": AugmentConfig(crop="random_resized", resize_filter="bicubic"),
    "+ RandAugment(2, 10)": AugmentConfig(randaugment_layers=2, randaugment_magnitude=10),
    "+ RandAugment(2, 20)": AugmentConfig(randaugment_layers=2, randaugment_magnitude=20),
    "+ erase 1.0": AugmentConfig(erase=1.0),
    "+ flip_vertical, turns": AugmentConfig(flip_vertical=True, turns=True),
    "+ channel_brightness 0.3, channel_contrast 0.3": AugmentConfig(channel_brightness=0.3, channel_contrast=0.3),
    "+ noise 0.1": AugmentConfig(noise=0.1),
    "+ drop_channels 0.2": AugmentConfig(drop_channels=0.2),
}


def run(config: argparse.Namespace, record: BenchRecord, _: Path) -> None:
    """Print the CPU time of each setting over all images, and of mixing before and after normalisation."""
    if config.batch % 2:
        raise UserError(f"--batch = {config.batch} must be even: images are mixed in pairs.")
    torch.set_num_threads(1)
    files = of_jpegs.read_raw(Path(config.source), config.images)
    side = config.image_size

    def draw(*groups: Views) -> None:
        writer = train_views(groups, seed=0)
        outs = [np.empty((height, width, 3), np.uint8) for count, height, width in writer.shapes for _ in range(count)]
        for sample, data in enumerate(files):
            writer.write(data, outs, 0, sample)

    drawn: dict[str, Callable[[], None]] = {
        name: partial(draw, Views(1, side, settings)) for name, settings in SETTINGS.items()
    }
    drawn["2 views"] = partial(draw, Views(2, side, AugmentConfig()))
    large, small = AugmentConfig(area_min=0.32), AugmentConfig(area_max=0.32)  # DINOv2's crops
    drawn["2 large views, 8 small ones"] = partial(draw, Views(2, side, large), Views(8, side * 3 // 7, small))
    _table(drawn, len(files), config.rounds, record)

    batch = torch.randint(0, 256, (config.batch, side, side, 3), dtype=torch.uint8)
    valid = torch.ones(config.batch, dtype=torch.bool)

    def on_device(mixing: Mixing | None) -> None:
        images = normalise(batch, torch.device("cpu"), torch.float32, RGB8)
        if mixing is not None:
            mix_images(images, valid, mixing)

    def in_pool() -> None:
        images = batch.numpy()
        for i in range(0, config.batch, 2):
            first = cv2.addWeighted(images[i], 0.7, images[i + 1], 0.3, 0)
            images[i + 1] = cv2.addWeighted(images[i + 1], 0.7, images[i], 0.3, 0)
            images[i] = first
        on_device(None)

    box = (side // 4, side // 4, side - side // 4, side - side // 4)
    ways = {
        "normalise": lambda: on_device(None),
        "+ Mixup of the uint8 batch, in the pool": in_pool,
        "+ Mixup after it (as trained)": lambda: on_device(Mixing(0.7, None)),
        "+ CutMix after it (as trained)": lambda: on_device(Mixing(0.75, box)),
    }
    _table(ways, config.batch, config.rounds, record)


def _table(ways: dict[str, Callable[[], None]], num_images: int, rounds: int, record: BenchRecord) -> None:
    """Print microseconds per image of each alternative, and the ratio to the first: medians of alternating rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.thread_time()
            way()
            seconds[name].append(time.thread_time() - begin)
    first = median(next(iter(seconds.values())))
    for name, of_way in seconds.items():
        each = median(of_way) / num_images
        print(f"{name:42s} {1e6 * each:8.0f} us  {1 / each:8.0f} images/s  {median(of_way) / first:5.2f} x")
        record.add(name, microseconds=1e6 * each, images_per_second=1 / each, ratio=median(of_way) / first)


if __name__ == "__main__":
    of_jpegs.main(__doc__, "augment", run)
