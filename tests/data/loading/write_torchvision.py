"""What torchvision makes of two small images: `python tests/data/loading/write_torchvision.py` writes
tests/data/loading/torchvision.npz.

    pip install --no-deps --target FOLDER torchvision==0.28.0
    PYTHONPATH=FOLDER python tests/data/loading/write_torchvision.py

The file was written with torchvision 0.28.0 and torch 2.13.0, from pixels of numpy's generator of seed 0, as uint8
tensors. The tests (tests/data/loading/test_torchvision.py) need no torchvision: images and results are in the file.
"""

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, library

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pipeline.base import random_numbers

# torchvision's wheel is built for CUDA; without its operators, a CPU's torch can import it only if these are declared.
operators = library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    operators.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
F: Any = importlib.import_module("torchvision.transforms.v2.functional")
transforms: Any = importlib.import_module("torchvision.transforms")

FILE = Path(__file__).with_name("torchvision.npz")
# Kernels that hold three standard deviations, as ours do.
BLURS = {0.1: 3, 0.7: 5, 2.0: 13}
# Order, brightness, contrast, saturation, hue.
JITTERS: list[Any] = [("2031", 0.7, 1.35, 1.2, 0.08), ("1302", 1.3, 0.65, 0.85, -0.1)]
REGION = (2, 3, 11, 13)  # top, left, height, width
# Height, width, smallest and largest area; the last two leave no crop of an allowed aspect.
CROPS = [(400, 500, 0.08, 1.0), (33, 70, 0.3, 0.9), (10, 100, 1.0, 1.0), (100, 10, 1.0, 1.0)]
NUM_CROPS = 20  # of each


def crop(height: int, width: int, area: tuple[float, ...], uniform: np.ndarray) -> tuple[int, ...]:
    """RandomResizedCrop's choice, with these numbers in place of torch's: four of each try, for area, aspect, top and
    left.
    """
    used = 0

    def fill(tensor: Tensor, low: float, high: float) -> Tensor:
        nonlocal used
        used += 2 * (used % 4 == 2)  # The try before did not fit, and drew no place.
        used += 1
        return tensor.fill_(float(low) + uniform[used - 1] * (float(high) - float(low)))

    def integer(low: int, high: int, size: tuple[int]) -> Tensor:
        nonlocal used
        used += 1
        return torch.full(size, low + int(uniform[used - 1] * (high - low)))

    with mock.patch.object(Tensor, "uniform_", fill), mock.patch.object(torch, "randint", integer):
        return transforms.RandomResizedCrop.get_params(torch.empty(3, height, width), area, (3 / 4, 4 / 3))


def jittered(image: Tensor, order: str, factors: list[float]) -> Tensor:
    chosen = (torch.tensor([int(i) for i in order]), *factors)
    with mock.patch.object(transforms.ColorJitter, "get_params", return_value=chosen):
        return transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)(image)


def main() -> None:
    rng = np.random.default_rng(0)
    small, large = (rng.integers(0, 256, (*size, 3), np.uint8) for size in ((8, 8), (16, 18)))
    image, region = (torch.from_numpy(pixels).permute(2, 0, 1) for pixels in (small, large))
    found = {f"hue {turn}": F.adjust_hue(image, turn) for turn in (-0.5, -0.1, 0.07, 0.5)}
    found |= {"grey": F.rgb_to_grayscale(image, 3), "solarise": F.solarize(image, 128)}
    found |= {f"brightness {factor}": F.adjust_brightness(image, factor) for factor in (0.6, 1.37)}
    found |= {f"contrast {factor}": F.adjust_contrast(image, factor) for factor in (0.6, 1.4)}
    found |= {f"saturation {factor}": F.adjust_saturation(image, factor) for factor in (0.8, 1.2)}
    found |= {f"blur {sigma}": F.gaussian_blur(image, [side] * 2, [sigma] * 2) for sigma, side in BLURS.items()}
    found |= {
        " ".join(map(str, ("jitter", order, *factors))): jittered(image, order, factors) for order, *factors in JITTERS
    }
    resized = {
        f"{mode} {side}": F.resized_crop(region, *REGION, [side] * 2, F.InterpolationMode(mode), antialias=True)
        for mode in ("bilinear", "bicubic")
        for side in (5, 16)
    }
    boxes = [
        [crop(height, width, tuple(area), random_numbers.uniform(0, 1, i, np.arange(40))) for i in range(NUM_CROPS)]
        for height, width, *area in CROPS
    ]
    np.savez_compressed(
        FILE,
        small=small,
        large=large,
        names=np.array(list(found), "S"),
        distorted=torch.stack(list(found.values())).permute(0, 2, 3, 1).numpy(),
        **{name: result.permute(1, 2, 0).numpy() for name, result in resized.items()},
        crops=np.array(CROPS),
        boxes=np.array(boxes, np.int16),
    )
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
