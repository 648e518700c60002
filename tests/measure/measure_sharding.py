"""Speed of sharding beside webdataset's ShardWriter, MosaicML's MDSWriter and img2dataset, on the same images.

    python tests/measure/measure_sharding.py photos.tar --images 2000 --rounds 5

Others are measured if they are installed (pip install '.[bench]').
"""

import argparse
import hashlib
import io
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import of_jpegs
from contestants import Contestant, report
from other_loaders import write_mosaic

from data_tools.bench.record import BenchRecord
from data_tools.sharding.shard import make_jobs, make_plan
from data_tools.sharding.write_shard import write_shard
from data_tools.sources import list_source
from data_tools.sources.split_files import PARTS
from pipeline.base.words import counted
from pipeline.settings.commands.data import ShardConfig

_SHORT, _QUALITY, _PER_SHARD = 256, 95, 500
_OURS = "pandas"  # Imported before timing, because pyarrow imports it, which takes half a second.
Files = Sequence[tuple[Path, int]]
# (files, folder, number of this process) -> None; writes the files' shards into the folder.
Write = Callable[[Files, Path, int], None]


def run(config: argparse.Namespace, record: BenchRecord, folder: Path) -> None:
    """Measure and print. Tasks are plain processes, without Ray, whose start takes a few seconds."""
    files = of_jpegs.write_raw(Path(config.source), folder / "raw", config.images)
    torch.set_num_threads(1)
    all_cores = len(os.sched_getaffinity(0))
    numbers = [2**power for power in range(all_cores.bit_length())]
    contestants = [one for cores in numbers for one in _contestants(files, folder, cores)]
    report(contestants, config.rounds, record, f"{counted(config.images, 'JPEG')} in shards of {_PER_SHARD}")


def _contestants(files: Files, folder: Path, cores: int) -> Iterator[Contestant]:
    raw, out = folder / "raw", folder / "out"
    small = f"JPEG, short side {_SHORT}"
    num_bytes = sum(path.stat().st_size for path, _ in files)

    def one(name: str, about: Sequence[str], module: str, work: Callable[[], Iterator[int]]) -> Contestant:
        name = f"{name}, {counted(cores, 'core')}"
        return Contestant(name, about, cores, work, module, prepare=partial(_level_start, out, num_bytes))

    def ours(**settings: Any) -> Callable[[], Iterator[int]]:
        config = ShardConfig(source=str(raw), out=str(out), samples_per_shard=_PER_SHARD, **settings)
        return partial(_ours, config, cores)

    copied = ("bytes copied", "", "")
    yield one("ours, inspect=header", ("bytes copied", "header only", ""), _OURS, ours(inspect="header"))
    yield one("ours, inspect=decode", ("bytes copied", "libjpeg-turbo", ""), _OURS, ours())
    peers: list[tuple[str, str, Write]] = [
        ("ShardWriter", "webdataset", _write),
        ("ShardWriter + fsync", "webdataset", partial(_write, finish=_sync)),
        ("ShardWriter + fsync + SHA-256", "webdataset", partial(_write, finish=_sync_and_hash)),
        ("MDSWriter", "streaming", _write_mosaic),
        ("MDSWriter, hashes=sha256", "streaming", partial(_write_mosaic, hashes=("sha256",))),
    ]
    for name, module, write in peers:
        yield one(name, copied, module, partial(_in_processes, files, out, cores, write))
    for method in ("area", "antialias"):
        work = ours(resize_short=_SHORT, resize_filter=method, jpeg_quality=_QUALITY)
        yield one(f"ours, resized, {method}", (small, "libjpeg-turbo", method), _OURS, work)
    work = partial(_in_processes, files, out, cores, partial(_write, encode=_shrunk))
    yield one("ShardWriter + Pillow", (small, "Pillow", "antialias"), "webdataset", work)
    yield one("img2dataset", (small, "OpenCV", "area"), "img2dataset", partial(_img2dataset, files, out, cores))


def _level_start(out: Path, num_bytes: int) -> None:
    """Give every contestant the same start: no output of another that waits to be written, and as much recently used memory.

    A virtual machine may take three times as long to fill memory that was unused for a while, so that the contestant after
    a large output would have an advantage.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    block = bytes(2**20)
    with open(out / "memory", "wb", buffering=0) as file:
        for _ in range(-(-num_bytes // len(block))):
            file.write(block)
    (out / "memory").unlink()


def _ours(config: ShardConfig, cores: int) -> Iterator[int]:
    out = Path(config.out)
    listing = list_source(Path(config.source), config, out / "staging")
    (out / PARTS).mkdir()
    jobs = make_jobs(listing, make_plan(listing, config), config, out, {})
    if cores == 1:
        yield sum(write_shard(job).shard.samples for job in jobs)
    else:
        with multiprocessing.get_context("fork").Pool(cores) as pool:
            yield sum(done.shard.samples for done in pool.imap_unordered(write_shard, jobs))
            pool.close()
            pool.join()


def _in_processes(files: Files, out: Path, cores: int, write: Write) -> Iterator[int]:
    """Run `write` in `cores` processes, each with an equal share of the files."""
    workers = [
        multiprocessing.get_context("fork").Process(target=write, args=(files[i::cores], out, i))
        for i in range(1, cores)
    ]
    for worker in workers:
        worker.start()
    write(files[::cores], out, 0)
    for worker in workers:
        worker.join()
        if worker.exitcode:
            raise RuntimeError(f"a process failed with exit code {worker.exitcode}")
    yield len(files)


def _write(
    files: Files,
    out: Path,
    number: int,
    encode: Callable[[Path], bytes] = Path.read_bytes,
    finish: Callable[[str], None] | None = None,
) -> None:
    """Write by ShardWriter. finish: called with the path of each complete shard."""
    import webdataset

    with webdataset.ShardWriter(f"{out}/{number}-%06d.tar", maxcount=_PER_SHARD, verbose=0, post=finish) as sink:
        for path, label in files:
            sink.write({"__key__": path.stem, "jpg": encode(path), "cls": label})


def _sync(shard: str) -> None:
    with open(shard, "rb") as file:
        os.fsync(file.fileno())


def _sync_and_hash(shard: str) -> None:
    """The guarantees of our shards. ShardWriter has no hook for the bytes as they are written, so the file is read again."""
    with open(shard, "rb") as file:
        os.fsync(file.fileno())
        hashlib.file_digest(file, "sha256")


def _write_mosaic(files: Files, out: Path, number: int, hashes: Sequence[str] = ()) -> None:
    write_mosaic(files, out / str(number), hashes)


def _shrunk(path: Path) -> bytes:
    image = Image.open(path).convert("RGB")
    scale = _SHORT / min(image.size)
    if scale < 1:
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()


def _img2dataset(files: Files, out: Path, cores: int) -> Iterator[int]:
    """Run img2dataset on file:// URLs, to measure no network. Its start-up is included."""
    from img2dataset import download

    urls = out.with_name("urls.txt")
    urls.write_text("".join(f"{path.resolve().as_uri()}\n" for path, _ in files))
    download(
        url_list=str(urls), output_folder=str(out), output_format="webdataset", input_format="txt", image_size=_SHORT,
        resize_mode="keep_ratio", resize_only_if_bigger=True, encode_quality=_QUALITY, processes_count=cores,
        thread_count=2 * cores, number_sample_per_shard=_PER_SHARD, enable_wandb=False,
    )  # fmt: skip
    yield len(files)


if __name__ == "__main__":
    of_jpegs.main(__doc__, "shard", run)
