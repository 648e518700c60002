"""Decides what the images of a source are: 8-bit photographs, or arrays of other channels or types; and encodes those
that are made of several.

Nothing is guessed: a source whose images differ, or whose files have several pages, is refused with the settings that
say what is meant.
"""

import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import tifffile

from data_tools.sources import Listing, Reader
from data_tools.sources.images import png
from data_tools.sources.listing import SourceImage, sorted_by_key, with_columns
from pipeline.architecture.pixels import FULL_RANGE, RGB8, RGB_CHANNELS, Pixels
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.images.stored import DecodeError, StoredImage, describe_channels
from pipeline.data.loading.decode import left_out, stored_image
from pipeline.process.waits import worked
from pipeline.settings.commands.data import IndexConfig, ShardConfig

# Images whose headers are read before the first shard is written, evenly over the source.
_NUM_PROBED = 48
# The share of images that must be alike: the others are bad images, or, if only their type differs, those with values
# that it does not hold.
_MOST = 0.8
# Names that are looked at for a hint.
_MOST_NAMES = 20_000
# Formats of photographs: their pages are frames of an animation, of which the first is used.
_ANIMATIONS = ("gif", "webp", "png", "avif", "heic")

# How names of files say which channel of a sample they are.
_CHANNEL_NAMES = (
    r"(?i)(?P<sample>.*?)-ch(?P<channel>[0-9]+).*",
    r"(?i)(?P<sample>.*)[_-](?:ch|c|b|band|channel)?_?(?P<channel>[0-9]+)",
    r"(?P<sample>.*)[_-](?P<channel>[A-Za-z]+[0-9]*)",
    r"(?i)(?P<sample>.*)/(?:[a-z]*_?)?(?P<channel>[A-Za-z0-9]+)",
)


class ShardImage(NamedTuple):
    """An image file for a shard. left_out: what training does not read of its source (`decode.left_out`). is_filled:
    whether a conversion has filled what could not be read.
    """

    data: bytes
    ext: str
    width: int
    height: int
    left_out: set[str]
    is_filled: bool = False


class _ImageKind(NamedTuple):
    channels: int
    type: str
    pages: int
    axes: str
    example: str

    @property
    def is_photograph(self) -> bool:
        return self.type in ("uint8", "bool") and self.channels in (1, 3) and self.pages == 1


def source_pixels(listing: Listing, config: ShardConfig) -> Pixels:
    """`pixels_of` the images of a source, by the headers of some."""
    if listing.convert or config.to_rgb8:
        return RGB8
    rows = np.unique(np.linspace(0, len(listing) - 1, _NUM_PROBED).astype(np.int64))
    images = [(name, stored) for name, stored in _headers(listing.images(rows)) if stored]
    if not listing.channels and all(stored.channels == stored.pages == 1 for _, stored in images):
        print(_channel_hint(listing), end="")
    is_split = "page" in listing.table.column_names
    return pixels_of(images, config, listing.channels, is_split)


def pixels_of(
    images: Iterable[tuple[str, StoredImage]],
    config: ShardConfig | IndexConfig,
    joined: Sequence[str] = (),
    is_split: bool = False,
) -> Pixels:
    """What the values of images mean, by the settings and the headers of some; not measured yet.

    images: (name, header). joined: names of channels, of which each is a file.
    is_split: each page is a sample. Prints what the images are, unless they are photographs of 8 bits. Raises UserError
    where they differ, or have several pages and no setting says what these are.
    """
    kinds, declared, named = list[_ImageKind](), set[float | None](), tuple[str, ...]()
    for name, stored in images:
        num_pages = 1 if is_split or stored.ext in _ANIMATIONS else stored.pages
        num_channels, example = stored.channels + len(stored.lacking), f"{name}: {stored.describe()}"
        kinds.append(_ImageKind(num_channels, stored.type, num_pages, stored.axes, example))
        declared.add(stored.nodata)
        named = named or stored.channel_names
    if not (joined or named or config.channels):
        others = [kind for kind in kinds if not kind.is_photograph]
        if len(kinds) - len(others) >= _MOST * len(kinds):
            _note_others(others, kinds, "8-bit photographs")
            return RGB8  # Also if none could be read.
    num_channels = _num_channels(kinds, config.pages) * max(len(joined), 1)
    names = tuple(joined) or tuple(config.channels) or named
    if not names:
        numbered = tuple(f"c{number}" for number in range(num_channels))
        names = {1: ("gray",), 3: RGB_CHANNELS}.get(num_channels, numbered)
    if len(names) != num_channels:
        raise UserError(
            f"channels = [{','.join(names)}] has {counted(len(names), 'name')}, but images have"
            f" {counted(num_channels, 'channel')}: {kinds[0].example}."
        )
    types = Counter(kind.type for kind in kinds)
    common, count = types.most_common(1)[0]
    if count < _MOST * len(kinds):
        common = np.result_type(*types).name  # It holds the values of all.
    if len(types) > 1:
        print(
            "note: images have values of"
            f" {', '.join(f'{kind} ({count} of {len(kinds)} tried)' for kind, count in types.items())}: all are read"
            f" as {common}, and an image with a value that this does not hold is a bad one"
        )
    found = sorted(value for value in declared if value is not None)
    if config.nodata is None and len(found) > 1:
        raise UserError(f"images name several values of missing pixels: {found[:5]}. Say which: nodata=...")
    value = config.nodata if config.nodata is not None else next(iter(found), None)
    pixels = Pixels(names, common, (), (), (), (), value)  # type: ignore[arg-type]
    print(f"images are {pixels.describe()}" + (f"; {value:g} means missing" if value is not None else ""))
    return pixels


