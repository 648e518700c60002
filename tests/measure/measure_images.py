"""Speed of the loader, of decoding alone, and of tifffile in torch's DataLoader, alternately, on TIFFs of 16 bits
(zstd, horizontal predictor).

    python tests/measure/measure_images.py field.tif --side 256 --images 2000 --rounds 5

Images are squares of real fields, (H, W) or (H, W, C). With one view of 224 px of each image, then with two of 224 px
and six of 96 px. All crop as RandomResizedCrop, resize by OpenCV (linear) and flip. Small batches, because the first
ones take memory that later ones use again. On a busy machine, compare images per CPU second.
"""

import argparse
import io
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import tifffile
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from measure_loading import Contestant, crop, decode_alone, load_batches, print_table, race

from data_tools.sharding import shard
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.views import Views, train_views
from pipeline.settings.commands.data import ShardConfig
from pipeline.settings.run import AugmentConfig

_LARGE, _SMALL, _BATCH = 224, 96, 16
# (views, pixels of a side, area_min, area_max) of each group
_ONE, _MULTI = [(1, _LARGE, 0.05, 1.0)], [(2, _LARGE, 0.4, 1.0), (6, _SMALL, 0.05, 0.4)]


def run(config: argparse.Namespace, folder: Path) -> None:
    files = write_tiles([tifffile.imread(path) for path in config.fields], config.side, config.images, folder / "raw")
    shard.run(ShardConfig(source=str(folder / "raw"), out=str(folder / "set"), inspect="header", samples_per_shard=256))
    split = open_dataset(folder / "set").split("train")
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    contestants = []
    for name, groups in (("one view", _ONE), ("2 + 6 views", _MULTI)):
        views = [
            Views(n, side, AugmentConfig(crop="random_resized", area_min=least, area_max=most))
            for n, side, least, most in groups
        ]
        writer = train_views(views, 0, pixels=split.pixels)
        each = [group for group in groups for _ in range(group[0])]
        for what, work in (
            ("decode, crop and resize alone", partial(decode_alone, split, writer, _BATCH, cores)),
            ("our loader", partial(load_batches, split, writer, _BATCH, cores)),
            ("tifffile + DataLoader", partial(read_tiffs, files, each, _BATCH, cores)),
        ):
            contestants.append(Contestant(f"{what}, {name}", work, cores))
    print_table(race(contestants, config.rounds))


def write_tiles(fields: Sequence[np.ndarray], side: int, images: int, folder: Path) -> list[tuple[Path, int]]:
    """Write random squares; returns (path, class) of each."""
    chosen, written = random.Random(0), []
    for number in range(images):
        field = fields[number % len(fields)]
        top, left = (chosen.randint(0, extent - side) for extent in field.shape[:2])
        path = folder / f"class{number % 10}" / f"{number:06d}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        tile = np.ascontiguousarray(field[top : top + side, left : left + side])
        tifffile.imwrite(
            path,
            tile,
            photometric="minisblack",
            planarconfig="contig" if tile.ndim == 3 else None,
            compression="zstd",
            predictor=2,
        )
        written.append((path, number % 10))
    return written


def tiff_views(views: Sequence[tuple[int, int, float, float]], data: bytes) -> list[np.ndarray]:
    """What a user's own data set does for an image: uint16 (S, S, C) of each view."""
    image, made = tifffile.imread(io.BytesIO(data)), []
    for _, side, least, most in views:
        top, left, height, width = crop(*image.shape[:2], least, most)
        view = cv2.resize(image[top : top + height, left : left + width], (side, side), interpolation=cv2.INTER_LINEAR)
        made.append(np.ascontiguousarray(cv2.flip(view, 1)) if random.random() < 0.5 else view)
    return made


def read_tiffs(
    files: Sequence[tuple[Path, int]], views: Sequence[tuple[int, int, float, float]], batch: int, workers: int
) -> Iterator[int]:
    """Yields the number of images of each batch of torch's DataLoader."""
    made = partial(collate, views)
    for found in torch.utils.data.DataLoader(files, batch, shuffle=True, num_workers=workers, collate_fn=made):
        yield len(found[0])


def collate(views: Sequence[tuple[int, int, float, float]], part: Sequence[tuple[Path, int]]) -> list[torch.Tensor]:
    of_images = [tiff_views(views, path.read_bytes()) for path, _ in part]
    return [torch.from_numpy(np.stack(arrays)) for arrays in zip(*of_images, strict=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fields", nargs="+", help="TIFFs of 16 bits, at least as large as a tile")
    parser.add_argument("--side", type=int, default=256, help="pixels of a side of an image")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    with tempfile.TemporaryDirectory() as scratch:
        run(parser.parse_args(), Path(scratch))
