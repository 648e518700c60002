"""Stateless random numbers: a pure function of integers, the same on every machine and library version.

`bits(seed, purpose, epoch, sample, draw)` hashes its integers with SplitMix64's finalizer (Steele et al. 2014). The
order of samples and every augmentation can therefore be computed for any position, in any process, without replaying
earlier draws. All functions take the seed first and a `Purpose` second: mypy finds the two exchanged.
"""

from collections.abc import Callable
from enum import IntEnum, unique
from functools import cache
from hashlib import blake2b

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_64_BITS = 2**64 - 1
# Shift and factor of each.
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))

Integer = int | np.integer | np.ndarray


@unique
class Purpose(IntEnum):
    """The use of a random number. It is one of the hashed integers, so that no two uses share their numbers.

    The values determine every order, augmentation and mask of a seed: never change or reuse one. A new use is
    `Purpose.named("...")`.
    """

    SHARD_ORDER = 1
    WINDOW_ORDER = 2
    CROP_AND_FLIP = 3
    DROPOUT = 5
    COLOR_JITTER = 11
    RANDAUGMENT = 12
    ERASING = 13
    MIX_CHOICE = 14
    MIXUP = 15
    CUTMIX = 16
    CUTMIX_CENTER = 17
    SUBSET = 18
    MASKED_PATCHES = 19
    MASK_KIND = 20
    MASK_REPLACEMENT = 21
    DEV_SPLIT = 28
    NEIGHBOUR_IMAGES = 29
    EXPLAINED_IMAGES = 30
    SHEET_SAMPLES = 31
    STUDY_BOOTSTRAP = 32
    VIEW = 33

    @classmethod
    @cache
    def named(cls, name: str) -> "Purpose":
        """The use of this name, which is a hash of 56 bits: it needs no line here, and is as permanent as the
        numbers.
        """
        purpose = int.__new__(cls, int.from_bytes(blake2b(name.encode(), digest_size=7).digest()))
        purpose._name_, purpose._value_ = name, int(purpose)
        return purpose


def bits(seed: Integer, purpose: Purpose, *parts: Integer) -> np.ndarray:
    """64 random bits per element of the broadcast parts: uint64 of their broadcast shape."""
    return splitmix(seed, purpose, *parts)


def splitmix(*parts: Integer) -> np.ndarray:
    """The hash of integers: uint64 of the broadcast shape of the parts. `splitmix(x)` is SplitMix64's first number of
    seed x.
    """
    state: np.ndarray = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = np.asarray(part).astype(np.uint64) + (state + _GOLDEN)
            for shift, factor in _ROUNDS:
                state = (state ^ (state >> shift)) * factor
    return state


def torch_seed(seed: Integer, purpose: Purpose, *parts: Integer) -> int:
    """A seed of 63 bits, as `torch.manual_seed` takes it."""
    return int(bits(seed, purpose, *parts) >> 1)


def uniform(seed: Integer, purpose: Purpose, *parts: Integer) -> np.ndarray:
    """float64 in [0, 1) per element of the broadcast parts."""
    return (bits(seed, purpose, *parts) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draws(seed: int, purpose: Purpose, *parts: int) -> Callable[[int], float]:
    """Returns `uniform(seed, purpose, *parts, draw)` as a function of `draw`.

    For few numbers per sample: plain integers take one microsecond per draw, numpy takes thirty.
    """
    state = 0
    for part in (seed, purpose, *parts):
        state = _mixed(state, part)
    return lambda draw: (_mixed(state, draw) >> 11) * 2.0**-53


def _mixed(state: int, part: int) -> int:
    """One round of `splitmix`."""
    state = (state + _GOLDEN + part) & _64_BITS
    for shift, factor in _ROUNDS:
        state = ((state ^ (state >> shift)) * factor) & _64_BITS
    return state


def permutation(length: int, seed: Integer, purpose: Purpose, *parts: Integer) -> np.ndarray:
    """A random permutation of range(length), int64: places sorted by their hash, equal hashes by place."""
    return np.argsort(bits(seed, purpose, *parts, np.arange(length)), kind="stable")
