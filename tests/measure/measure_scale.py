"""Start-up, memory, seek and order of a data set of any size, without its images: the numbers in docs/data_format.md.

    python tests/measure/measure_scale.py FOLDER 14200000 4057
    python tests/measure/measure_scale.py FOLDER 14200000 4057 ranks 512
    python tests/measure/measure_scale.py FOLDER 1000000000 4057 host 1
    python tests/measure/measure_scale.py - 14200000 1000 balance 8

The numbers are of samples, and of samples a shard; FOLDER is made once. Keys and checksums repeat, and the shards are
empty files. "ranks" counts what 512 ranks ask a file system for at their start; "host" starts 8 ranks at a late step,
and counts their memory. Its last number is data.balance, and a set that it makes has almost nothing on disk: of its
samples, a tenth has labels. "balance" is of data.balance=0.5
on a host of 8 ranks; its labels repeat after 134 million.
"""

import builtins
import contextlib
import gc
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.data.dataset.manifest import (
    FORMAT,
    INFO,
    SAMPLES,
    SAMPLES_FILE,
    SHARDS,
    SHARDS_FILE,
    open_dataset,
    sign_tables,
)
from pipeline.data.dataset.mapped_index import COLUMNS, describe_index
from pipeline.data.loading.balance import ClassBalance
from pipeline.data.loading.order import SampleOrder, order_of_split
from pipeline.data.storage.cache import Storage
from pipeline.data.storage.tars import check_tars_on_all_ranks
from pipeline.settings.run import DataConfig

BATCH, STREAMS, WINDOW, CLASSES, GROUP = 4096, 16, 4096, 21_841, 2**18


def make(path: Path, num_samples: int, per_shard: int) -> None:
    """A manifest as write_dataset makes it, but a row group at a time, and its index."""
    make_shards(path, num_samples, per_shard)
    with pq.ParquetWriter(
        path / SAMPLES_FILE, SAMPLES, compression="zstd", use_dictionary=["split", "ext", "shard"]
    ) as writer:
        group = samples(per_shard)
        for first in range(0, num_samples, GROUP):
            writer.write_table(group.slice(0, num_samples - first))
    describe(path, num_samples)
    open_dataset(path).index("train")


def make_sparse(path: Path, num_samples: int, per_shard: int) -> None:
    """The same without samples.parquet, with holes for most of the index."""
    make_shards(path, num_samples, per_shard)
    pq.write_table(samples(per_shard).slice(0, 0), path / SAMPLES_FILE)
    describe(path, num_samples)
    (folder,) = open_dataset(path).index_folders("train")[:1]
    folder.mkdir(parents=True)
    num_labels = num_samples // 10
    lengths = {"label_starts": num_samples + 1, "labels": num_labels, "targets": 0}
    for column, dtype in COLUMNS.items():
        with open(folder / column, "wb") as file:
            file.truncate(lengths.get(column, num_samples) * np.dtype(dtype).itemsize)
    for column, values in (("label_starts", np.arange(num_labels + 1)), ("labels", np.arange(num_labels) % CLASSES)):
        with open(folder / column, "r+b") as file:
            file.seek(-values.size * np.dtype(COLUMNS[column]).itemsize, os.SEEK_END)
            values.astype(COLUMNS[column]).tofile(file)
    describe_index(folder, 1)


def make_shards(path: Path, num_samples: int, per_shard: int) -> None:
    path.mkdir(parents=True)
    sizes = np.minimum(per_shard, num_samples - np.arange(0, num_samples, per_shard))
    names = [f"train-{number:07d}.tar" for number in range(len(sizes))]
    for name in names:
        (path / name).touch()
    columns = [names, ["train"] * len(sizes), sizes, np.zeros(len(sizes), np.int64), [""] * len(sizes)]
    pq.write_table(pa.table(dict(zip(SHARDS.names, columns, strict=True)), SHARDS), path / SHARDS_FILE)


def describe(path: Path, num_samples: int) -> None:
    info = {
        "format": FORMAT,
        "fingerprint": "0" * 16,
        "samples": {"train": num_samples},
        "files": sign_tables(path),
        "classes": [f"class{number}" for number in range(CLASSES)],
    }
    (path / INFO).write_text(json.dumps(info))


