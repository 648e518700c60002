"""Verifies a pair found by the search: aligns the two images and compares their pixels window by window.

Unrelated images with the same layout (a skyline, a horizon, one strong edge) correlate well as a whole. In a copy every
small part agrees, including fine detail. Therefore the test image is aligned to the other one (OpenCV's ECC) and the
covariance of each window is compared; windows are weighted by their detail.
"""

import cv2
import numpy as np

# Images are compared as squares of this side, in pixels.
_SIDE = 64
_MAX_REDUCED = 80
_MIN_REDUCED = 8
_WINDOW = 9
# Variance within a window caused by compression alone, in grey levels squared.
_NOISE = 9.0
_ECC = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, 30, 1e-4)
_ECC_BLUR = 5


def reduced(pixels: np.ndarray) -> np.ndarray:
    """Reduce (H, W, 3) uint8 RGB to the input of `distance`: (h, w) uint8 grey with sides of at most 80 pixels."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    return _at_most(grey, _MAX_REDUCED, _MAX_REDUCED)


def distance(test: np.ndarray, image: np.ndarray, crop: np.ndarray, mirrored: bool) -> float:
    """Distance of two images, both from `reduced`: 0 for equal images, 1 for images with nothing in common.

    crop: (4,) top, bottom, left, right of the part of the test image that the image probably shows, within [0, 1].
    1 - sum of the windows' covariances / sum of the means of their two variances, each window weighted by 1 / (variance
    + noise). Returns the smaller of the distances with the given crop and after alignment.
    """
    top, bottom, left, right = (float(edge) for edge in crop)
    height = min(_SIDE, len(image), max(round(len(test) * (bottom - top)), _MIN_REDUCED))
    width = min(_SIDE, image.shape[1], max(round(test.shape[1] * (right - left)), _MIN_REDUCED))
    image = image[:, ::-1] if mirrored else image
    # Reduce both to the lower resolution, then enlarge both, so that sharpness makes no difference.
    there = _enlarged(_at_most(np.ascontiguousarray(image), height, width), _SIDE, _SIDE)
    test = _at_most(test, round(height / (bottom - top)), round(width / (right - left)))
    test = _enlarged(test, round(_SIDE / (bottom - top)), round(_SIDE / (right - left)))
    rows, columns = test.shape
    given = np.array(
        [[(right - left) * columns / _SIDE, 0, left * columns], [0, (bottom - top) * rows / _SIDE, top * rows]]
    )
    found = _disagreement(_moved(test, given), there)
    try:
        _, aligned = cv2.findTransformECC(
            there, test, given.astype(np.float32), cv2.MOTION_AFFINE, _ECC, None, _ECC_BLUR
        )
    except cv2.error:  # No convergence, or alignment outside the image: the images are unrelated.
        return found
    return min(found, _disagreement(_moved(test, aligned), there))


def _at_most(grey: np.ndarray, height: int, width: int) -> np.ndarray:
    size = min(grey.shape[1], width), min(grey.shape[0], height)
    return cv2.resize(grey, size, interpolation=cv2.INTER_AREA)


def _enlarged(grey: np.ndarray, height: int, width: int) -> np.ndarray:
    return cv2.resize(grey, (width, height), interpolation=cv2.INTER_LINEAR).astype(np.float32)


def _moved(test: np.ndarray, transform: np.ndarray) -> np.ndarray:
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(test, transform, (_SIDE, _SIDE), flags=flags, borderMode=cv2.BORDER_REPLICATE)


def _disagreement(one: np.ndarray, other: np.ndarray) -> float:
    # Normalise both to the lower contrast, so that noise is not amplified.
    deviations = one.std(), other.std()
    one, other = (
        (grey - grey.mean()) * (min(deviations) / max(deviation, 1e-3))
        for grey, deviation in zip((one, other), deviations, strict=True)
    )
    variance = (_covariances(one, one) + _covariances(other, other)) / 2
    shown = variance / (variance + _NOISE)
    agreed = _covariances(one, other) / (variance + _NOISE)
    return float(1 - agreed.sum() / max(shown.sum(), 1e-6))


def _covariances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Covariance within each window."""
    window = (_WINDOW, _WINDOW)
    return cv2.blur(one * other, window) - cv2.blur(one, window) * cv2.blur(other, window)