def _num_channels(kinds: list[_ImageKind], pages: str) -> int:
    """Channels of a sample. Raises UserError if images differ, or pages have no meaning."""
    if several := [kind for kind in kinds if kind.pages > 1]:
        pages = pages or ("channels" if all(kind.axes == "C" for kind in several) else "")
        if not pages:
            first = several[0]
            raise UserError(
                f"images have several pages, such as {first.example}. Say what they are: pages=channels (one image of"
                f" {counted(first.pages * first.channels, 'channel')}), pages=samples ({first.pages} images),"
                " pages=first (the others are not used)."
            )
    counts = [kind.channels * (kind.pages if pages == "channels" else 1) for kind in kinds]
    num_channels, count = Counter(counts).most_common(1)[0]
    if count < _MOST * len(kinds):
        examples = {kind[:-1]: kind.example for kind in reversed(kinds)}
        raise UserError(
            f"images differ in their channels: {'; '.join(sorted(examples.values())[:4])}. Put those of one kind into a"
            " folder of their own, or reduce all to 8-bit RGB: to_rgb8=true"
        )
    others = [kind for kind, count in zip(kinds, counts, strict=True) if count != num_channels]
    _note_others(others, kinds, counted(num_channels, "channel"))
    return num_channels


def _note_others(others: list[_ImageKind], kinds: list[_ImageKind], most: str) -> None:
    """Print which images are bad ones, because most are of another kind."""
    if others:
        print(
            f"note: of {len(kinds):,} images tried, {len(others):,} differ from most ({most}) and are bad images, such"
            f" as {others[0].example}"
        )


def _headers(images: Iterable[SourceImage]) -> Iterator[tuple[str, StoredImage | None]]:
    """(name, header) of images; None for those that cannot be read, which are left to the job."""
    with Reader() as reader:
        for image in images:
            try:
                yield image.name, stored_image(reader.read(*next(filter(None, image.files))))
            except (OSError, ValueError):
                yield image.name, None


