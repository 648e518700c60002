"""Measures the values of the images of a data set: its range, mean and deviation per channel, for `Pixels`.

Each task counts how often each value occurs in the training images of one shard, and writes the counts to a file, so
that a killed job can be resumed. Percentiles, mean and deviation follow from their sums, which are the same for any
number of tasks. They are exact for types of up to 16 bits and for integers up to 2^21; larger integers and floats are
rounded to `_FRACTION_BITS` first.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.sharding.write_shard import load_part, read_rows, write_part
from data_tools.sources.reader import Reader
from data_tools.tasks import tasks_on_cluster
from pipeline.architecture.pixels import FULL_RANGE, Pixels
from pipeline.base.errors import UserError
from pipeline.base.words import command_line, counted
from pipeline.data.dataset.exclusion import excluded_rows
from pipeline.data.dataset.manifest import Dataset, record_pixels
from pipeline.data.dataset.split import BadBudget
from pipeline.data.loading.decode import DecodeError, decode, stored_image
from pipeline.data.storage.bucket import AnyPath, make_folder, remove_tree, to_path
from pipeline.data.storage.content import content_hash
from pipeline.settings.commands.data import ValuesConfig

# The share of values below and above the range, with values=percentiles.
BEYOND = 0.001
# In the folder of a data set while its values are measured, and after a kill: the counts of each shard.
FOLDER = ".values"
# Bits after the leading one, by numpy's kind: float32 and float64 are counted within 1/8192 of the value.
_FRACTION_BITS = {"f": 12, "i": 20, "u": 20}
# How often each value of a channel occurs.
COUNTS = pa.schema([("channel", pa.int32()), ("value", pa.float64()), ("count", pa.int64())])
# Rows to collect before they are summed, looked at after so many tables: one image at a time would take longer.
_MOST_WAITING, _LOOKED_AT = 2**20, 64


@dataclass(frozen=True)
class ValuesJob:
    """The images of one shard to count. offsets, sizes: of their bytes in the tar. part: path of the file with their
    counts.
    """

    path: str
    pixels: Pixels
    offsets: list[int]
    sizes: list[int]
    part: str


@dataclass(frozen=True)
class ValueCounts:
    """The result of a job, and the metadata of its part file, whose rows are the counts. missing: for each channel, the
    number of NaN, nodata and padding pixels.

    bad: (offset, reason) of each image that cannot be read. made: False if it was counted by an earlier start.
    """

    missing: list[int]
    bad: list[tuple[int, str]]
    made: bool = True


def measure_values(dataset: Dataset, config: ValuesConfig, max_bad_share: float | None = None) -> Dataset:
    """Measure the values of the training split, else of the first one, record them in dataset.json, and print them.
    Returns the data set with measured pixels.

    config.values: ["full"], ["percentiles"], or numbers low, high for all channels or for each; [] is full for 8 bits,
    else percentiles.
    config.values_images: at most so many, evenly from all shards; 0 is all. Raises UserError if too many images cannot
    be read, if there are no values, and as `check_range`.
    """
    split = "train" if "train" in dataset.splits else dataset.splits[0]
    pixels = dataset.pixels
    check_range(pixels, config.values)
    values = config.values or ["full" if pixels.type in ("uint8", "int8", "bool") else "percentiles"]
    parts = dataset.path / FOLDER
    make_folder(parts)
    jobs = value_jobs(dataset, split, config.values_images, parts)
    counts = [COUNTS.empty_table()]
    missing, bad, num_resumed = np.zeros(pixels.num_channels, np.int64), list[tuple[int, str]](), 0
    images = sum(len(job.offsets) for job in jobs)
    shown = (images, len(jobs), dataset.path, "measured")
    with tasks_on_cluster(count_values, jobs, config.num_tasks, *shown) as (tasks, progress):
        for number, found in tasks:
            add_counts(counts, read_rows(to_path(jobs[number].part)))
            missing += found.missing
            bad += found.bad
            num_resumed += not found.made
            progress.add(len(jobs[number].offsets), sum(jobs[number].sizes), found.made)
    if len(bad) > BadBudget(max_bad_share).allowed(images):
        raise UserError(
            f"{dataset.path}: {counted(len(bad), 'image')} cannot be read, such as one with {bad[0][1]}. See which, and"
            f" exclude them: {command_line('verify', f'data={dataset.path}')}"
        )
    totals = [total_of(counts, channel) for channel in range(pixels.num_channels)]
    if not all(len(total) for _, total in totals):
        raise UserError(f"{dataset.path}, split {split!r}: a channel has no values, only NaN or nodata.")
    measured = with_values(pixels, values, totals)
    print(
        f"values of {images:,} of {counted(dataset.info['samples'][split], 'image')} of split {split!r};"
        f" {counted(num_resumed, 'shard')} of {len(jobs):,} counted before:"
    )
    for number, channel in enumerate(pixels.channels):
        low, high = measured.low[number], measured.high[number]
        there, occur = totals[number]
        beyond = occur[(there < low) | (there > high)].sum() / occur.sum()
        print(
            f"  channel {channel}: {low:g} to {high:g} become 0 to 1 (mean {measured.mean[number]:.4f}, deviation "
            f"{measured.std[number]:.4f}); {beyond:.2%} of the values are beyond and clipped, {missing[number]:,}"
            " missing"
        )
    recorded = record_pixels(dataset, measured)
    remove_tree(parts)
    return recorded


def check_range(pixels: Pixels, values: Sequence[str]) -> None:
    """Raise UserError if images of these pixels cannot have this range, as of `measure_values`."""
    if list(values) == ["full"]:
        Pixels.full_range(pixels.channels, pixels.type)
    elif len(values) > 2 and len(values) != 2 * pixels.num_channels:
        raise UserError(
            f"values = [{','.join(values)}] must be [low,high] for all, or for each of"
            f" {counted(pixels.num_channels, 'channel')}."
        )


def value_jobs(dataset: Dataset, split: str, num_images: int, parts: AnyPath) -> list[ValuesJob]:
    """One for each shard with images to count, without those that lists exclude. parts: folder of the files with the
    counts.
    """
    pixels, shards = dataset.pixels, [shard for shard in dataset.shards() if shard.split == split]
    rows = dataset.table(split).read_all(["offset", "size"])
    chosen = np.delete(np.arange(len(rows)), excluded_rows(dataset, split, "all")[0])
    if 0 < num_images < len(chosen):
        chosen = chosen[np.arange(num_images) * len(chosen) // num_images]
    jobs, begin = [], 0
    for shard in shards:
        first, last = np.searchsorted(chosen, (begin, begin + shard.samples))
        begin += shard.samples
        if first < last:
            of_shard = rows.take(pa.array(chosen[first:last]))
            offsets, sizes = (of_shard[name].to_pylist() for name in ("offset", "size"))
            # Its file is named by all that the counts depend on.
            identity = json.dumps([shard.sha256, pixels.channels, pixels.type, pixels.nodata, offsets, sizes])
            part = parts / f"{content_hash(identity.encode()).hex()}.part"
            jobs.append(ValuesJob(str(dataset.shard_path(shard.name)), pixels, offsets, sizes, str(part)))
    return jobs


def count_values(job: ValuesJob) -> ValueCounts:
    """The task: count the values of the images of a shard, unless an earlier start has. Raises LostError if the storage
    fails.
    """
    part = to_path(job.part)
    if found := load_part(part, ValueCounts):
        return replace(found, made=False)
    pixels = job.pixels
    counts = [COUNTS.empty_table()]
    missing, bad = [0] * pixels.num_channels, list[tuple[int, str]]()
    with Reader() as reader:
        for offset, size in zip(job.offsets, job.sizes, strict=True):
            try:
                data = reader.read(job.path, offset, size, 0)
                stored = stored_image(data)
                if pixels.is_rgb8 and not stored.lacking:  # Also of gray photographs.
                    values, are_missing = decode(data), None
                else:
                    values, are_missing = stored.values_and_missing(pixels)
            except (OSError, DecodeError) as error:
                bad.append((offset, str(error)))
                continue
            there = is_value(values, pixels)
            there = there if are_missing is None else there & ~are_missing
            for channel in range(pixels.num_channels):
                of_channel = values[..., channel][there[..., channel]]
                add_counts(counts, as_counts(channel, *counted_values(of_channel)))
                missing[channel] += values[..., channel].size - of_channel.size
    done = ValueCounts(missing, bad)
    write_part(part, summed(counts), done)
    return done


def as_counts(channel: int, values: np.ndarray, counts: np.ndarray) -> pa.Table:
    """A table COUNTS of a channel. values: float64 (n,). counts: int64 (n,), how often each occurs."""
    return pa.table([np.full(len(values), channel, np.int32), values, counts], COUNTS)


def add_counts(tables: list[pa.Table], new: pa.Table) -> None:
    """Append a table COUNTS; if many rows wait, they are summed, so that the memory does not grow with the images."""
    tables.append(new)
    if len(tables) % _LOOKED_AT == 0 and sum(map(len, tables[1:])) > _MOST_WAITING:
        tables[:] = [summed(tables)]


def summed(tables: list[pa.Table]) -> pa.Table:
    """A table COUNTS with each value of a channel once, in ascending order."""
    together = pa.concat_tables(tables)
    channels, values, counts = (together[name].to_numpy() for name in COUNTS.names)
    parts = [COUNTS.empty_table()]
    # Not by Arrow's group_by, which takes minutes: rounded values have its worst hashes.
    for channel in np.unique(channels).tolist():
        there, places = np.unique(values[channels == channel], return_inverse=True)
        of_each = np.bincount(places, counts[channels == channel]).astype(np.int64)
        parts.append(as_counts(channel, there, of_each))
    return pa.concat_tables(parts)


def total_of(tables: list[pa.Table], channel: int) -> tuple[np.ndarray, np.ndarray]:
    """(values, how often each occurs) of a channel, in ascending order."""
    table = summed(tables)
    table = table.filter(pc.equal(table["channel"], channel))
    return table["value"].to_numpy(), table["count"].to_numpy()


def is_value(values: np.ndarray, pixels: Pixels) -> np.ndarray:
    """Which values are neither NaN nor nodata, bool (H, W, C)."""
    there = ~np.isnan(values) if values.dtype.kind == "f" else np.ones(values.shape, bool)
    return there if pixels.nodata is None else there & (values != pixels.nodata)


def counted_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct values, float64; how often each occurs) of (n,), rounded where there are too many to be counted
    exactly.
    """
    kind = values.dtype
    if kind.kind in "uib" and kind.itemsize <= 2:
        low = int(FULL_RANGE[kind.name][0])
        counts = np.bincount(values.astype(np.int64) - low)
        found = np.flatnonzero(counts)
        return found + np.float64(low), counts[found]
    floats = (values if kind.kind == "f" else values.astype(np.float64)) + 0  # -0 becomes 0.
    about = np.finfo(floats.dtype)
    if (dropped := about.nmant - _FRACTION_BITS[kind.kind]) > 0:
        # To the nearest one with zeros in the last bits; the largest value would become infinity.
        bits = floats.view(f"u{floats.itemsize}")
        floats = (((bits >> (dropped - 1)) + 1 >> 1) << dropped).view(floats.dtype).clip(about.min, about.max)
    found, counts = np.unique(floats, return_counts=True)
    return found.astype(np.float64), counts