def samples(per_shard: int) -> pa.Table:
    rows, zeros = np.arange(GROUP), pa.array(np.zeros(GROUP, np.int32))
    labels = pa.ListArray.from_arrays(np.arange(GROUP + 1, dtype=np.int32), (rows % CLASSES).astype(np.int32))
    hashes = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), GROUP, [None, pa.py_buffer(np.random.default_rng(0).bytes(16 * GROUP))]
    )
    sides = [pa.array(np.full(GROUP, side, np.int32)) for side in (500, 375)]
    columns = [
        pa.array([f"n{row % CLASSES:08d}/{row}.jpg" for row in rows.tolist()]),
        pa.array(rows % per_shard * 110_080 + 512),
        pa.array(np.full(GROUP, 109_000)),
        pa.DictionaryArray.from_arrays(zeros, ["jpg"]),
        labels,
        *sides,
        hashes,
        pa.DictionaryArray.from_arrays(zeros, ["train"]),
        pa.array((rows // per_shard).astype(np.int32)),
    ]
    return pa.table(columns, schema=SAMPLES)


def memory() -> str:
    """Of this process: its private pages, and its peak in all."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return f"{private / 1e3:.0f} MB private, peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB"


class OneOfMany:
    """A rank among others that find what it finds."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size


@contextlib.contextmanager
def counting(asked: Counter, seconds: float) -> Iterator[None]:
    """Count what Python asks a file system for, each of which takes so many seconds longer. Bytes include those that
    are read of files, but not of memory maps."""

    def counted(name: str, function: Any) -> Any:
        def call(*of: Any, **named: Any) -> Any:
            asked[name] += 1
            time.sleep(seconds)
            return function(*of, **named)

        return call

    def num_bytes() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    functions = {(os, "stat"): "stat", (os, "open"): "open", (builtins, "open"): "open", (io, "open"): "open"}
    before, read = {place: getattr(*place) for place in functions}, num_bytes()
    for (module, name), shown in functions.items():
        setattr(module, name, counted(shown, before[module, name]))
    try:
        yield
    finally:
        for (module, name), function in before.items():
            setattr(module, name, function)
        asked["bytes"] += num_bytes() - read


def start_ranks(path: Path, num_ranks: int) -> None:
    """The requests of all ranks, one after another, and how long they take the first, middle and last one where each
    takes a millisecond."""

    def start(rank: int) -> None:
        storage = Storage.create(10, "", 0, num_ranks)
        open_dataset(path, storage).split("train")
        check_tars_on_all_ranks(OneOfMany(rank, num_ranks), storage.unchecked or [])

    asked: Counter[str] = Counter()
    for rank in range(num_ranks):
        with counting(asked, 0):
            start(rank)
    seconds = []
    for rank in (0, num_ranks // 2, num_ranks - 1):
        begin = time.perf_counter()
        with counting(Counter(), 1e-3):
            start(rank)
        seconds.append(time.perf_counter() - begin)
    print(f"{num_ranks} ranks: {dict(asked)}; a rank takes {max(seconds):.2f} s at 1 ms a request")


def start_host(path: Path, balance: float) -> None:
    """8 processes open the data set, and order, place and label their share of late batches, as ranks do."""
    command = [sys.executable, __file__, str(path), "0", "0", "rank", str(balance)]
    pipe = subprocess.PIPE
    ranks = [subprocess.Popen([*command, str(rank)], stdin=pipe, stdout=pipe, text=True) for rank in range(8)]
    peak, waiting, begin = Counter[str](), {*ranks}, time.perf_counter()
    while waiting:
        now: Counter[str] = Counter()
        for process in ranks:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]:
                    now[line.split(":")[0]] += int(line.split()[1])
        peak |= now
        time.sleep(0.05)
        waiting = {process for process in ranks if not is_ready(process)}
    print(
        f"8 ranks, balance {balance}: {time.perf_counter() - begin:.1f} s to the first batches; GB in all, at the end"
    )
    print({name: round(now[name] / 1e6, 2) for name in ("Pss_Anon", "Pss_Shmem", "Pss_File")})
    print("and at most", {name: round(peak[name] / 1e6, 2) for name in ("Pss_Anon", "Pss_Shmem", "Pss_File")})
    for process in ranks:
        print(process.communicate("\n")[0].strip())


def is_ready(process: subprocess.Popen) -> bool:
    """Whether a rank sleeps until its standard input ends."""
    return "pipe_read" in Path(f"/proc/{process.pid}/wchan").read_text() or process.poll() is not None


def start_rank(path: Path, balance: float, rank: int) -> None:
    """A rank of `start_host`: steps 1,000,000 to 1,000,015."""
    begin = time.perf_counter()
    storage = Storage.create(10, "", 0, 8)
    split = open_dataset(path, storage).split("train")
    check_tars_on_all_ranks(OneOfMany(rank, 8), storage.unchecked or [])
    opened = time.perf_counter()
    order = order_of_split(split, DataConfig(path=str(path), balance=balance, streams=STREAMS), 0, BATCH)
    for step in range(1_000_000, 1_000_016):
        for row in order.slice(step)[0][rank::8].tolist():
            split.place_of(row), split.hash_of(row), split.labels_of(row)
    print(
        f"rank {rank}: opened in {opened - begin:.2f} s, batches after {time.perf_counter() - begin:.1f} s; {memory()}"
    )
    sys.stdout.flush()
    sys.stdin.read()


def start_up(path: Path) -> None:
    """From the manifest to the address of the first sample, as a rank does it; then batches of steps in other
    epochs.
    """
    print(f"imports: {memory()}")
    begin, cpu = time.perf_counter(), time.process_time()
    split = open_dataset(path).split("train")
    order = SampleOrder(split.shard_sizes, 0, BATCH, STREAMS, WINDOW)
    row = int(order.slice(0)[0][0])
    address = split.shard_paths[int(split.shard_of(np.asarray(row)))], *split.place_of(row)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    print(f"first address {address} after {seconds:.2f} s ({cpu:.2f} s of CPU); {memory()}")
    every = order.num_samples / BATCH
    for what, steps in (("seek", range(1, 8)), ("next step", range(64))):
        times = []
        for step in steps:
            begin, cpu = time.perf_counter(), time.process_time()
            order.slice(int((step + 0.37) * every) if what == "seek" else int(7.37 * every) + 1 + step)
            times.append([1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - cpu)])
        print(f"{what}: {np.median(times, 0).round(2)} ms by the clock and of CPU, worst {np.max(times, 0).round(2)}")


class Labels:
    """The labels of a file, again and again."""

    def __init__(self, file: str, num_samples: int) -> None:
        self.labels, self.num_samples = np.memmap(file, np.int32, "r"), num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, rows: slice) -> np.ndarray:
        first = rows.start % len(self.labels)
        return self.labels[first : first + rows.stop - rows.start]