def join_channels(listing: Listing, config: ShardConfig) -> Listing:
    """One sample of all files that are its channels, by `channel_pattern`; the listing itself without one.

    A sample without a file for each channel is skipped; with `missing_channels` as mean, one without any. Raises
    UserError for keys that the pattern does not match, two files of one channel, and labels or numbers that differ
    within a sample.
    """
    if not config.channel_pattern:
        return listing
    keys = listing.table["key"].to_pylist()
    matches = [re.fullmatch(config.channel_pattern, key) for key in keys]
    if unmatched := [key for key, match in zip(keys, matches, strict=True) if match is None]:
        raise UserError(
            f"channel_pattern = {config.channel_pattern} does not match {counted(len(unmatched), 'key')} of"
            f" {len(keys):,}, such as {unmatched[0]!r}."
        )
    of_files = [match.group("sample", "channel") for match in matches if match]
    found = sorted({channel for _, channel in of_files})
    channels = config.channels or found
    if config.to_rgb8:
        channels = [channels[place] for place in _rgb_places(channels)]
    files: dict[str, dict[str, int]] = {}
    for row, (sample, channel) in enumerate(of_files):
        if channel in files.setdefault(sample, {}):
            raise UserError(
                f"{keys[row]!r} and {keys[files[sample][channel]]!r} are both channel {channel!r} of {sample!r}, which"
                " the group sample of channel_pattern names."
            )
        files[sample][channel] = row
    known = [tuple(map(tuple, row.values())) for row in listing.table.select(["labels", "targets"]).to_pylist()]
    skipped, parts = list(listing.skipped), dict[str, list[int | None]]()
    most_lacking = len(channels) - 1 if config.missing_channels == "mean" else 0
    for sample, rows in files.items():
        first = keys[next(iter(rows.values()))]
        lacking = [channel for channel in channels if channel not in rows]
        if len(lacking) > most_lacking:
            skipped.append((sample, first, f"no file for channel {', '.join(lacking)}"))
        elif len({known[row] for row in rows.values()}) > 1:
            raise UserError(f"the files of {sample!r} have different labels or numbers: {first!r} and others.")
        else:
            parts[sample] = [rows.get(channel) for channel in channels]
    if not parts:
        raise UserError(
            f"no sample has all channels {', '.join(channels)}: {skipped[-1][2]}. There are: {', '.join(found)}."
        )
    sizes, mtimes = (listing.table[name].to_numpy() for name in ("size", "mtime"))
    rows_of = [[row for row in rows if row is not None] for rows in parts.values()]
    table = with_columns(
        listing.table.take(pa.array([rows[0] for rows in rows_of])),
        key=pa.array(list(parts), pa.large_string()),
        size=pa.array([int(sizes[rows].sum()) for rows in rows_of], pa.int64()),
        mtime=pa.array([int(mtimes[rows].max()) for rows in rows_of], pa.int64()),
        parts=pa.array(list(parts.values()), pa.list_(pa.int32())),
    )
    unused = sum(len(rows.keys() - set(channels)) for rows in files.values())
    print(
        f"{len(keys):,} files are {len(parts):,} samples of {counted(len(channels), 'channel')}:"
        f" {', '.join(channels)}; left out {counted(unused, 'file')} of other channels, and"
        f" {counted(len(skipped) - len(listing.skipped), 'sample')} without a file for each channel"
        f"{' (missing_channels=mean keeps them)' * (config.missing_channels == 'skip')}"
    )
    return replace(
        listing,
        table=sorted_by_key(table),
        skipped=skipped,
        channels=channels,
        separate=listing.table,
    )


def _channel_hint(listing: Listing) -> str:
    """A line with the setting to paste if names look like one file per channel; else ""."""
    keys = listing.table["key"][:_MOST_NAMES].to_pylist()
    for text in _CHANNEL_NAMES:
        of_samples = defaultdict[str, set[str]](set)
        for match in filter(None, map(re.compile(text).fullmatch, keys)):
            of_samples[match["sample"]].add(match["channel"])
        channels = sorted(set().union(*of_samples.values()))
        # Plates may have channels of their own, and some files may be missing.
        sets = Counter(map(frozenset, of_samples.values()))
        usual = sum(count for names, count in sets.items() if len(names) > 1 and count > 0.1 * len(of_samples))
        if (
            sum(map(len, of_samples.values())) == len(keys)
            and 2 <= len(channels) <= min(32, len(of_samples))
            and usual > 0.9 * len(of_samples)
        ):
            return (
                f"note: names look like one file per channel: if so, channel_pattern='{text}' makes"
                f" {len(of_samples):,} samples of {len(channels)} channels ({', '.join(channels[:8])}) of"
                f" {counted(len(keys), 'file')}\n"
            )
    return ""


def split_pages(listing: Listing, config: ShardConfig) -> Listing:
    """A sample for each page of each file with pages=samples, whose key ends in @0, @1, ...; the listing itself without
    it.

    Reads the headers of all files. A file that cannot be read stays one sample, which the job finds bad.
    """
    if config.pages != "samples":
        return listing
    images = worked(listing.images(np.arange(len(listing))), "counting pages", len(listing), "file")
    counts = [stored.pages if stored else 1 for _, stored in _headers(images)]
    rows = np.repeat(np.arange(len(listing)), counts)
    pages = np.concatenate([np.arange(count) for count in counts])
    table = listing.table.take(pa.array(rows))
    keys = [f"{key}@{page}" for key, page in zip(table["key"].to_pylist(), pages.tolist(), strict=True)]
    if not listing.has_groups:
        table = with_columns(table, group=table["key"])
    table = with_columns(table, key=pa.array(keys, pa.large_string()), page=pa.array(pages, pa.int32()))
    print(f"{len(listing):,} files have {len(rows):,} pages, each a sample; a file is their group")
    return replace(listing, table=sorted_by_key(table))


