"""How long the search for copies takes on this machine, on noise with the spectrum of photographs: the numbers in docs/dedup.md.

    python tests/measure/measure_search.py 1000000 100000       # numbers of images and test images

Of 1,000 images that are planted copies, it also counts how many are found.
"""

import resource
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_tools.dedup.near_copies import SIDE, ImageIndex
from data_tools.dedup.verify_pair import distance
from pipeline.base.words import counted
from pipeline.settings.commands.data import DedupConfig

PLANTED = 1000


def measure(num_images: int, num_tests: int, max_distance: float) -> None:
    """Print how long a search of noise with the spectrum of photographs takes, and how many planted copies it finds."""
    rng = np.random.default_rng(0)
    start = time.monotonic()
    pictures = np.concatenate([noise(rng, min(4096, num_tests - i)) for i in range(0, num_tests, 4096)])
    made = time.monotonic()
    tests = ImageIndex(pictures)
    print(
        f"{counted(num_tests, 'test image')}: made in {made - start:.0f} s, indexed in {time.monotonic() - made:.0f} s",
        flush=True,
    )
    seconds, cpu_seconds, verified, found, others, done = 0.0, 0.0, 0, 0, 0, 0
    planted = max(4096 * PLANTED // num_images, 1)
    while done < num_images:
        thumbs = noise(rng, min(4096, num_images - done))
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


def noise(rng: np.random.Generator, num: int) -> np.ndarray:
    """Returns (num, SIDE, SIDE) uint8 noise whose amplitude falls with frequency."""
    down, across = np.meshgrid(np.fft.fftfreq(SIDE), np.fft.rfftfreq(SIDE), indexing="ij")
    amplitude = 1 / np.maximum(np.hypot(down, across), 0.5 / SIDE)
    spectrum = np.fft.rfft2(rng.normal(size=(num, SIDE, SIDE)).astype(np.float32)) * amplitude
    pictures = np.fft.irfft2(spectrum, s=(SIDE, SIDE))
    return (pictures / pictures.std((1, 2), keepdims=True) * 50 + 128).clip(0, 255).astype(np.uint8)


if __name__ == "__main__":
    measure(int(sys.argv[1]), int(sys.argv[2]), DedupConfig(data="", against=[]).max_distance)
