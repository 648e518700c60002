"""What the operations after the crop cost: `python -m data_tools.bench.augment IMAGES.tar [COUNT]`.

Processor time of one thread, so that other work on the machine counts little; settings take turns, medians are printed.
"""

import sys
import tarfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import cv2
import numpy as np
import torch

from pipeline.config import AugmentConfig
from pipeline.data.augment import train_view
from pipeline.data.decode import decode
from pipeline.data.loader import normalise
from pipeline.data.mix import Mixing, mix_images

_SIZE, _BATCH, _ROUNDS = 224, 64, 9
SETTINGS = {
    "decode, crop, flip": AugmentConfig(),
    "+ color_jitter 0.4": AugmentConfig(color_jitter=0.4),
    "+ RandAugment(2, 10)": AugmentConfig(randaugment_layers=2, randaugment_magnitude=10),
    "+ RandAugment(2, 20)": AugmentConfig(randaugment_layers=2, randaugment_magnitude=20),
    "+ erase 1.0": AugmentConfig(erase=1.0),
}


def run(source: Path, count: int) -> None:
    """Print the cost of each setting over `count` JPEGs of a tar, and of mixing a batch in two places."""
    torch.set_num_threads(1)
    files = _files(source, count)
    out = np.empty((_SIZE, _SIZE, 3), np.uint8)

    def views(config: AugmentConfig) -> None:
        for sample, data in enumerate(files):
            train_view(decode(data), out, config, 0, 0, sample)

    _table({name: partial(views, config) for name, config in SETTINGS.items()}, len(files))

    batch = torch.randint(0, 256, (_BATCH, _SIZE, _SIZE, 3), dtype=torch.uint8)
    valid = torch.ones(_BATCH, dtype=torch.bool)

    def on_device(mixing: Mixing | None) -> None:
        images = normalise(batch, torch.device("cpu"), torch.float32)
        if mixing is not None:
            mix_images(images, valid, mixing)

    def in_pool() -> None:
        images = batch.numpy()
        for i in range(0, _BATCH, 2):
            first = cv2.addWeighted(images[i], 0.7, images[i + 1], 0.3, 0)
            images[i + 1] = cv2.addWeighted(images[i + 1], 0.7, images[i], 0.3, 0)
            images[i] = first
        on_device(None)

    ways = {
        "normalise": lambda: on_device(None),
        "+ Mixup of the uint8 batch, in the pool": in_pool,
        "+ Mixup after it (as trained)": lambda: on_device(Mixing(0.7, None)),
        "+ CutMix after it (as trained)": lambda: on_device(Mixing(0.75, (50, 50, 162, 162))),
    }
    _table(ways, _BATCH)


def _files(source: Path, count: int) -> list[bytes]:
    with tarfile.open(source) as tar:
        members = [member for member in tar if member.name.lower().endswith((".jpg", ".jpeg"))]
        readers = [tar.extractfile(member) for member in members[:count]]
        return [reader.read() for reader in readers if reader is not None]


def _table(ways: dict[str, Callable[[], None]], num_images: int) -> None:
    """Microseconds an image of each way, and the ratio to the first, of medians over rounds in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS):
        for name, way in ways.items():
            begin = time.thread_time()
            way()
            seconds[name].append(time.thread_time() - begin)
    first = median(next(iter(seconds.values())))
    for name, of_way in seconds.items():
        each = median(of_way) / num_images
        print(f"{name:42s} {1e6 * each:8.0f} us  {1 / each:8.0f} images/s  {median(of_way) / first:5.2f} x")


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