def with_values(pixels: Pixels, values: Sequence[str], totals: Sequence[tuple[np.ndarray, np.ndarray]]) -> Pixels:
    """The pixels with a range by `values`, as of `measure_values`, and the mean and deviation within it. totals: by
    channel, `total_of`.
    """
    if list(values) == ["full"]:
        full = Pixels.full_range(pixels.channels, pixels.type)
        lows, highs = list(full.low), list(full.high)
    elif list(values) == ["percentiles"]:
        lows, highs = map(list, zip(*(_percentiles(*total) for total in totals), strict=True))
    else:
        numbers = [float(number) for number in values] * (pixels.num_channels if len(values) == 2 else 1)
        lows, highs = numbers[::2], numbers[1::2]
    means, stds = [], []
    for low, high, (there, total) in zip(lows, highs, totals, strict=True):
        scaled = (np.clip(there, low, high) - low) / (high - low)
        mean = float(np.average(scaled, weights=total))
        means.append(mean)
        stds.append(max(float(np.sqrt(np.average((scaled - mean) ** 2, weights=total))), 1e-6))
    return replace(pixels, low=tuple(lows), high=tuple(highs), mean=tuple(means), std=tuple(stds))


def _percentiles(values: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """The values below and above which a share BEYOND of all lies: numpy's quantiles by method="inverted_cdf"."""
    below = np.cumsum(counts)
    low, high = (float(values[np.searchsorted(below, share * below[-1])]) for share in (BEYOND, 1 - BEYOND))
    return (low, high) if low < high else (low, low + 1)
