"""Sharding, beside webdataset's ShardWriter and img2dataset, on the same images."""

import io
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from PIL import Image

from data_tools.bench.corpus import write_raw
from data_tools.bench.measure import Contestant, race, table
from data_tools.shard import make_plan
from data_tools.sources import list_source
from data_tools.write_shard import Job, write_shard
from pipeline.data_config import BenchConfig, ShardConfig

_COLUMNS = ("output", "decoder", "filter")
_SHORT, _QUALITY, _PER_SHARD = 256, 95, 256
_OURS = "pandas"  # pyarrow imports it on the way, which takes half a second once.
Files = Sequence[tuple[Path, int]]


def run(config: BenchConfig, folder: Path) -> None:
    """Measure and print. Tasks are plain processes here: what Ray adds is a few seconds at the start, once."""
    raw = folder / "raw"
    files = write_raw(Path(config.source), raw, config.images)
    contestants = []
    for cores in range(1, len(os.sched_getaffinity(0)) + 1):
        if cores & (cores - 1):
            continue
        on = f", {cores} cores" if cores > 1 else ", 1 core"
        copies, small = ("bytes copied", "", ""), f"JPEG, short side {_SHORT}"
        ours, theirs = partial(_ours, raw, folder, cores), partial(_in_processes, files, folder, cores)
        contestants += [
            Contestant(
                f"ours, headers read{on}", ("bytes copied", "header only", ""), cores, partial(ours, 0, "header"), _OURS
            ),
            Contestant(
                f"ours, all decoded{on}",
                ("bytes copied", "libjpeg-turbo", ""),
                cores,
                partial(ours, 0, "decode"),
                _OURS,
            ),
            Contestant(f"ShardWriter{on}", copies, cores, partial(theirs, _copied), "webdataset"),
            Contestant(
                f"ours, resized{on}", (small, "libjpeg-turbo", "area"), cores, partial(ours, _SHORT, "header"), _OURS
            ),
            Contestant(
                f"ShardWriter + Pillow{on}",
                (small, "Pillow", "antialias"),
                cores,
                partial(theirs, _shrunk),
                "webdataset",
            ),
            Contestant(
                f"img2dataset{on}",
                (small, "OpenCV", "area"),
                cores,
                partial(_img2dataset, files, folder, cores),
                "img2dataset",
            ),
        ]
    results = race(contestants, config.rounds)
    print(f"\n{config.images:,} JPEGs in shards of {_PER_SHARD}; medians of {config.rounds} rounds, in turns\n")
    print(table(contestants, results, _COLUMNS))


def _ours(raw: Path, folder: Path, cores: int, short: int, inspect: str) -> Iterator[int]:
    out = _emptied(folder / "ours")
    config = ShardConfig(source=str(raw), out=str(out), samples_per_shard=_PER_SHARD)
    listing = list_source(raw, config, folder / "staging")
    plan = make_plan(listing, config)
    (out / ".parts").mkdir()
    jobs = [
        Job(
            source=str(raw),
            out=str(out),
            name=name,
            split=split,
            rows=listing.rows(plan.order[first:last]),
            resize_short=short,
            jpeg_quality=_QUALITY,
            whole=inspect == "decode",
            known=None,
        )
        for name, split, (first, last) in zip(plan.names, plan.splits, plan.bounds, strict=True)
    ]
    if cores == 1:
        yield sum(write_shard(job).shard.samples for job in jobs)
    else:
        with multiprocessing.get_context("fork").Pool(cores) as pool:
            yield sum(done.shard.samples for done in pool.imap_unordered(write_shard, jobs))
            pool.close()
            pool.join()


def _in_processes(files: Files, folder: Path, cores: int, encode: Callable[[Path], bytes]) -> Iterator[int]:
    """ShardWriter in so many processes, each with its share of the files."""
    out = _emptied(folder / "webdataset")
    workers = [
        multiprocessing.get_context("fork").Process(target=_write, args=(files[i::cores], out, i, encode))
        for i in range(1, cores)
    ]
    for worker in workers:
        worker.start()
    _write(files[::cores], out, 0, encode)
    for worker in workers:
        worker.join()
    yield len(files)


def _write(files: Files, out: Path, number: int, encode: Callable[[Path], bytes]) -> None:
    import webdataset

    with webdataset.ShardWriter(f"{out}/{number}-%06d.tar", maxcount=_PER_SHARD, verbose=0) as sink:
        for path, label in files:
            sink.write({"__key__": path.stem, "jpg": encode(path), "cls": label})


def _copied(path: Path) -> bytes:
    return path.read_bytes()


def _shrunk(path: Path) -> bytes:
    image = Image.open(path).convert("RGB")
    scale = _SHORT / min(image.size)
    if scale < 1:
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()


def _img2dataset(files: Files, folder: Path, cores: int) -> Iterator[int]:
    """From file:// addresses, so no network is measured; its start-up is."""
    from img2dataset import download

    out = _emptied(folder / "img2dataset")
    urls = folder / "urls.txt"
    urls.write_text("".join(f"{path.resolve().as_uri()}\n" for path, _ in files))
    download(
        url_list=str(urls), output_folder=str(out), output_format="webdataset", input_format="txt", image_size=_SHORT,
        resize_mode="keep_ratio", resize_only_if_bigger=True, encode_quality=_QUALITY, processes_count=cores,
        thread_count=2 * cores, number_sample_per_shard=_PER_SHARD, enable_wandb=False,
    )  # fmt: skip
    yield len(files)


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
