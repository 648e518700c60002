"""What augment.scaled_decoding saves and changes: `python tests/measure/measure_scaled_decoding.py imagenet_samples.tar`.

For the photographs of a tar, and for 12-megapixel ones made of 8 x 8 of these: processor time of a training view, and its PSNR against the
same view with the antialias filter and without scaled decoding; medians.
"""

import random
import sys
import time
from pathlib import Path

import numpy as np
import simplejpeg
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import of_jpegs

from pipeline.data.loading.decode import decode
from pipeline.data.loading.views import train_view
from pipeline.settings.run import AugmentConfig

_SMALL, _LARGE, _ROUNDS = 200, 20, 3


def mosaics(files: list[bytes]) -> list[bytes]:
    """JPEGs of 3000 x 4000 px, 4:2:0, quality 85."""
    draw = random.Random(0)
    tiles = [pixels[:375, :500] for pixels in map(decode, files) if pixels.shape[0] >= 375 and pixels.shape[1] >= 500]

    def row() -> np.ndarray:
        return np.concatenate([draw.choice(tiles) for _ in range(8)], axis=1)

    images = (np.concatenate([row() for _ in range(8)]) for _ in range(_LARGE))
    return [simplejpeg.encode_jpeg(image, quality=85, colorsubsampling="420") for image in images]


def decibels(a: np.ndarray, b: np.ndarray) -> float:
    error = np.square(a.astype(np.float64) - b).mean()
    return float(10 * np.log10(255**2 / error)) if error else np.inf


if __name__ == "__main__":
    torch.set_num_threads(1)
    photographs = of_jpegs.read_raw(Path(sys.argv[1]), 500)
    for name, files in (("as they are", photographs[:_SMALL]), ("12 megapixels", mosaics(photographs))):
        for side in (224, 96, 48):
            cases = {
                (method, scaled): train_view(AugmentConfig(resize_filter=method, scaled_decoding=scaled), 0, side)
                for method in ("antialias", "linear", "bicubic")
                for scaled in (False, True)
            }
            seconds: dict[tuple[str, bool], list[float]] = {case: [] for case in cases}
            views = {case: np.empty((len(files), side, side, 3), np.uint8) for case in cases}
            for _ in range(_ROUNDS):
                for case, writer in cases.items():
                    begin = time.process_time()
                    for sample, data in enumerate(files):
                        writer.write(data, [views[case][sample]], 0, sample)
                    seconds[case].append((time.process_time() - begin) / len(files))
            for (method, scaled), found in views.items():
                quality = np.median([decibels(*pair) for pair in zip(found, views["antialias", False], strict=True)])
                used = 1e3 * float(np.median(seconds[method, scaled]))
                print(f"{name}, {side} px, {method}{', scaled' * scaled}: {used:.2f} ms, {quality:.1f} dB", flush=True)
