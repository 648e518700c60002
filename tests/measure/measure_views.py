"""What keeping decoded images saves: `python tests/measure/measure_views.py`. CPU time of a training view, medians."""

import sys
import time
from pathlib import Path

import cv2
import numpy as np
import simplejpeg

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.data.loading.views import remembering_train_view, train_view
from pipeline.settings.run import AugmentConfig

_IMAGES, _EPOCHS = 60, 5


def blots(height: int, width: int, seed: int) -> np.ndarray:
    """(height, width, 3) uint8, of which a JPEG has about as many bytes as of a photograph."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 12, width // 12, 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


def cpu_seconds(view, data: bytes, out: np.ndarray, epoch: int, row: int) -> float:  # type: ignore[no-untyped-def]
    begin = time.process_time()
    view.write(data, [out], epoch, row)
    return time.process_time() - begin


if __name__ == "__main__":
    pixels = np.random.default_rng(0).integers(0, 256, (_IMAGES, 32, 32, 3), np.uint8)
    files = {
        "300x400 JPEG": [simplejpeg.encode_jpeg(blots(300, 400, row), quality=90) for row in range(_IMAGES)],
        "32x32 PNG": [cv2.imencode(".png", image)[1].tobytes() for image in pixels],
    }
    for name, images in files.items():
        for crop, size in (("resize_crop", 384), ("none", 224)):
            augment = AugmentConfig(crop=crop, flip=crop != "none", resize_filter="bilinear")
            out = np.empty((size, size, 3), np.uint8)
            decoded, kept = train_view(augment, 0, size), remembering_train_view(augment, 0, size, {})
            first = [cpu_seconds(kept, data, out, 0, row) for row, data in enumerate(images)]
            of_view: dict[str, list[float]] = {"decoded each time": [], "kept": []}
            for epoch in range(1, _EPOCHS):
                for row, data in enumerate(images):
                    of_view["decoded each time"].append(cpu_seconds(decoded, data, out, epoch, row))
                    of_view["kept"].append(cpu_seconds(kept, data, out, epoch, row))
            said = ", ".join(f"{what} {1e3 * np.median(seconds):.2f} ms" for what, seconds in of_view.items())
            print(f"{name} to {size} px, {crop}: {said}, the first time {1e3 * np.median(first):.2f} ms", flush=True)
