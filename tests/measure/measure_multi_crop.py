"""Speed of multi-crop views, as DINO has them: 2 large views and 8 small ones of each image, beside torchvision and lightly.

    python tests/measure/measure_multi_crop.py photos.tar --images 1000

Others are measured if they are installed.
"""

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageFilter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import of_jpegs
import other_loaders
from contestants import Contestant, report
from measure_loading import load_batches, write_shards

from data_tools.bench.record import BenchRecord
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import Split
from pipeline.data.loading.views import Views, train_views
from pipeline.settings.run import AugmentConfig

LARGE, SMALL = 2, 8
_LARGE_AREA, _SMALL_AREA = (0.4, 1.0), (0.05, 0.4)
_BLUR, _SOLARISE = (1.0, 0.1, 0.5), (0.0, 0.2, 0.0)  # of the first large view, the second, and the small ones
_ALL, _CROPS = "DINO's views", "crops and flips alone"


def run(config: argparse.Namespace, record: BenchRecord, folder: Path) -> None:
    """Measure and print images per second, each with LARGE + SMALL views."""
    files = of_jpegs.write_raw(Path(config.source), folder / "raw", config.images)
    split = write_shards(folder, 0)
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    contestants = [*_ours(config, split, cores), *_others(config, files, cores)]
    what = (
        f"{counted(config.images, 'JPEG')}, {LARGE} views of {config.image_size} px and {SMALL} of {small_side(config.image_size)} px "
        f"of each (views/s: {LARGE + SMALL} times images/s), batch {config.batch}, {counted(cores, 'core')}"
    )
    report(contestants, config.rounds, record, what, ("output", "views", "filter"))


def small_side(large: int) -> int:
    """96 px for 224."""
    return large * 3 // 7


def ours(side: int, resize_filter: str, distorted: bool) -> tuple[Views, ...]:
    """The groups of views of the loader."""
    large = AugmentConfig(crop="random_resized", resize_filter=resize_filter, area_min=_LARGE_AREA[0])  # type: ignore[arg-type]
    if distorted:
        large = replace(large, color_jitter=0.4, saturation=0.2, hue=0.1, color_jitter_probability=0.8, grey=0.2)
    small = replace(large, area_min=_SMALL_AREA[0], area_max=_SMALL_AREA[1])
    first, second, small = (
        replace(one, blur=blur * distorted, solarise=solarise * distorted)
        for one, blur, solarise in zip((large, large, small), _BLUR, _SOLARISE, strict=True)
    )
    return Views(1, side, first), Views(1, side, second), Views(SMALL, small_side(side), small)


def _ours(config: argparse.Namespace, split: Split, cores: int) -> Iterator[Contestant]:
    for method, distorted in (("bicubic", True), ("antialias", True), ("bicubic", False)):
        view = train_views(ours(config.image_size, method, distorted), seed=0)
        about = ("uint8", _ALL if distorted else _CROPS, method)
        yield Contestant(f"our loader, {', '.join(about[1:])}", about, cores, partial(load_batches, split, view, config.batch, cores))  # fmt: skip


def _others(config: argparse.Namespace, files: Sequence[tuple[Path, int]], cores: int) -> Iterator[Contestant]:
    """All in torch's DataLoader, a process for each core."""
    made: list[tuple[str, Callable[[int], other_loaders.View], str, str, str]] = [
        ("lightly, Pillow", lightly_pillow, _ALL, "antialias", "lightly.transforms.dino_transform"),
        ("torchvision, Pillow", partial(torchvision_pillow, True), _ALL, "bicubic", "torchvision.transforms.v2"),
        ("torchvision, tensors", partial(torchvision_tensors, True), _ALL, "bicubic", "torchvision.transforms.v2"),
        ("torchvision, Pillow, crops", partial(torchvision_pillow, False), _CROPS, "bicubic", "torchvision.transforms.v2"),
        ("torchvision, tensors, crops", partial(torchvision_tensors, False), _CROPS, "bicubic", "torchvision.transforms.v2"),
    ]  # fmt: skip

    def read(make: Callable[[int], other_loaders.View]) -> Iterator[int]:
        yield from other_loaders.read_files(files, make(config.image_size), config.image_size, config.batch, cores)

    for name, make, what, method, module in made:
        yield Contestant(name, ("float32", what, method), cores, partial(read, make), module)


def lightly_pillow(side: int) -> other_loaders.View:
    """lightly's DINOTransform with DINO's values. Its crops are bilinear, by Pillow, which antialiases."""
    from lightly.transforms.dino_transform import DINOTransform

    transform = DINOTransform(side, _LARGE_AREA, small_side(side), _SMALL_AREA, n_local_views=SMALL, gaussian_blur=_BLUR)  # fmt: skip
    return lambda data, _: transform(Image.open(io.BytesIO(data)).convert("RGB"))


def torchvision_pillow(distorted: bool, side: int) -> other_loaders.View:
    """torchvision's transforms of Pillow images with Pillow's blur, as facebookresearch/dino composes them."""
    from torchvision.transforms import v2

    class Blur(torch.nn.Module):
        def forward(self, image: Image.Image) -> Image.Image:
            return image.filter(ImageFilter.GaussianBlur(float(np.random.uniform(0.1, 2.0))))

    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    views = _torchvision(distorted, side, Blur(), last)
    return lambda data, _: views(Image.open(io.BytesIO(data)).convert("RGB"))


def torchvision_tensors(distorted: bool, side: int) -> other_loaders.View:
    """torchvision's transforms of uint8 tensors that simplejpeg decoded. Its blur's kernel has 9 pixels, fewer than Pillow's."""
    from torchvision.transforms import v2

    views = _torchvision(distorted, side, v2.GaussianBlur(9, (0.1, 2.0)), [v2.ToDtype(torch.float32, scale=True)])
    return lambda data, _: views(torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1))


def _torchvision(distorted: bool, side: int, blur: torch.nn.Module, last: list[Any]) -> Callable[[Any], list[Any]]:
    """A function of an image that makes all views, normalised."""
    from torchvision.transforms import v2

    def of_group(size: int, area: tuple[float, float], blurred: float, solarised: float) -> Any:
        crop = v2.RandomResizedCrop(size, area, interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
        jitter = v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)
        distort = [jitter, v2.RandomGrayscale(0.2), v2.RandomApply([blur], p=blurred), v2.RandomSolarize(128, p=solarised)]  # fmt: skip
        normalise = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        return v2.Compose([crop, v2.RandomHorizontalFlip(), *(distort if distorted else ()), *last, normalise])

    of = [
        of_group(size, area, *probabilities)
        for size, area, *probabilities in zip(
            (side, side, small_side(side)), (_LARGE_AREA, _LARGE_AREA, _SMALL_AREA), _BLUR, _SOLARISE, strict=True
        )
    ]
    return lambda image: [transform(image) for transform in (of[0], of[1], *[of[2]] * SMALL)]


if __name__ == "__main__":
    of_jpegs.main(__doc__, "views", run)
