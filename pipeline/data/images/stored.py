"""What an image file stores: `formats.open_image` reads its header, `StoredImage` its pages in their own type.

Values are never scaled. Alpha is left out, as the only values; a page is one of several images of a file: a channel, a
slice, a frame.
"""

import functools
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.architecture.pixels import Pixels, PixelType
from pipeline.base.words import counted

# Values of one page, (H, W, C), and which of them are missing, bool (H, W), or None.
Page = tuple[np.ndarray, np.ndarray | None]
MAX_PIXELS = 2 * 89_478_485  # Pillow's limit: a small header can claim 12 GB.
# EXIF orientations whose rows are stored bottom up, and whose columns right to left (5-8: after transposing).
UPSIDE_DOWN, MIRRORED = (3, 4, 7, 8), (2, 3, 6, 7)
# What decoding may leave out of a file, or fill -> in words, after "images with", and the way out.
LEFT_OUT = {
    "alpha": (
        "an alpha channel, which is not read",
        "To have it as a channel, store the channels without marking one as alpha",
    ),
    "pages": (
        "pages beside the one that is read",
        "Those of a TIFF or DICOM can be samples (pages=samples) or channels",
    ),
    "bits": (
        "more than 8 bits a value, of which 8 are read",
        "To keep them, convert to 16-bit PNG or TIFF, and leave out to_rgb8",
    ),
    "bands": ("more channels than the three that are read", "To keep them, leave out to_rgb8"),
    "channels": (
        "fewer channels than the data set, of which the others are read as their mean",
        "To leave such images out: missing_channels=skip",
    ),
    "profile": (
        "a colour profile other than sRGB, which is not applied",
        "Where colours matter, convert to sRGB first",
    ),
}
# Red, green and blue of sRGB as ICC profiles hold them, adapted to D50 (IEC 61966-2-1), and the largest difference from
# them: those of Display P3 and Adobe RGB differ by 0.08 and 0.17.
_SRGB = {b"rXYZ": (0.4361, 0.2225, 0.0139), b"gXYZ": (0.3851, 0.7169, 0.0971), b"bXYZ": (0.1431, 0.0606, 0.7141)}
_TOLERANCE = 0.02
_MOST_TAGS = 100
DESCRIPTION = 270  # The tag of a TIFF for text.
_CHANNELS = '{"channels_of_data_set": '
_TYPES = set(PixelType.__args__)  # type: ignore[attr-defined]


class DecodeError(ValueError):
    """The bytes are not an image, or the image cannot be decoded completely."""