def balanced(num_samples: int, per_shard: int, num_ranks: int) -> None:
    """Classes of 66 to 16,583 at 14.2 M samples; epoch 288 is that of step 1,000,000."""
    with tempfile.NamedTemporaryFile() as file:
        shares = np.cumsum((np.arange(CLASSES) + 300.0) ** -1.2)
        for first in range(0, min(num_samples, 2**27), 2**22):
            drawn = np.random.default_rng(first).random(min(2**22, num_samples - first)) * shares[-1]
            np.searchsorted(shares, drawn).astype(np.int32).tofile(file.file)
        file.flush()
        ranks = [os.fork() or balanced_rank(file.name, num_samples, per_shard, rank) for rank in range(num_ranks)]
        largest = together = on_disk = 0.0
        arrays = os.path.join(tempfile.gettempdir(), f"vit-pipeline-{os.getuid()}", "arrays")
        while len(ended := [pid for pid in ranks if status(pid, "State") == "Z"]) < num_ranks:
            own = [int(status(pid, "RssAnon").split()[0]) / 1e6 for pid in ranks if pid not in ended]
            largest, together = max([largest, *own]), max(together, sum(own))
            files = [os.path.join(at, name) for at, _, names in os.walk(arrays) for name in names]
            with contextlib.suppress(FileNotFoundError):
                on_disk = max(on_disk, sum(512 * os.stat(file).st_blocks for file in files) / 1e9)
            time.sleep(0.05)
        print(f"peaks: {largest:.2f} GB of a rank, {together:.2f} GB of all, {on_disk:.2f} GB of files that they share")


def status(pid: int, field: str) -> str:
    """A field of /proc/PID/status; that of memory is missing when the process has just ended."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return lines.get(field, "0").split()[0]


def balanced_rank(labels: str, num_samples: int, per_shard: int, rank: int) -> NoReturn:
    sizes = np.minimum(per_shard, num_samples - np.arange(0, num_samples, per_shard))
    begin = time.process_time()
    of_samples = Labels(labels, num_samples) if num_samples > 2**27 else np.memmap(labels, np.int32, "r")
    balance = ClassBalance(of_samples, np.concatenate([[0], np.cumsum(sizes)]), 0.5, 0)
    order = SampleOrder(sizes, 0, BATCH, STREAMS, WINDOW, balance)
    said = [f"rank {rank}: start {time.process_time() - begin:.2f} s of CPU"]
    for epoch in (0, 1, 288):
        begin, clock, first = time.process_time(), time.perf_counter(), epoch * num_samples // BATCH + 2
        order.slice(first)
        started, seconds = time.process_time(), time.perf_counter() - clock
        for step in range(200):
            order.slice(first + 1 + step)
        each = (time.process_time() - started) * 5
        said.append(f"epoch {epoch} {started - begin:.2f} s of CPU ({seconds:.1f} s), then {each:.2f} ms a step")
    print(f"{'; '.join(said)}; {status(os.getpid(), 'RssAnon')} kB", flush=True)
    del balance, order
    gc.collect()  # Removes the files.
    os._exit(0)


if __name__ == "__main__":
    folder, num_samples, per_shard = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if sys.argv[4:5] == ["balance"]:
        balanced(num_samples, per_shard, int(sys.argv[5]))
    elif folder.exists():
        match sys.argv[4:]:
            case ["ranks", num_ranks]:
                start_ranks(folder, int(num_ranks))
            case ["host", power]:
                start_host(folder, float(power))
            case ["rank", power, number]:
                start_rank(folder, float(power), int(number))
            case _:
                start_up(folder)
    else:  # What making it took is not what opening it takes: the next start measures.
        (make_sparse if sys.argv[4:5] == ["host"] else make)(folder, num_samples, per_shard)
