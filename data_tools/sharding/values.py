"""Measures the values of the images of a data set: its range, mean and deviation per channel, for `Pixels`.

Each task counts how often each value occurs in the training images of one shard. Counts are exact for types of up to 16 bits; others
are counted as float32 in bins of 1/1024 of the value. Percentiles, mean and deviation follow from the sums of the counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from data_tools.sources.reader import Reader, raise_if_lost
from data_tools.tasks import tasks_on_cluster
from pipeline.architecture.pixels import FULL_RANGE, Pixels
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.bad_budget import BadBudget
from pipeline.data.dataset.manifest import Dataset, record_pixels
from pipeline.data.loading.decode import DecodeError, stored_image

# The share of values below and above the range, with values=percentiles.
BEYOND = 0.001
# Bits of a float32, of which its order as an integer keeps the first 18: the sign, the exponent and 9 of the fraction.
_DROPPED = 14
_NUM_BINS = 1 << (32 - _DROPPED)
_SIGN = np.uint32(1 << 31)


@dataclass(frozen=True)
class ValuesJob:
    """The images of one shard to count. offsets, sizes: of their bytes in the tar."""

    path: str
    pixels: Pixels
    offsets: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class ValueCounts:
    """How often values occur. bins, counts: for each channel, int64 (n,), of the bins that are not empty. missing: for each channel, the
    number of NaN, nodata and padding pixels. images: read; bad: (offset, reason) of those that cannot be."""

    bins: list[np.ndarray]
    counts: list[np.ndarray]
    missing: list[int]
    images: int
    bad: list[tuple[int, str]]


def measure_values(
    dataset: Dataset, values: Sequence[str], num_images: int, num_tasks: int, max_bad_share: float = 0.001
) -> Dataset:
    """Measure the values of the training split, else of the first one, record them in dataset.json, and print them. Returns the data set with measured pixels.

    values: ["full"], ["percentiles"], or numbers low, high for all channels or for each; [] is full for 8 bits, else percentiles.
    num_images: at most so many, evenly from all shards; 0 is all. Raises UserError if too many images cannot be read, if there are no
    values, and as `check_range`.
    """
    split = "train" if "train" in dataset.splits else dataset.splits[0]
    pixels = dataset.pixels
    check_range(pixels, values)
    values = values or ["full" if pixels.type in ("uint8", "int8", "bool") else "percentiles"]
    jobs = list(_jobs(dataset, split, num_images))
    totals = [np.zeros(_num_bins(pixels), np.int64) for _ in pixels.channels]
    missing, images, bad = np.zeros(pixels.num_channels, np.int64), 0, list[tuple[int, str]]()
    shown = (sum(len(job.offsets) for job in jobs), len(jobs), dataset.path, "measured")
    with tasks_on_cluster(count_values, jobs, num_tasks, *shown) as (tasks, progress):
        for number, found in tasks:
            for total, bins, counts in zip(totals, found.bins, found.counts, strict=True):
                total[bins] += counts
            missing += found.missing
            images, bad = images + found.images, bad + found.bad
            progress.add(len(jobs[number].offsets), sum(jobs[number].sizes))
    if len(bad) > BadBudget(max_bad_share).allowed(images + len(bad)):
        raise UserError(
            f"{dataset.path}: {counted(len(bad), 'image')} cannot be read, such as one with {bad[0][1]}. See which, and exclude them: python "
            f"launch/verify.py data={dataset.path}"
        )
    if not all(total.any() for total in totals):
        raise UserError(f"{dataset.path}, split {split!r}: a channel has no values, only NaN or nodata.")
    measured = with_values(pixels, values, totals)
    for number, channel in enumerate(pixels.channels):
        low, high = measured.low[number], measured.high[number]
        of_bins = bin_values(pixels)
        beyond = totals[number][(of_bins < low) | (of_bins > high)].sum() / totals[number].sum()
        gone = f", {missing[number]:,} missing" if missing[number] else ""
        print(
            f"  channel {channel}: {low:g} to {high:g} become 0 to 1 (mean {measured.mean[number]:.4f}, deviation "
            f"{measured.std[number]:.4f}); {beyond:.2%} of the values are beyond and clipped{gone}"
        )
    return record_pixels(dataset, measured)


def check_range(pixels: Pixels, values: Sequence[str]) -> None:
    """Raise UserError if images of these pixels cannot have this range, as of `measure_values`."""
    if list(values) == ["full"]:
        Pixels.full_range(pixels.channels, pixels.type)
    elif len(values) > 2 and len(values) != 2 * pixels.num_channels:
        raise UserError(
            f"values = [{','.join(values)}] must be [low,high] for all, or for each of {counted(pixels.num_channels, 'channel')}."
        )


def _jobs(dataset: Dataset, split: str, num_images: int) -> Iterator[ValuesJob]:
    """One for each shard with images to count."""
    shards = [shard for shard in dataset.shards() if shard.split == split]
    total = sum(shard.samples for shard in shards)
    step = max(total // num_images, 1) if num_images else 1
    rows = pa.concat_tables(dataset.table(split).read(["offset", "size"]))
    begin = 0
    for shard in shards:
        of_shard = rows.slice(begin, shard.samples).take(pa.array(np.arange(-begin % step, shard.samples, step)))
        begin += shard.samples
        if len(of_shard):
            yield ValuesJob(
                str(dataset.shard_path(shard.name)),
                dataset.pixels,
                of_shard["offset"].to_pylist(),
                of_shard["size"].to_pylist(),
            )


def count_values(job: ValuesJob) -> ValueCounts:
    """The task: count the values of the images of a shard. Raises LostError if the storage fails."""
    pixels = job.pixels
    totals = [np.zeros(_num_bins(pixels), np.int64) for _ in pixels.channels]
    missing, bad = [0] * pixels.num_channels, list[tuple[int, str]]()
    with Reader() as reader:
        for offset, size in zip(job.offsets, job.sizes, strict=True):
            try:
                values, are_missing = stored_image(reader.read(job.path, offset, size, 0)).values_and_missing(pixels)
            except (OSError, DecodeError) as error:
                raise_if_lost(error, job.path)
                bad.append((offset, str(error)))
                continue
            there = is_value(values, pixels)
            there = there if are_missing is None else there & ~are_missing
            for channel, total in enumerate(totals):
                of_channel = values[..., channel][there[..., channel]]
                total += np.bincount(bins_of(of_channel), minlength=len(total))
                missing[channel] += values[..., channel].size - of_channel.size
    bins = [np.flatnonzero(total) for total in totals]
    return ValueCounts(
        bins,
        [total[found] for total, found in zip(totals, bins, strict=True)],
        missing,
        len(job.offsets) - len(bad),
        bad,
    )


def is_value(values: np.ndarray, pixels: Pixels) -> np.ndarray:
    """Which values are neither NaN nor nodata, bool (H, W, C)."""
    there = ~np.isnan(values) if values.dtype.kind == "f" else np.ones(values.shape, bool)
    return there if pixels.nodata is None else there & (values != pixels.nodata)


def _num_bins(pixels: Pixels) -> int:
    return 1 << (8 * _exact_bytes(pixels)) if _exact_bytes(pixels) else _NUM_BINS


def _exact_bytes(pixels: Pixels) -> int:
    """Bytes of an integer type each of whose values has a bin; 0 for other types."""
    kind = np.dtype(pixels.type)
    return kind.itemsize if kind.kind in "uib" and kind.itemsize <= 2 else 0


def bins_of(values: np.ndarray) -> np.ndarray:
    """The bin of each value, int64 (n,). Larger values have larger bins."""
    if values.dtype.kind in "uib" and values.dtype.itemsize <= 2:
        return values.astype(np.int64) - (np.iinfo(values.dtype).min if values.dtype.kind == "i" else 0)
    bits = (values.astype(np.float32) + np.float32(0)).view(np.uint32)  # -0 becomes 0.
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    return (ordered >> _DROPPED).astype(np.int64)


def bin_values(pixels: Pixels) -> np.ndarray:
    """The value of each bin, float64 (bins,): exact, or the middle of what the bin holds."""
    if _exact_bytes(pixels):
        low, _ = FULL_RANGE[pixels.type]
        return np.arange(_num_bins(pixels), dtype=np.float64) + low
    ordered = (np.arange(_NUM_BINS, dtype=np.uint32) << _DROPPED) | np.uint32(1 << (_DROPPED - 1))
    bits = np.where(ordered & _SIGN, ordered & ~_SIGN, ~ordered).astype(np.uint32)
    with np.errstate(invalid="ignore"):
        return bits.view(np.float32).astype(np.float64)


def with_values(pixels: Pixels, values: Sequence[str], totals: Sequence[np.ndarray]) -> Pixels:
    """The pixels with a range by `values`, as of `measure_values`, and the mean and deviation within it. totals: counts of bins by channel."""
    of_bins = bin_values(pixels)
    if list(values) == ["full"]:
        full = Pixels.full_range(pixels.channels, pixels.type)
        lows, highs = list(full.low), list(full.high)
    elif list(values) == ["percentiles"]:
        lows, highs = map(list, zip(*(_percentiles(of_bins, total) for total in totals), strict=True))
    else:
        numbers = [float(number) for number in values] * (pixels.num_channels if len(values) == 2 else 1)
        lows, highs = numbers[::2], numbers[1::2]
    means, stds = [], []
    for low, high, total in zip(lows, highs, totals, strict=True):
        there = np.flatnonzero(total)
        scaled = (np.clip(of_bins[there], low, high) - low) / (high - low)
        mean = float(np.average(scaled, weights=total[there]))
        means.append(mean)
        stds.append(max(float(np.sqrt(np.average((scaled - mean) ** 2, weights=total[there]))), 1e-6))
    return replace(pixels, low=tuple(lows), high=tuple(highs), mean=tuple(means), std=tuple(stds))


def _percentiles(of_bins: np.ndarray, total: np.ndarray) -> tuple[float, float]:
    """The values below and above which a share BEYOND of all lies."""
    below = np.cumsum(total)
    first = int(np.searchsorted(below, BEYOND * below[-1], side="right"))
    last = int(np.searchsorted(below, (1 - BEYOND) * below[-1], side="left"))
    low, high = float(of_bins[first]), float(of_bins[last])
    return (low, high) if low < high else (low, low + 1)