@dataclass(frozen=True)
class StoredImage:
    """An image file, of which the header was read.

    ext: file extension by content. channels: of a page, without alpha. type: numpy's name. pages: number of images of
    this size and type in the file. axes: what the pages are, as OME names it, such as "C"; "" if the file does not say.
    nodata: value of missing pixels by the header. alpha: whether an alpha channel is left out. profile: whether there
    is a colour profile other than sRGB, which is not applied. channel_names: of all channels of its data set, if the
    file names them. lacking: places among these of channels that it does not have. read: page number -> `Page`; raises
    any error.
    """

    ext: str
    height: int
    width: int
    channels: int
    type: str
    read: Callable[[int], Page]
    pages: int = 1
    axes: str = ""
    nodata: float | None = None
    alpha: bool = False
    profile: bool = False
    channel_names: tuple[str, ...] = ()
    lacking: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.type not in _TYPES:
            raise DecodeError(f"{self.describe()}: values of this type are not read")
        if not (self.height and self.width and self.channels and self.pages):
            raise DecodeError(f"{self.describe()}: it is empty")
        if self.height * self.width * self.channels > MAX_PIXELS:
            raise DecodeError(f"{self.describe()}: more than {MAX_PIXELS:,} values")

    def describe(self) -> str:
        """In words, such as "TIFF, 225 x 225, 5 channels float64"."""
        pages = f", {self.pages} pages" if self.pages > 1 else ""
        return (
            f"{self.ext.upper()}, {self.width} x {self.height}, {counted(self.channels, 'channel')} {self.type}{pages}"
        )

    def page(self, number: int) -> Page:
        """A page in the file's type. Raises DecodeError."""
        try:
            values, missing = self.read(number)
        except (DecodeError, MemoryError):
            raise
        except Exception as error:  # Each library raises errors of its own, and of any type where files are damaged.
            raise DecodeError(f"{self.describe()}: {reason(error)}") from None
        if values.shape != (self.height, self.width, self.channels) or values.dtype.name != self.type:
            raise DecodeError(f"{self.describe()}, but decoding gives {values.shape} {values.dtype.name}")
        return values, missing

    def values(self, pixels: Pixels) -> np.ndarray:
        """(H, W, C) for a data set of these pixels, of its type. Missing pixels become `nodata`, or `low` without
        one; channels that the image lacks become their mean (`Pixels.fill`).

        Raises DecodeError as `values_and_missing`.
        """
        values, missing = self.values_and_missing(pixels)
        if missing is not None and missing.any() and pixels.is_measured:
            fills = np.array(pixels.low if pixels.nodata is None else [pixels.nodata] * len(pixels.low))
            for place in self.lacking:
                fills[place] = pixels.fill(place)
            values = np.where(missing, fills.astype(values.dtype), values)
        return values

    def values_and_missing(self, pixels: Pixels) -> tuple[np.ndarray, np.ndarray | None]:
        """((H, W, C) of the data set's type, which of them the file calls missing or lacks, bool (H, W, C), or None).

        The channels are those of the first page, or of all pages if only these together have as many. Raises
        DecodeError for an image of other channels, or with infinite values or such that the type does not hold.
        """
        if self.channels + len(self.lacking) == pixels.num_channels:
            pages = [self.page(0)]
        elif self.channels * self.pages == pixels.num_channels:
            pages = [self.page(number) for number in range(self.pages)]
        else:
            way_out = "; launch/shard.py makes one image of files of single channels (channel_pattern)" * (
                self.channels == 1
            )
            raise DecodeError(f"{self.describe()}, instead of {pixels.describe()}{way_out}")
        values = pages[0][0] if len(pages) == 1 else np.concatenate([values for values, _ in pages], axis=2)
        # Some files of GDAL have infinity as nodata.
        if values.dtype.kind == "f" and (values[np.isinf(values)] != pixels.nodata).any():
            raise DecodeError(f"{self.describe()}: infinite values")
        values = self._as_type(values, pixels)
        if not self.lacking and all(missing is None for _, missing in pages):
            return values, None
        of_pages = [np.zeros(values.shape[:2], bool) if missing is None else missing for _, missing in pages]
        are_missing = np.repeat(np.stack(of_pages, axis=2), self.channels, axis=2)
        for place in sorted(self.lacking):
            values, are_missing = np.insert(values, place, 0, axis=2), np.insert(are_missing, place, True, axis=2)
        return values, are_missing

    def _as_type(self, values: np.ndarray, pixels: Pixels) -> np.ndarray:
        """The values in the type of the data set, if it holds each of them exactly."""
        wanted = np.dtype(pixels.type)
        if values.dtype == wanted:
            return values
        if not np.can_cast(values.dtype, wanted):
            converted = values.astype(wanted)
            if (
                not np.array_equal(converted.astype(values.dtype), values)
                or (converted < 0).any() != (values < 0).any()
            ):
                raise DecodeError(
                    f"{self.describe()}, values from {values.min()} to {values.max()}, instead of {pixels.describe()}"
                )
        return values.astype(wanted)


@functools.lru_cache
def has_other_colours(profile: bytes | None) -> bool:
    """Whether the colours of an ICC profile, which is not applied, are not sRGB's or gray: by its colour space and
    primaries, not its tone curves.
    """
    if not profile or profile[16:20] == b"GRAY":
        return False
    try:
        (num_tags,) = struct.unpack_from(">I", profile, 128)
        places = dict(struct.iter_unpack(">4sI4x", profile[132 : 132 + 12 * min(num_tags, _MOST_TAGS)]))
        for tag, expected in _SRGB.items():
            primary = (number / 65536 for number in struct.unpack_from(">3i", profile, places[tag] + 8))
            if any(abs(a - b) > _TOLERANCE for a, b in zip(primary, expected, strict=True)):
                return True
    except (struct.error, KeyError):  # Damaged, or of other tags.
        return True
    return False


def describe_left_out(counts: Mapping[str, int]) -> list[str]:
    """Lines to print. counts: number of images for names of LEFT_OUT."""
    return [
        f"note: {counted(counts[what], 'image')} with {words}. {way_out}"
        for what, (words, way_out) in LEFT_OUT.items()
        if counts.get(what)
    ]


def describe_channels(names: Sequence[str], lacking: Sequence[int]) -> str:
    """The description of a TIFF that may lack channels of its data set. names: of all. lacking: places of those that it
    does not have.
    """
    return json.dumps({"channels_of_data_set": list(names), "lacking": list(lacking)})


def described_channels(description: object) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(names, lacking) by `describe_channels`; both are empty for any other description."""
    if not (isinstance(description, str) and description.startswith(_CHANNELS)):
        return (), ()
    names = json.loads(description)
    return tuple(names["channels_of_data_set"]), tuple(names["lacking"])


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Apply an EXIF orientation to (H, W, C) or (H, W): 2-4 mirror or rotate by 180 degrees, 5-8 also transpose."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in UPSIDE_DOWN:
        pixels = pixels[::-1]
    if orientation in MIRRORED:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def without_alpha(values: np.ndarray, alpha: Sequence[int]) -> np.ndarray:
    """(H, W, S) without these channels."""
    return np.delete(values, alpha, axis=2) if alpha else values


def reason(error: Exception) -> str:
    """The error in one line, without memory addresses, which differ between runs."""
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(f"{type(error).__name__}: {error}".split()))[:200]
