"""Speed of the loader, of decoding alone, and of other loaders, alternately, on the same images.

    python tests/measure/measure_loading.py photos.tar --images 4000 --rounds 5

Each line shows the output, the decoder and the resize filter; compare only lines that agree in these. Others are measured if they are
installed (pip install '.[bench]'). On a busy machine, compare images per CPU second.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import of_jpegs
import other_loaders
from contestants import Contestant, report

from data_tools.bench.record import BenchRecord
from data_tools.sharding import shard
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import Split, open_dataset
from pipeline.data.loading import jpeg_region
from pipeline.data.loading.loader import Loader, train_requests
from pipeline.data.loading.order import SampleOrder
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.views import ViewWriter, train_view
from pipeline.settings.commands.data import ShardConfig
from pipeline.settings.run import AugmentConfig

_SHORT = 256
_LATE_STEP = 1_000_000
_MAX_THREADS = 16
_WHOLE, _REGION, _PILLOW = "libjpeg-turbo", "libjpeg-turbo, region", "Pillow"


def run(config: argparse.Namespace, record: BenchRecord, folder: Path) -> None:
    """Measure and print. folder: the images are written there in every layout. Raises UserError for fewer images than two batches."""
    if config.images < 2 * config.batch:
        raise UserError(f"images = {config.images} must be at least two batches of {config.batch}.")
    files = of_jpegs.write_raw(Path(config.source), folder / "raw", config.images)
    splits = {name: write_shards(folder, short) for name, short in (("full size", 0), (f"{_SHORT} px", _SHORT))}
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    contestants = [*_ours(config, splits, cores), *_others(config, folder, files, splits["full size"], cores)]
    mean = np.mean([path.stat().st_size for path, _ in files]) / 1000
    what = f"{counted(config.images, 'JPEG')} of {mean:.0f} KB on average, batch {config.batch}, {config.image_size} px, {counted(cores, 'core')}"
    report(contestants, config.rounds, record, what)


def write_shards(folder: Path, short: int) -> Split:
    """Write what `of_jpegs.write_raw` wrote to folder/raw into shards. short: as `resize_short`."""
    path = folder / f"shards{short}"
    shard.run(
        ShardConfig(
            source=str(folder / "raw"), out=str(path), inspect="header", resize_short=short, samples_per_shard=256
        )
    )
    return open_dataset(path).split("train")


def _ours(config: argparse.Namespace, splits: dict[str, Split], cores: int) -> Iterator[Contestant]:
    full = splits["full size"]

    def loader(
        name: str,
        method: str,
        region: bool,
        split: Split = full,
        threads: int = cores,
        step: int = 0,
        processes: int = 0,
    ) -> Contestant:
        about = ("uint8", _REGION if region else _WHOLE, method)
        work = partial(load_batches, split, _view(config, method, region), config.batch, threads, step, processes)
        return Contestant(name, about, cores, work)

    def alone(name: str, method: str, region: bool) -> Contestant:
        about = ("uint8", _REGION if region else _WHOLE, method)
        work = partial(decode_alone, full, _view(config, method, region), config.batch, cores)
        return Contestant(name, about, cores, work)

    if jpeg_region.is_available():
        yield alone("decode + resize alone, region", "linear", True)
        yield loader("our loader", "linear", True)
        yield loader(f"our loader, from step {_LATE_STEP:,}", "linear", True, step=_LATE_STEP)
        yield loader(f"our loader, {counted(cores, 'process')}", "linear", True, processes=cores)
        threads = 2 * cores
        while threads <= _MAX_THREADS:
            yield loader(f"our loader, {counted(threads, 'thread')}", "linear", True, threads=threads)
            threads *= 2
        yield loader(f"our loader, shards of {_SHORT} px", "linear", True, split=splits[f"{_SHORT} px"])
        yield alone("decode + resize alone, region, antialias", "antialias", True)
        yield loader("our loader, antialias", "antialias", True)
    yield alone("decode + resize alone, whole images", "linear", False)
    yield loader("our loader, whole images", "linear", False)
    yield loader("our loader, whole images, antialias", "antialias", False)
    yield loader(f"our loader, whole images, shards of {_SHORT} px", "linear", False, split=splits[f"{_SHORT} px"])


def _others(
    config: argparse.Namespace, folder: Path, files: Sequence[tuple[Path, int]], split: Split, cores: int
) -> Iterator[Contestant]:
    litdata, mosaic = folder / "litdata", folder / "mosaic"
    for name, write, path in (
        ("litdata", other_loaders.write_litdata, litdata),
        ("mosaic", other_loaders.write_mosaic, mosaic),
    ):
        try:
            write(files, path)
        except ImportError as error:
            print(f"{name}: not measured, {error}")
    size = (config.image_size, config.batch, cores)
    views: list[tuple[str, other_loaders.View, Sequence[str]]] = [
        ("", other_loaders.linear, ("uint8", _WHOLE, "linear")),
        (", antialias", other_loaders.antialias, ("uint8", _WHOLE, "antialias")),
        (", Pillow", other_loaders.pillow_float, ("float32", _PILLOW, "antialias")),
    ]
    for suffix, view, about in views:
        readers: dict[str, tuple[str, Callable[[], Iterator[int]]]] = {
            "files + DataLoader": ("torch.utils.data", partial(other_loaders.read_files, files, view, *size)),
            "webdataset": ("webdataset", partial(other_loaders.read_webdataset, split.shard_paths, view, *size)),
            "LitData": ("litdata", partial(other_loaders.read_litdata, litdata, view, *size)),
            "MosaicML streaming": ("streaming", partial(other_loaders.read_mosaic, mosaic, view, *size)),
            "Grain": ("grain", partial(other_loaders.read_grain, files, view, *size)),
        }
        if view is not other_loaders.pillow_float:
            readers["SPDL"] = "spdl.pipeline", partial(other_loaders.read_spdl, files, view, *size)
        for name, (module, read) in readers.items():
            yield Contestant(name + suffix, about, cores, read, module)
    for suffix, method in (("", "linear"), (", antialias", "antialias")):
        work = partial(other_loaders.read_dali, files, method == "antialias", *size)
        yield Contestant(f"DALI{suffix}", ("uint8", _REGION, method), cores, work, "nvidia.dali.fn")


def _view(config: argparse.Namespace, method: str, region: bool) -> ViewWriter:
    return train_view(AugmentConfig(resize_filter=method), 0, config.image_size, by_region=region)  # type: ignore[arg-type]


def load_batches(
    split: Split, view: ViewWriter, batch: int, threads: int, first_step: int = 0, processes: int = 0
) -> Iterator[int]:
    """Yield the size of each batch of our loader. batch: images of one."""
    order = SampleOrder(split.shard_sizes, 0, batch, 1, 4096)
    requests = train_requests(order, first_step, first_step + len(split) // batch, batch, 0, 1)
    with Loader(split, view, threads, 4, 0.0, processes=processes) as loader:
        for found in loader.batches(requests):
            yield len(found.rows)


def decode_alone(split: Split, view: ViewWriter, batch: int, threads: int) -> Iterator[int]:
    """Make views of images in memory on `threads` threads, without a loader."""
    reader = ShardReader(split)
    images = [reader.read(row) for row in range(len(split))]

    def work(rows: range) -> int:
        sides = [(height, width) for count, height, width in view.shapes for _ in range(count)]
        outs = [np.empty((*side, view.pixels.num_channels), view.pixels.batch_type) for side in sides]
        for row in rows:
            view.write(images[row], outs, 0, row)
        return len(rows)

    parts = [range(first, min(first + batch, len(split))) for first in range(0, len(split), batch)]
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(work, parts)


if __name__ == "__main__":
    of_jpegs.main(__doc__, "data", run)
