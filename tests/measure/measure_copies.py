"""How many copies are found, and how many strangers are taken for copies, on images at hand: the numbers in docs/dedup.md.

    python tests/measure/measure_copies.py photos.tar datasets/cifar10 even OUT     # to choose the threshold on
    python tests/measure/measure_copies.py photos.tar datasets/cifar10 odd OUT      # to judge it on

photos.tar has photographs, no two alike; every second one is taken. datasets/cifar10 has splits train and test (other data
will do); its first 10,000 training images (even) or its test images (odd) are searched for.

Recall is measured on planted copies. Strangers are random patches of the photographs, 32 pixels to the whole, compared with
patches of the other photographs and with CIFAR-10; CIFAR-10 is compared with patches. No such pair can be a copy. Pairs within
CIFAR-10 may be: they are drawn on a sheet for people to judge.
"""

import argparse
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from measure_recall import measure_recall

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_tools.dedup.near_copies import SIDE, ImageIndex, is_plain, thumbnail
from data_tools.dedup.pair_sheet import captioned, draw_pairs
from data_tools.dedup.verify_pair import distance, reduced
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.decode import decode
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.settings.commands.data import DedupConfig

THRESHOLDS = (0.05, 0.1, 0.12, 0.14, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4)
BATCH = 4096
PAIRS_OF_SHEET = 120


class Images:
    """Images that are cut or read when they are needed, and the thumbnails of those that are not plain.

    source: (n,) which photograph each is of, or -1: images of the same photograph are not compared.
    """

    def __init__(self, read: Callable[[int], np.ndarray], source: np.ndarray, name: str) -> None:
        thumbs, fine = np.zeros((len(source), SIDE, SIDE), np.uint8), np.zeros(len(source), bool)
        for i in range(len(source)):
            pixels = read(i)
            thumbs[i] = thumbnail(pixels)
            fine[i] = not is_plain(pixels, thumbs[i])
        self.rows = np.flatnonzero(fine)
        self.thumbs, self.source, self.read, self.name = thumbs[fine], source[fine], read, name
        print(f"{name}: {len(source):,} images, {len(source) - len(self.rows):,} of them plain", flush=True)

    def pixels(self, number: int) -> np.ndarray:
        """Of one that is not plain."""
        return self.read(int(self.rows[number]))


def photographs(path: str, first: int) -> list[np.ndarray]:
    with tarfile.open(path) as tar:
        members = sorted((m for m in tar.getmembers() if m.isfile()), key=lambda member: member.name)[first::2]
        return [decode(tar.extractfile(member).read()) for member in members]


def patches(photos: list[np.ndarray], num: int, seed: int, name: str) -> Images:
    rng = np.random.default_rng(seed)
    where = np.zeros((num, 4), np.int64)
    source = np.arange(num) % len(photos)
    for i in range(num):
        height, width = photos[source[i]].shape[:2]
        side, aspect = 2 ** rng.uniform(5, np.log2(min(height, width))), 2 ** rng.uniform(-0.4, 0.4)
        h, w = min(max(round(side * aspect), 24), height), min(max(round(side / aspect), 24), width)
        y, x = rng.integers(height - h + 1), rng.integers(width - w + 1)
        where[i] = y, y + h, x, x + w

    def read(i: int) -> np.ndarray:
        top, bottom, left, right = where[i]
        return np.ascontiguousarray(photos[source[i]][top:bottom, left:right])

    return Images(read, source, name)


def cifar(path: str, split: str, first: int, last: int | None, name: str) -> Images:
    samples = open_dataset(Path(path)).split(split, exclude="none")
    reader = ShardReader(samples)
    num = (len(samples) if last is None else last) - first
    return Images(lambda i: decode(reader.read(first + i)), np.full(num, -1), name)


def compare(queries: Images, tests: Images, by_eye: bool, out: Path) -> None:
    """Print how many of the queries have a test image at most so far away; draw the nearest pairs."""
    start = time.process_time()
    index = ImageIndex(tests.thumbs)
    built = time.process_time()
    found, num_verified, verifying = [], 0, 0.0
    for first in range(0, len(queries.rows), BATCH):
        likely = index.find(queries.thumbs[first : first + BATCH])
        query = likely.query + first
        others = (queries.source[query] < 0) | (queries.source[query] != tests.source[likely.test])
        began = time.process_time()
        for i in np.flatnonzero(others).tolist():
            q, t = int(query[i]), int(likely.test[i])
            images = reduced(tests.pixels(t)), reduced(queries.pixels(q))
            found.append((distance(*images, likely.crop[i], bool(likely.mirrored[i])), q, t))
        num_verified, verifying = num_verified + int(others.sum()), verifying + time.process_time() - began
    found.sort()
    nearest = {q: d for d, q, _ in reversed(found)}
    counts = ", ".join(f"<{limit}: {sum(d <= limit for d in nearest.values())}" for limit in THRESHOLDS)
    print(
        f"{queries.name} against {tests.name}: {len(queries.rows):,} x {len(tests.rows):,}, {num_verified:,} pairs verified "
        f"({1e3 * verifying / max(num_verified, 1):.1f} ms of CPU each), search {time.process_time() - built - verifying:.0f} s, index "
        f"{built - start:.0f} s of CPU\n  {'to be judged by eye' if by_eye else 'false'}: {counts}; nearest "
        f"{[round(d, 3) for d, _, _ in found[:5]]}",
        flush=True,
    )
    default = DedupConfig(data="", against=[]).max_distance
    shown = [pair for pair in found if pair[0] <= 1.25 * default] if by_eye else found[:PAIRS_OF_SHEET]
    for first in range(0, len(shown), PAIRS_OF_SHEET):
        pairs = [
            (
                captioned(tests.pixels(t), f"test {tests.rows[t]}"),
                captioned(queries.pixels(q), f"{d:.3f}  {queries.rows[q]}"),
            )
            for d, q, t in shown[first : first + PAIRS_OF_SHEET]
        ]
        name = f"{queries.name}-{tests.name}-{first}.png".replace(" ", "_")
        (out / name).write_bytes(draw_pairs(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos")
    parser.add_argument("cifar")
    parser.add_argument("half", choices=["even", "odd"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--patches", type=int, default=360_000)
    parser.add_argument("--test-patches", type=int, default=12_000)
    parser.add_argument("--planted", type=int, default=1000, help="CIFAR-10 images that copies are planted of")
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    is_even = arguments.half == "even"
    photos = photographs(arguments.photos, 0 if is_even else 1)
    tests = cifar(arguments.cifar, *(("train", 0, 10_000) if is_even else ("test", 0, None)), "CIFAR-10 searched for")
    default = DedupConfig(data="", against=[]).max_distance
    planted = [tests.read(i) for i in range(arguments.planted)]
    for name, images in (("photographs", photos), ("CIFAR-10", planted)):
        recall = measure_recall(images, default, seed=1)
        print(f"recall on {len(images):,} {name}, distance at most {default}:")
        for plant, share in {**recall, "mean": float(np.mean(list(recall.values())))}.items():
            print(f"{share:8.3f}  {plant}", flush=True)

    searched = cifar(arguments.cifar, "train", 10_000 if is_even else 0, None, "CIFAR-10 train")
    test_patches = patches(photos, arguments.test_patches, 1, "patches searched for")
    compare(searched, tests, True, arguments.out)
    compare(searched, test_patches, False, arguments.out)
    queries = patches(photos, arguments.patches, 2, "patches")
    compare(queries, tests, False, arguments.out)
    compare(queries, test_patches, False, arguments.out)


if __name__ == "__main__":
    main()