def encoded(data: bytes, page: int, pixels: Pixels, config: ShardConfig) -> ShardImage | None:
    """An image that is not stored as it is: a page, or 8-bit RGB of other values. None for others.

    page: the one that is the sample, or -1. Raises DecodeError.
    """
    if page < 0 and not (config.to_rgb8):
        return None
    stored = stored_image(data)
    is_photograph = stored.type == "uint8" and stored.channels in (1, 3)
    if (stored.ext in (*_ANIMATIONS, "jpg") and is_photograph) or (
        stored.pages == 1 and (is_photograph or not config.to_rgb8)
    ):
        return None
    values, missing = stored.page(max(page, 0))
    unread = left_out(stored, pixels) - ({"pages"} if page >= 0 else set())
    if config.to_rgb8:
        names = config.channels or [""] * stored.channels
        if len(names) != stored.channels:
            raise DecodeError(
                f"{stored.describe()}, where channels = [{','.join(names)}] has {counted(len(names), 'name')}"
            )
        return ShardImage(png(_to_rgb8(values, names, stored)), "png", stored.width, stored.height, unread)
    return ShardImage(to_tiff(_with_nodata(values, missing, pixels)), "tiff", stored.width, stored.height, unread)


def joined(files: list[bytes | None], pixels: Pixels, config: ShardConfig) -> ShardImage:
    """An image whose channels are these files, of one size and type. Raises DecodeError.

    None is a file that the sample lacks: with `missing_channels`, the description says which channels there are.
    """
    pages, unread = [], {"channels"} if None in files else set[str]()
    for data in files:
        if data is None:
            continue
        stored = stored_image(data)
        pages.append(_with_nodata(*stored.page(0), pixels))
        unread |= left_out(stored, pixels if config.to_rgb8 else None)
    if len({(page.shape, page.dtype) for page in pages}) > 1:
        shown = ", ".join(f"{page.shape[1]} x {page.shape[0]} {page.dtype}" for page in pages)
        raise DecodeError(f"its channels differ in size or type: {shown}")
    values = np.concatenate(pages, axis=2)
    height, width, num_channels = values.shape
    if config.to_rgb8:
        return ShardImage(png(_to_rgb8(values, [""] * num_channels, stored)), "png", width, height, unread)
    of_file = pixels.num_channels // len(files)
    lacking = [place for place in range(pixels.num_channels) if files[place // of_file] is None]
    description = describe_channels(pixels.channels, lacking) if config.missing_channels == "mean" else ""
    return ShardImage(to_tiff(values, description), "tiff", width, height, unread)


def _with_nodata(values: np.ndarray, missing: np.ndarray | None, pixels: Pixels) -> np.ndarray:
    """The values with nodata where they are missing. Raises DecodeError if there is no such value."""
    if missing is None or not missing.any():
        return values
    if pixels.nodata is None:
        raise DecodeError("it has missing pixels (padding), and the data set no value for them: set nodata=...")
    return np.where(missing[..., None], np.array(pixels.nodata, values.dtype), values)


def to_tiff(values: np.ndarray, description: str = "") -> bytes:
    """A TIFF of (H, W, C), compressed without loss (zstd, differences of neighbours), channels interleaved."""
    file = io.BytesIO()
    array = values[..., 0] if values.shape[2] == 1 else values
    predictor = values.dtype.kind in "ui" and values.dtype.itemsize <= 4
    tifffile.imwrite(
        file,
        array,
        compression="zstd",
        compressionargs={"level": 3},
        predictor=predictor,
        photometric="minisblack",
        planarconfig="contig" if array.ndim == 3 else None,
        metadata=None,
        software=False,
        description=description or None,
    )
    return file.getvalue()


def _to_rgb8(values: np.ndarray, names: Sequence[str], stored: StoredImage) -> np.ndarray:
    """uint8 (H, W) or (H, W, 3): the range of the type becomes 0 to 255; of (H, W, C), the channels of `_rgb_places`.
    Raises DecodeError.
    """
    if values.dtype.name not in FULL_RANGE:
        raise DecodeError(f"{stored.describe()}: floating-point values have no range that could become 0 to 255")
    if values.shape[2] == 2:
        raise DecodeError(f"{stored.describe()}: two channels are neither gray nor RGB")
    low, high = FULL_RANGE[values.dtype.name]
    scaled = np.rint((values.astype(np.float64) - low) * (255 / (high - low))).astype(np.uint8)
    return scaled[..., 0] if values.shape[2] == 1 else np.ascontiguousarray(scaled[..., _rgb_places(names)])


def _rgb_places(names: Sequence[str]) -> list[int]:
    """The places of red, green and blue among the names of channels, else of the first three."""
    has_names = set(RGB_CHANNELS) <= set(names)
    return [names.index(name) for name in RGB_CHANNELS] if has_names else list(range(len(names)))[:3]
