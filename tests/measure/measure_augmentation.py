"""CPU time of augmentation, the operations after the crop: the numbers in docs/preprocessing.md.

    python tests/measure/measure_augmentation.py photos.tar --images 200 --rounds 9

CPU time of one thread, which other load on the machine hardly affects. Settings alternate; medians, and ratios to the
first line.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from measure_loading import read_raw

from pipeline.data.loading.views import Views, train_views
from pipeline.settings.run import AugmentConfig

SETTINGS = {
    "decode, crop, flip": AugmentConfig(),
    "+ color_jitter 0.4": AugmentConfig(color_jitter=0.4),
    "+ RandAugment(2, 10)": AugmentConfig(randaugment_layers=2, randaugment_magnitude=10),
    "+ RandAugment(2, 20)": AugmentConfig(randaugment_layers=2, randaugment_magnitude=20),
    "+ erase 1.0": AugmentConfig(erase=1.0),
}


def measure(files: list[bytes], side: int, rounds: int) -> None:
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
    seconds: dict[str, list[float]] = {name: [] for name in drawn}
    for _ in range(rounds):
        for name, way in drawn.items():
            begin = time.thread_time()
            way()
            seconds[name].append(time.thread_time() - begin)
    first = median(next(iter(seconds.values())))
    for name, of_way in seconds.items():
        print(f"{name:48s} {1e6 * median(of_way) / len(files):8.0f} us an image  {median(of_way) / first:5.2f} x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder or tar of JPEGs")
    for option, default in (("--images", 200), ("--rounds", 5)):
        parser.add_argument(option, type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure(read_raw(given.source, given.images), 224, given.rounds)
