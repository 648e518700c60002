"""Image sets that need no download: generated shapes to pre-train on, and scikit-learn's handwritten digits.

Both are written as class folders, a layout that `launch/shard.py` reads.
"""

import hashlib
import math
from pathlib import Path

import cv2
import numpy as np

# Shapes are drawn larger and then reduced, for smooth edges.
_OVERSAMPLING = 4
_SIZE = 32  # Side of an image in pixels.
_TEST_SHARE = 0.2


def make_shapes(folder: Path, num_per_class: int, seed: int = 0) -> None:
    """Write `<folder>/<shape>/<number>.png`, num_per_class RGB images of 32 px for each of SHAPES.

    Only the outline depends on the class: colours (light on dark), background, position, size, angle and noise are
    random. An image is a function of (seed, class, number), so a larger num_per_class does not change the first ones.
    """
    for label, (name, contours) in enumerate(SHAPES.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(num_per_class):
            picture = _picture(contours, np.random.default_rng([seed, label, number]))
            _write(folder / name / f"{number:05d}.png", picture)


def make_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 scans of handwritten digits as `<folder>/{train,test}/<digit>/<number>.png`, RGB.

    They are 8x8 with 17 grey levels (UCI ML repository, Optical Recognition of Handwritten Digits), resized to 32 px.
    About a fifth of them, chosen by a hash of their number, go to test/.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (scan, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        is_test = hashlib.sha256(str(number).encode()).digest()[0] < 256 * _TEST_SHARE
        target = folder / ("test" if is_test else "train") / str(label)
        target.mkdir(parents=True, exist_ok=True)
        grey = (scan * (255 / 16)).round().astype(np.uint8)
        large = cv2.resize(grey, (_SIZE, _SIZE), interpolation=cv2.INTER_CUBIC)
        _write(target / f"{number:04d}.png", cv2.cvtColor(large, cv2.COLOR_GRAY2BGR))


def _picture(contours: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """(32, 32, 3) uint8: one shape on a shaded background, with noise."""
    side = _SIZE * _OVERSAMPLING
    back, fore = rng.uniform(0, 110, 3), rng.uniform(150, 255, 3)  # Light on dark, like the digits.
    shade = np.linspace(-1, 1, _SIZE) * rng.uniform(0, 30)
    canvas = back + (shade[:, None] if rng.random() < 0.5 else shade[None, :])[..., None]

    radius = side * rng.uniform(0.28, 0.45)
    middle = rng.uniform(radius, side - radius, 2)
    angle = rng.uniform(0, 2 * math.pi)
    turn = radius * np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    # fillPoly uses the even-odd rule: a contour inside another is a hole.
    turned = [np.rint(points @ turn.T + middle).astype(np.int32) for points in contours]
    mask = np.zeros((side, side), np.uint8)
    cv2.fillPoly(mask, turned, 255)
    cover = cv2.resize(mask, (_SIZE, _SIZE), interpolation=cv2.INTER_AREA)[..., None] / 255

    picture = canvas * (1 - cover) + fore * cover + rng.normal(0, rng.uniform(0, 12), (_SIZE, _SIZE, 3))
    return picture.clip(0, 255).astype(np.uint8)


def _polygon(corners: int, inner: float = 0.0) -> np.ndarray:
    """A regular polygon of radius 1; with `inner`, a star whose inner corners have that radius."""
    num_points = corners * (2 if inner else 1)
    radii = [inner if inner and k % 2 else 1.0 for k in range(num_points)]
    angles = [2 * math.pi * k / num_points for k in range(num_points)]
    return np.array([(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)])


def _cross(arm: float = 0.32) -> np.ndarray:
    quarter = [(1.0, -arm), (1.0, arm), (arm, arm)]
    points = []
    for _ in range(4):
        points += quarter
        quarter = [(-y, x) for x, y in quarter]
    return np.array(points)


def _heart() -> np.ndarray:
    a = np.linspace(0, 2 * math.pi, 60, endpoint=False)
    across = 16 * np.sin(a) ** 3
    down = -13 * np.cos(a) + 5 * np.cos(2 * a) + 2 * np.cos(3 * a) + np.cos(4 * a)
    return np.stack([across, down], 1) * (1 / 17)


_HALF_CIRCLE = [(math.cos(a) - 0.4, math.sin(a)) for a in np.linspace(-math.pi / 2, math.pi / 2, 30)]
# Name -> contours in the unit circle, each (points, 2).
SHAPES: dict[str, list[np.ndarray]] = {
    "bar": [np.array([(-1, -0.25), (1, -0.25), (1, 0.25), (-1, 0.25)])],
    "circle": [_polygon(60)],
    "cross": [_cross()],
    "frame": [_polygon(4), _polygon(4) * 0.6],
    "half_disc": [np.array(_HALF_CIRCLE)],
    "heart": [_heart()],
    "ring": [_polygon(60), _polygon(60) * 0.6],
    "square": [_polygon(4)],
    "star": [_polygon(5, 0.42)],
    "triangle": [_polygon(3)],
}


def _write(path: Path, pixels: np.ndarray) -> None:
    # Not cv2.imwrite, which returns False on a full disk instead of raising.
    ok, data = cv2.imencode(".png", pixels)
    assert ok, path
    path.write_bytes(data.tobytes())
