"""Recall, false positives and time of the search for near copies: the numbers in docs/dedup.md.

    python tests/measure/measure_dedup.py recall datasets/photos val
    python tests/measure/measure_dedup.py false photos.tar datasets/cifar10 360000
    python tests/measure/measure_dedup.py time 1000000 100000

Recall, by which max_distance is chosen, is the share of planted copies of up to 2,000 images of a split that are found.
`time` is of so many images and test images of noise. In `false`, random patches of every second photograph of a tar (no
two alike), 32 pixels to the whole, are compared with patches of the others and with the test images of a data set.
"""

import resource
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image, ImageEnhance

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_tools.dedup.near_copies import SIDE, ImageIndex, is_plain, thumbnail
from data_tools.dedup.verify_pair import distance, reduced
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.decode import decode
from pipeline.data.loading.randaugment import grey
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.settings.command import mistakes_in_one_line
from pipeline.settings.commands.data import DedupConfig

Plant = Callable[[np.ndarray, np.random.Generator], np.ndarray]
DEFAULT = DedupConfig(data="", against=[]).max_distance
BATCH = 4096


# ---------------------------------------------------------------------- recall
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


class Indexed:
    """Images that are not plain. rows: their places in `images`; thumbs: (n, SIDE, SIDE)."""

    def __init__(self, images: Sequence[np.ndarray]) -> None:
        thumbs = np.stack([thumbnail(pixels) for pixels in images])
        self.rows = np.flatnonzero([not is_plain(*pair) for pair in zip(images, thumbs, strict=True)])
        self.images, self.thumbs = images, thumbs[self.rows]

    def distances(self, index: ImageIndex, tests: "Indexed") -> Iterator[tuple[int, int, float]]:
        """(row, row of the test, distance) of each likely pair. index: of the tests' thumbnails."""
        for first in range(0, len(self.rows), BATCH):
            likely = index.find(self.thumbs[first : first + BATCH])
            for i in range(len(likely.query)):
                row, test = int(self.rows[first + likely.query[i]]), int(tests.rows[likely.test[i]])
                pair = reduced(tests.images[test]), reduced(self.images[row])
                yield row, test, distance(*pair, likely.crop[i], bool(likely.mirrored[i]))


def measure_recall(images: Sequence[np.ndarray], max_distance: float, seed: int = 0) -> dict[str, float]:
    """Returns the share of planted copies that are found, for each of PLANTS. Copies of plain images count as not
    found.

    images: (H, W, 3) uint8 each.
    """
    tests = Indexed(images)
    index, recall = ImageIndex(tests.thumbs), {}
    for number, (name, plant) in enumerate(PLANTS.items()):
        copies = [plant(pixels, np.random.default_rng([seed, number, i])) for i, pixels in enumerate(images)]
        found = Indexed(copies).distances(index, tests)
        recall[name] = sum(row == test and far <= max_distance for row, test, far in found) / len(images)
    return recall


def load_images(path: str, split: str, most: int) -> list[np.ndarray]:
    samples = open_dataset(path).split(split)
    reader = ShardReader(samples)
    rows = np.unique(np.linspace(0, len(samples) - 1, most).astype(np.int64))
    return [decode(reader.read(row)) for row in rows.tolist()]


# ---------------------------------------------------------------------- false positives
def patches(photos: Sequence[np.ndarray], num: int, seed: int) -> list[np.ndarray]:
    rng, found = np.random.default_rng(seed), []
    for number in range(num):
        whole = photos[number % len(photos)]
        height, width = whole.shape[:2]
        side, aspect = 2 ** rng.uniform(5, np.log2(min(height, width))), 2 ** rng.uniform(-0.4, 0.4)
        h, w = min(max(round(side * aspect), 24), height), min(max(round(side / aspect), 24), width)
        y, x = rng.integers(height - h + 1), rng.integers(width - w + 1)
        found.append(np.ascontiguousarray(whole[y : y + h, x : x + w]))
    return found


