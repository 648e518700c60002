"""Recall of dedup on your own images, to choose max_distance.

    python tests/measure/measure_recall.py datasets/photos val       # copies of up to 2,000 images of a split

Recall is the share of generated copies that are found. To find false positives, run `launch/dedup.py ... dry_run=true` on
data that share no image with the test images, and look at the sheet of pairs; measure_copies.py does so with patches.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image, ImageEnhance

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_tools.dedup.near_copies import ImageIndex, is_plain, thumbnail
from data_tools.dedup.verify_pair import distance, reduced
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.decode import decode
from pipeline.data.loading.randaugment import grey
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.settings.command import mistakes_in_one_line
from pipeline.settings.commands.data import DedupConfig

Plant = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def _jpeg(pixels: np.ndarray, rng: np.random.Generator, lowest: int = 25) -> np.ndarray:
    quality = int(rng.integers(lowest, 91))
    return decode(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=quality, colorsubsampling="420"))


def _resize(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    height, width = pixels.shape[:2]
    scale, aspect = 2 ** rng.uniform(-1.5, 1), 2 ** rng.uniform(-0.2, 0.2)
    size = (max(round(width * scale * aspect), 20), max(round(height * scale / aspect), 20))
    kernels = (Image.Resampling.BOX, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)
    return np.asarray(Image.fromarray(pixels).resize(size, kernels[rng.integers(len(kernels))]))


def _crop(pixels: np.ndarray, rng: np.random.Generator, least: float = 0.0) -> np.ndarray:
    height, width = pixels.shape[:2]
    down, across = (round(side * rng.uniform(least, 0.1)) for side in (height, width))
    y, x = rng.integers(down + 1), rng.integers(across + 1)
    return pixels[y : height - down + y, x : width - across + x]


def _brightness(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    image = ImageEnhance.Brightness(Image.fromarray(pixels)).enhance(rng.uniform(0.75, 1.3))
    return np.asarray(ImageEnhance.Contrast(image).enhance(rng.uniform(0.8, 1.25)))


def _colour(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    image = ImageEnhance.Color(Image.fromarray(pixels)).enhance(rng.uniform(0.4, 1.6))
    return (np.asarray(image) * rng.uniform(0.85, 1.15, 3)).clip(0, 255).astype(np.uint8)


def _mirror(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.ascontiguousarray(pixels[:, ::-1])


def _everything(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    pixels = _mirror(pixels, rng) if rng.random() < 0.5 else pixels
    for change in (_crop, _resize, _brightness, _colour):
        pixels = change(pixels, rng)
    return _jpeg(pixels, rng, lowest=40)


PLANTS: dict[str, Plant] = {
    "JPEG, quality 25 to 90": _jpeg,
    "resized, 0.35 to 2 times, aspect to 1.3": _resize,
    "cropped, 0 to 10 % of each side": _crop,
    "cropped, 10 % of both sides": lambda pixels, rng: _crop(pixels, rng, least=0.1),
    "mirrored": _mirror,
    "brightness 0.75 to 1.3, contrast 0.8 to 1.25": _brightness,
    "saturation 0.4 to 1.6, channels 0.85 to 1.15": _colour,
    "grey": lambda pixels, rng: grey(pixels),
    "all of these (JPEG from 40), mirrored or not": _everything,
}


def measure_recall(images: Sequence[np.ndarray], max_distance: float, seed: int = 0) -> dict[str, float]:
    """Returns the share of planted copies that are found, for each of PLANTS. Copies of plain images count as not found.

    images: (H, W, 3) uint8 each.
    """
    thumbs = np.stack([thumbnail(pixels) for pixels in images])
    fine = np.array([not is_plain(pixels, thumb) for pixels, thumb in zip(images, thumbs, strict=True)])
    rows = np.flatnonzero(fine)
    tests = ImageIndex(thumbs[fine])
    recall = {}
    for number, (name, plant) in enumerate(PLANTS.items()):
        copies = [plant(pixels, np.random.default_rng([seed, number, i])) for i, pixels in enumerate(images)]
        own = np.stack([thumbnail(pixels) for pixels in copies])
        usable = np.flatnonzero([not is_plain(pixels, thumb) for pixels, thumb in zip(copies, own, strict=True)])
        likely = tests.find(own[usable])
        copy_of = usable[likely.query]
        planted = np.flatnonzero(copy_of == rows[likely.test])
        distances = [
            distance(reduced(images[copy_of[i]]), reduced(copies[copy_of[i]]), likely.crop[i], likely.mirrored[i])
            for i in planted
        ]
        recall[name] = sum(found <= max_distance for found in distances) / len(images)
    return recall


def _load_images(path: str, split: str, max_images: int) -> list[np.ndarray]:
    samples = open_dataset(path).split(split)
    reader = ShardReader(samples)
    rows = np.unique(np.linspace(0, len(samples) - 1, max_images).astype(np.int64))
    images = [decode(reader.read(row)) for row in rows.tolist()]
    reader.close()
    return images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = DedupConfig(data="", against=[]).max_distance
    parser.add_argument("--max-distance", type=float, default=default)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("data")
    parser.add_argument("split")
    arguments = parser.parse_args()
    with mistakes_in_one_line():
        shares = measure_recall(_load_images(arguments.data, arguments.split, arguments.images), arguments.max_distance)
        for name, share in {**shares, "mean": float(np.mean(list(shares.values())))}.items():
            print(f"{share:8.3f}  {name}")


if __name__ == "__main__":
    main()
