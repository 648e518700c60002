"""Command: recall of dedup on your own images, to choose max_distance; and speed of the search on this machine.

    python -m data_tools.dedup.evaluate recall datasets/photos val       # copies of up to 2,000 images of a split
    python -m data_tools.dedup.evaluate speed 1000000 100000             # numbers of images and test images, of noise

Recall is the share of generated copies that are found. To find false positives, run `launch/dedup.py ... dry_run=true` on
data that share no image with the test images, and look at the sheet of pairs; tests/measure/measure_copies.py does so with
patches.
"""

import argparse
import resource
import time
from collections.abc import Callable, Sequence

import cv2
import numpy as np
import simplejpeg
from PIL import Image, ImageEnhance

from data_tools.dedup.near_copies import SIDE, TestImages, is_plain, thumbnail
from data_tools.dedup.verify_pair import distance, reduced
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.decode import decode
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


def _grey(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return cv2.cvtColor(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


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
    "grey": _grey,
    "all of these (JPEG from 40), mirrored or not": _everything,
}


def measure_recall(images: Sequence[np.ndarray], max_distance: float, seed: int = 0) -> dict[str, float]:
    """Returns the share of planted copies that are found, for each of PLANTS. Copies of plain images count as not found.

    images: (H, W, 3) uint8 each.
    """
    thumbs = np.stack([thumbnail(pixels) for pixels in images])
    fine = np.array([not is_plain(pixels, thumb) for pixels, thumb in zip(images, thumbs, strict=True)])
    rows = np.flatnonzero(fine)
    tests = TestImages(thumbs[fine])
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


def measure_speed(num_images: int, num_tests: int, max_distance: float, num_planted: int = 1000) -> None:
    """Print how long a search of noise with the spectrum of photographs takes, and how many planted copies it finds."""
    rng = np.random.default_rng(0)
    start = time.monotonic()
    pictures = np.concatenate([_noise(rng, min(4096, num_tests - i)) for i in range(0, num_tests, 4096)])
    made = time.monotonic()
    tests = TestImages(pictures)
    print(
        f"{counted(num_tests, 'test image')}: made in {made - start:.0f} s, indexed in {time.monotonic() - made:.0f} s",
        flush=True,
    )
    seconds, cpu_seconds, verified, found, others, done = 0.0, 0.0, 0, 0, 0, 0
    planted = max(4096 * num_planted // num_images, 1)
    while done < num_images:
        thumbs = _noise(rng, min(4096, num_images - done))
        of = rng.integers(num_tests, size=min(planted, len(thumbs)))
        thumbs[: len(of)] = (pictures[of] * 0.9 + rng.normal(5, 3, (len(of), SIDE, SIDE))).clip(0, 255)
        start, cpu_start = time.monotonic(), time.process_time()
        likely = tests.find(thumbs)
        seconds, cpu_seconds = seconds + time.monotonic() - start, cpu_seconds + time.process_time() - cpu_start
        near = np.array(
            [
                distance(pictures[test], thumbs[row], crop, mirrored) <= max_distance
                for row, test, crop, mirrored in zip(
                    likely.query, likely.test, likely.crop, likely.mirrored, strict=True
                )
            ],
            bool,
        )
        rows, test = likely.query[near], likely.test[near]
        hits = (rows < len(of)) & (test == of[rows.clip(max=len(of) - 1)])
        verified, found, others = verified + len(near), found + int(hits.sum()), others + int((~hits).sum())
        done += len(thumbs)
        if done // 4096 % 25 == 0 or done == num_images:
            print(
                f"{counted(done, 'image')}: {seconds:.0f} s ({cpu_seconds:.0f} s of CPU), pairs verified {verified:,}, found {found:,} of "
                f"{-(-done // 4096) * planted:,} planted, {others} others; "
                f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB",
                flush=True,
            )


def _noise(rng: np.random.Generator, num: int) -> np.ndarray:
    """Returns (num, SIDE, SIDE) uint8 noise whose amplitude falls with frequency."""
    down, across = np.meshgrid(np.fft.fftfreq(SIDE), np.fft.rfftfreq(SIDE), indexing="ij")
    amplitude = 1 / np.maximum(np.hypot(down, across), 0.5 / SIDE)
    spectrum = np.fft.rfft2(rng.normal(size=(num, SIDE, SIDE)).astype(np.float32)) * amplitude
    pictures = np.fft.irfft2(spectrum, s=(SIDE, SIDE))
    return (pictures / pictures.std((1, 2), keepdims=True) * 50 + 128).clip(0, 255).astype(np.uint8)


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
    commands = parser.add_subparsers(dest="command", required=True)
    recall = commands.add_parser("recall")
    recall.add_argument("data")
    recall.add_argument("split")
    recall.add_argument("--images", type=int, default=2000)
    speed = commands.add_parser("speed")
    speed.add_argument("images", type=int)
    speed.add_argument("tests", type=int)
    arguments = parser.parse_args()
    with mistakes_in_one_line():
        if arguments.command == "speed":
            measure_speed(arguments.images, arguments.tests, arguments.max_distance)
            return
        shares = measure_recall(_load_images(arguments.data, arguments.split, arguments.images), arguments.max_distance)
        for name, share in {**shares, "mean": float(np.mean(list(shares.values())))}.items():
            print(f"{share:8.3f}  {name}")


if __name__ == "__main__":
    main()
