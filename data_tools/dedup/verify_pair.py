"""The second look at a pair that the search proposes: by pixels, aligned, and everywhere in the picture.

Unrelated pictures that share a layout (an outline before a sky, a horizon) correlate well as a whole: so does whatever has
one strong edge at the same place. In a copy every small part is the same, fine detail included. So the test image is
aligned to the other (OpenCV's ECC) and the two are compared window by window; each window counts by how much it shows.
"""

import cv2
import numpy as np

# Pictures are compared as squares of this side, in pixels; a part of the test image of up to 10 % a side less.
_SIDE = 64
_MAX_REDUCED = 80
_MIN_REDUCED = 8
_WINDOW = 9
# Variance within a window, in grey levels squared, that compression alone makes: windows below it show nothing.
_NOISE = 9.0
_ECC = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, 30, 1e-4)
_ECC_BLUR = 5


def reduced(pixels: np.ndarray) -> np.ndarray:
    """(h, w) uint8 grey of (H, W, 3) uint8 RGB: all that `distance` looks at, sides of at most 80 pixels."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    return _at_most(grey, _MAX_REDUCED, _MAX_REDUCED)


def distance(test: np.ndarray, image: np.ndarray, crop: np.ndarray, mirrored: bool) -> float:
    """How far an image is from a copy of a test image, both as `reduced` has them: 0 is equal, 1 has nothing in common.

    crop: (4,) top, bottom, left, right of the part of the test image that the image is likely to show, within [0, 1].
    The sum over windows of the covariance, over that of the mean of the two variances, each window weighted by variance /
    (variance + noise); the smaller of the values with the crop as given and as aligned.
    """
    top, bottom, left, right = (float(edge) for edge in crop)
    height = min(_SIDE, len(image), max(round(len(test) * (bottom - top)), _MIN_REDUCED))
    width = min(_SIDE, image.shape[1], max(round(test.shape[1] * (right - left)), _MIN_REDUCED))
    image = image[:, ::-1] if mirrored else image
    # Both at the resolution of the coarser one, then both enlarged: sharpness is no difference.
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
    except cv2.error:  # It does not converge, or moves out of the picture: unrelated pictures.
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
    # To the same brightness and contrast, the lower one: noise is not enlarged.
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
    """The covariance of each window."""
    window = (_WINDOW, _WINDOW)
    return cv2.blur(one * other, window) - cv2.blur(one, window) * cv2.blur(other, window)