def measure_false(tar_file: str, data: str, num: int) -> None:
    with tarfile.open(tar_file) as tar:
        members = sorted((member for member in tar if member.isfile()), key=lambda member: member.name)
        photos = [decode(tar.extractfile(member).read()) for member in members]  # type: ignore[union-attr]
    queries = Indexed(patches(photos[::2], num, 1))
    for name, images in (("patches", patches(photos[1::2], num // 15, 2)), (data, load_images(data, "test", 10_000))):
        tests = Indexed(images)
        far = sorted(found[2] for found in queries.distances(ImageIndex(tests.thumbs), tests))
        print(
            f"{len(queries.rows):,} patches against {len(tests.rows):,} of {name}: {sum(d <= DEFAULT for d in far)}"
            f" false; nearest {np.round(far[:5], 3)}",
            flush=True,
        )


# ---------------------------------------------------------------------- time
def measure_time(num_images: int, num_tests: int) -> None:
    """Search in noise with the spectrum of photographs; 1,000 images are planted copies."""
    rng = np.random.default_rng(0)
    pictures = np.concatenate([noise(rng, min(BATCH, num_tests - i)) for i in range(0, num_tests, BATCH)])
    folder, begin = Path(tempfile.mkdtemp()), time.process_time()
    ImageIndex.write(pictures, np.arange(num_tests), folder)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"index: {time.process_time() - begin:.0f} s of CPU, {size:.2f} GB, peak memory {peak:.1f} GB", flush=True)
    tests, seconds, found, planted = ImageIndex.mapped(pictures, folder), 0.0, 0, 0
    for first in range(0, num_images, BATCH):
        thumbs = noise(rng, min(BATCH, num_images - first))
        of = rng.integers(num_tests, size=min(max(BATCH * 1000 // num_images, 1), len(thumbs)))
        thumbs[: len(of)] = (pictures[of] * 0.9 + rng.normal(5, 3, (len(of), SIDE, SIDE))).clip(0, 255)
        begin = time.process_time()
        likely = tests.find(thumbs)
        seconds += time.process_time() - begin
        pairs = zip(likely.query, likely.test, likely.crop, likely.mirrored, strict=True)
        found += sum(distance(pictures[test], thumbs[row], *how) <= DEFAULT for row, test, *how in pairs)
        planted += len(of)
    shutil.rmtree(folder)
    print(
        f"{num_images:,} images against {num_tests:,}: {seconds:.0f} s of CPU, {found:,} pairs found, {planted:,}"
        " planted"
    )


def noise(rng: np.random.Generator, num: int) -> np.ndarray:
    """Returns (num, SIDE, SIDE) uint8 noise whose amplitude falls with frequency."""
    down, across = np.meshgrid(np.fft.fftfreq(SIDE), np.fft.rfftfreq(SIDE), indexing="ij")
    amplitude = 1 / np.maximum(np.hypot(down, across), 0.5 / SIDE)
    spectrum = np.fft.rfft2(rng.normal(size=(num, SIDE, SIDE)).astype(np.float32)) * amplitude
    pictures = np.fft.irfft2(spectrum, s=(SIDE, SIDE))
    return (pictures / pictures.std((1, 2), keepdims=True) * 50 + 128).clip(0, 255).astype(np.uint8)


def main(subject: str, first: str, second: str, images: str = "2000") -> None:
    with mistakes_in_one_line():
        if subject == "recall":
            shares = measure_recall(load_images(first, second, int(images)), DEFAULT)
            for name, share in {**shares, "mean": float(np.mean(list(shares.values())))}.items():
                print(f"{share:8.3f}  {name}")
        elif subject == "false":
            measure_false(first, second, int(images))
        else:
            measure_time(int(first), int(second))


if __name__ == "__main__":
    main(*sys.argv[1:])
