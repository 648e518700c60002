"""Speed of our loader and of sharding beside other programs, on the same JPEGs: the numbers in docs/benchmarks.md.

    python tests/measure/measure_loading.py loading photos.tar --images 4000 --rounds 5
    python tests/measure/measure_loading.py sharding photos.tar --images 4000 --rounds 5

Contestants take turns, each in a process of its own, so that they share no threads, caches or shared memory. Others are
measured if they are installed (pip install '.[bench]'). Compare only lines of the same decoder and filter; on a busy
machine, images per CPU second.
"""

import argparse
import hashlib
import importlib
import io
import math
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from tiny import train_view

from data_tools.bench.apart import Row, rows_apart
from data_tools.sharding import shard
from data_tools.sharding.write_shard import write_planned
from data_tools.sources import list_source
from data_tools.sources.split_files import PARTS
from pipeline.data.dataset.manifest import Split, open_dataset
from pipeline.data.loading import jpeg_region
from pipeline.data.loading.loader import Loader, train_requests
from pipeline.data.loading.order import SampleOrder
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.views import ANTIALIAS, ViewWriter, resize
from pipeline.settings.command import mistakes_in_one_line
from pipeline.settings.commands.data import ShardConfig
from pipeline.settings.run import AugmentConfig

_SIDE, _BATCH, _SHORT, _PER_SHARD, _SHUFFLED, _CLASSES = 224, 64, 256, 500, 1000, 10
_MEAN, _DEVIATION = (torch.tensor(x)[:, None, None] for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
# (path, class)
Files = Sequence[tuple[Path, int]]
# (bytes of a JPEG, side) -> the view.
View = Callable[[bytes, int], Any]


# ---------------------------------------------------------------------- timing
@dataclass(frozen=True)
class Contestant:
    """run: does the work, and yields the number of images of each batch. module: imported, and prepare: called, before
    timing starts.
    """

    name: str
    run: Callable[[], Iterable[int]]
    cores: int
    module: str = "sys"
    prepare: Callable[[], object] = lambda: None


def race(contestants: Sequence[Contestant], rounds: int) -> dict[str, tuple[float, ...] | str]:
    """Returns medians (images/s without the first third of the batches, images per CPU second), or why it was not
    measured.
    """
    found: dict[str, list[tuple[float, ...]]] = {contestant.name: [] for contestant in contestants}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name, contestant in ((one.name, one) for one in contestants if one.name not in failed):
            row = next(rows_apart(_timed, (contestant,), 86_400.0))
            if "failed" in row:
                failed[name] = row["failed"]
            else:
                found[name].append((row["rate"], row["per_cpu"]))
            print(f"round {number + 1}: {name}: {failed.get(name) or found[name][-1]}", flush=True)
    return {
        name: failed.get(name) or tuple(map(statistics.median, zip(*times, strict=True)))
        for name, times in found.items()
    }


def _timed(contestant: Contestant) -> Iterator[Row]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: contestant.cores])
    importlib.import_module(contestant.module)
    contestant.prepare()
    before, started = _cpu_seconds(), time.perf_counter()
    counts, times = [0], [0.0]
    for count in contestant.run():
        counts.append(count)
        times.append(time.perf_counter() - started)
    used = _cpu_seconds() - before
    begin = max(len(times) > 2, (len(times) - 1) // 3)
    yield {"rate": sum(counts[begin + 1 :]) / (times[-1] - times[begin]), "per_cpu": sum(counts) / used}


def _cpu_seconds() -> float:
    """User and system time of this process and of its finished children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


# ---------------------------------------------------------------------- images
def read_raw(source: Path, images: int) -> list[bytes]:
    """Read `images` JPEGs of a folder or tar, repeating them."""
    if source.is_dir():
        found = [path.read_bytes() for path in islice(sorted(source.rglob("*.jp*g")), images)]
    else:
        with tarfile.open(source) as tar:
            members = (member for member in tar if member.name.lower().endswith((".jpg", ".jpeg")))
            found = [tar.extractfile(member).read() for member in islice(members, images)]  # type: ignore[union-attr]
    return list(islice(cycle(found), images))


def write_raw(source: Path, folder: Path, images: int) -> Files:
    """Write `images` files folder/<class>/<number>.jpg."""
    files = [
        (folder / f"class{number % _CLASSES}" / f"{number:06d}.jpg", number % _CLASSES) for number in range(images)
    ]
    for (path, _), data in zip(files, read_raw(source, images), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return files


# ---------------------------------------------------------------------- our loader
def loading(files: Files, folder: Path) -> Iterator[Contestant]:
    cores = len(os.sched_getaffinity(0))
    full, small = (_shards(folder, short) for short in (0, _SHORT))
    for method, region in (("linear", True), ("antialias", True), ("linear", False), ("antialias", False)):
        about = f"{'region' if region else 'whole'}, {method}"
        view = _view(method, region)
        for name, work in (("decode + resize alone", decode_alone), ("our loader", load_batches)):
            yield Contestant(f"{name}, {about}", partial(work, full, view, _BATCH, cores), cores)
    work = partial(load_batches, small, _view("linear", True), _BATCH, cores)
    yield Contestant(f"our loader, region, linear, {_SHORT} px", work, cores)
    yield from _others(files, full.shard_paths, cores)


def _shards(folder: Path, short: int) -> Split:
    out = str(folder / f"shards{short}")
    source = str(folder / "raw")
    shard.run(ShardConfig(source=source, out=out, inspect="header", resize_short=short, samples_per_shard=256))
    return open_dataset(out).split("train")


def _view(method: Any, region: bool) -> ViewWriter:
    view = train_view(AugmentConfig(resize_filter=method), 0, _SIDE)

    def write_whole(*arguments: Any) -> None:
        jpeg_region._LIBRARY = None  # Of the contestant's own process.
        view.write(*arguments)

    return view if region else replace(view, write=write_whole)


def load_batches(split: Split, view: ViewWriter, batch: int, threads: int) -> Iterator[int]:
    """Yields the number of images of each batch of our loader."""
    order = SampleOrder(split.shard_sizes, 0, batch, 1, 4096)
    with Loader(split, view, threads, 4, 0.0) as loader:
        for found in loader.batches(train_requests(order, 0, len(split) // batch, batch, 0, 1)):
            yield len(found.rows)


def decode_alone(split: Split, view: ViewWriter, batch: int, threads: int) -> Iterator[int]:
    """Makes views of images in memory, without a loader."""
    reader = ShardReader(split)
    images = [reader.read(row) for row in range(len(split))]

    def work(first: int) -> int:
        sides = [(height, width) for count, height, width in view.shapes for _ in range(count)]
        outs = [np.empty((*side, view.pixels.num_channels), view.pixels.batch_type) for side in sides]
        rows = range(first, min(first + batch, len(split)))
        for row in rows:
            view.write(images[row], outs, 0, row)
        return len(rows)

    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(work, range(0, len(split), batch))


# ---------------------------------------------------------------------- other loaders
def crop(height: int, width: int, least: float = 0.05, most: float = 1.0) -> tuple[int, int, int, int]:
    """Returns a random (top, left, height, width), by the rule of torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = height * width * random.uniform(least, most)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    return 0, 0, height, width


def _opencv(method: str, data: bytes, side: int) -> np.ndarray:
    """uint8 (S, S, 3): simplejpeg, and OpenCV's bilinear filter or our antialias filter."""
    pixels = simplejpeg.decode_jpeg(data)
    top, left, height, width = crop(*pixels.shape[:2])
    pixels = pixels[top : top + height, left : left + width]
    view = cv2.resize(pixels, (side, side)) if method == "linear" else resize(pixels, (side, side), ANTIALIAS)
    return cv2.flip(view, 1) if random.random() < 0.5 else view


def _pillow(data: bytes, side: int) -> torch.Tensor:
    """float32 (3, S, S), normalised: the Pillow and torch calls of torchvision's usual training transforms."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    top, left, height, width = crop(image.height, image.width)
    image = image.crop((left, top, left + width, top + height)).resize((side, side), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
    return pixels.sub_(_MEAN).div_(_DEVIATION)


def _others(files: Files, shards: Sequence[str], cores: int) -> Iterator[Contestant]:
    """Other loaders, configured as in their documentation. Each imports its library itself: what is missing is one line
    of the result.
    """
    readers: dict[str, tuple[Callable[..., Iterable[tuple[Any, Any]]], Any, str]] = {
        "files + DataLoader": (read_files, files, "torch"),
        "webdataset": (_read_webdataset, shards, "webdataset"),
        "SPDL": (_read_spdl, files, "spdl"),
    }
    views: dict[str, View] = {
        "whole, linear": partial(_opencv, "linear"),
        "whole, antialias": partial(_opencv, "antialias"),
        "Pillow, float32": _pillow,
    }

    def count(read: Callable[..., Iterable[tuple[Any, Any]]], *arguments: Any) -> Iterator[int]:
        for _, labels in read(*arguments):
            yield len(labels)

    for about, view in views.items():
        for name, (read, source, module) in readers.items():
            if name != "SPDL" or view is not _pillow:
                work = partial(count, read, source, partial(view, side=_SIDE), _BATCH, cores)
                yield Contestant(f"{name}, {about}", work, cores, module)
    for method in ("linear", "antialias"):
        work = partial(count, _read_dali, files, method == "antialias", _SIDE, _BATCH, cores)
        yield Contestant(f"DALI, region, {method}", work, cores, "nvidia.dali.fn")


def _batch(view: Any, part: Files) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(np.stack([view(path.read_bytes()) for path, _ in part])), torch.tensor([k for _, k in part])


def read_files(files: Files, view: Any, batch: int, workers: int) -> Iterable[Any]:
    """As torchvision's ImageFolder in a DataLoader."""
    make = partial(_batch, view)
    return torch.utils.data.DataLoader(files, batch, shuffle=True, num_workers=workers, collate_fn=make)


def _read_webdataset(shards: Sequence[str], view: Any, batch: int, workers: int) -> Iterable[Any]:
    import webdataset

    dataset = webdataset.WebDataset(list(shards), shardshuffle=len(shards), seed=0).shuffle(_SHUFFLED)
    dataset = dataset.to_tuple("jpg", "cls").map_tuple(view, int).batched(batch)
    return webdataset.WebLoader(dataset, batch_size=None, num_workers=workers)


def _read_spdl(files: Files, view: Any, batch: int, workers: int) -> Iterable[Any]:
    """One batch per thread, its fastest configuration."""
    from spdl.pipeline import PipelineBuilder

    shuffled = random.Random(0).sample(files, len(files))
    parts = [shuffled[i : i + batch] for i in range(0, len(shuffled), batch)]
    pipeline = PipelineBuilder().add_source(parts).pipe(partial(_batch, view), concurrency=workers).add_sink(4)
    with (built := pipeline.build(num_threads=workers)).auto_stop():
        yield from built


def _read_dali(files: Files, antialias: bool, side: int, batch: int, workers: int) -> Iterable[Any]:
    """On the CPU, with its own decoder (of the crop alone), resizer and random numbers."""
    from nvidia import dali
    from nvidia.dali import fn

    @dali.pipeline_def(batch_size=batch, num_threads=workers, device_id=None, prefetch_queue_depth=4)
    def pipeline() -> tuple[Any, Any]:
        paths, labels = [str(path) for path, _ in files], [label for _, label in files]
        data, label = fn.readers.file(files=paths, labels=labels, random_shuffle=True, name="files")
        image = fn.decoders.image_randomcrop(data, random_area=[0.05, 1.0], random_aspect_ratio=[3 / 4, 4 / 3])
        image = fn.resize(image, size=[side, side], interp_type=dali.types.INTERP_LINEAR, antialias=antialias)
        return fn.flip(image, horizontal=fn.random.coin_flip()), label

    built = pipeline()
    built.build()
    for _ in range(len(files) // batch):
        yield built.run()


# ---------------------------------------------------------------------- sharding
def sharding(files: Files, folder: Path) -> Iterator[Contestant]:
    """Tasks are plain processes, without Ray, whose start takes a few seconds."""
    out = folder / "out"
    for cores in (1, len(os.sched_getaffinity(0))):

        def one(
            name: str, module: str, work: Callable[..., Iterator[int]], *arguments: Any, cores: int = cores
        ) -> Contestant:
            work = partial(work, files, out, cores, *arguments)
            return Contestant(f"{name}, cores: {cores}", work, cores, module, partial(_empty, out))

        yield one("ours, inspect=header", "pandas", _ours, {"inspect": "header"})  # pyarrow imports pandas.
        yield one("ours, inspect=decode", "pandas", _ours, {})
        yield one("ShardWriter", "webdataset", _in_processes, _write)
        yield one("ShardWriter + fsync + SHA-256", "webdataset", _in_processes, partial(_write, finish=_sync_and_hash))
        yield one("ours, resized", "pandas", _ours, {"resize_short": _SHORT})


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _ours(files: Files, out: Path, cores: int, settings: dict[str, Any]) -> Iterator[int]:
    config = ShardConfig(source=str(out.with_name("raw")), out=str(out), samples_per_shard=_PER_SHARD, **settings)
    listing = list_source(Path(config.source), config, out / "staging")
    (out / PARTS).mkdir()
    jobs = shard.make_jobs(listing, shard.make_plan(listing, config, out), config, out, {})
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        yield sum(done.shard.samples for done in pool.imap_unordered(write_planned, jobs))
        pool.close()
        pool.join()


def _in_processes(files: Files, out: Path, cores: int, write: Callable[[Files, Path, int], None]) -> Iterator[int]:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=write, args=(files[i::cores], out, i)) for i in range(cores)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert not worker.exitcode
    yield len(files)


def _write(files: Files, out: Path, number: int, finish: Any = None) -> None:
    """Write by ShardWriter. finish: called with the path of each complete shard."""
    import webdataset

    with webdataset.ShardWriter(f"{out}/{number}-%06d.tar", maxcount=_PER_SHARD, verbose=0, post=finish) as sink:
        for path, label in files:
            sink.write({"__key__": path.stem, "jpg": path.read_bytes(), "cls": label})


def _sync_and_hash(path: str) -> None:
    """The guarantees of our shards. ShardWriter has no hook for the bytes as they are written, so the file is read
    again.
    """
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        hashlib.file_digest(file, "sha256")


def print_table(results: dict[str, tuple[float, ...] | str]) -> None:
    print("\n| | images/s | images per CPU second |\n|---|---|---|")
    for contestant, found in results.items():
        cells = found if isinstance(found, str) else " | ".join(f"{number:,.0f}" for number in found)
        print(f"| {contestant} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=("loading", "sharding"))
    parser.add_argument("source", type=Path, help="folder or tar of JPEGs")
    parser.add_argument("--images", type=int, default=4000, help="those of source are repeated")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    with mistakes_in_one_line(), tempfile.TemporaryDirectory() as name:
        files = write_raw(given.source, Path(name) / "raw", given.images)
        measure = loading if given.subject == "loading" else sharding
        results = race(list(measure(files, Path(name))), given.rounds)
    print_table(results)


if __name__ == "__main__":
    main()
