"""Start-up, memory, seek and order of a data set of any size, without its images: the numbers in docs/data_format.md.

    python tests/measure/measure_scale.py FOLDER 14200000 4057 make       # samples, samples a shard; see make() for "make sparse"
    python tests/measure/measure_scale.py FOLDER 14200000 4057            # start-up and seeks
    python tests/measure/measure_scale.py FOLDER 14200000 4057 epoch      # and every row of an epoch, one by one
    python tests/measure/measure_scale.py - 14200000 1000 balance         # data.balance=0.5, of labels in memory

Keys and checksums are all alike, and the shards are empty files.
"""

import hashlib
import json
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pipeline.data.dataset import mapped_index  # noqa: E402
from pipeline.data.dataset.manifest import FORMAT, INFO, SAMPLES, SAMPLES_FILE, SHARDS, SHARDS_FILE, open_dataset  # noqa: E402
from pipeline.data.loading.balance import ClassBalance  # noqa: E402
from pipeline.data.loading.order import SampleOrder  # noqa: E402

BATCH, STREAMS, WINDOW = 4096, 16, 4096


def make(path: Path, num_samples: int, per_shard: int, sparse: bool) -> None:
    """A manifest as write_dataset makes it, but a row group at a time. sparse: with one row in each, and an index of holes.

    What opening and seeking read of it is the same: the file's metadata, and a few pages of the index.
    """
    path.mkdir(parents=True, exist_ok=True)
    num_shards = -(-num_samples // per_shard)
    names = [f"{number // 10_000:04d}/train-{number:07d}.tar" for number in range(num_shards)]
    for number, name in enumerate(names):
        if number % 10_000 == 0:
            (path / name).parent.mkdir(exist_ok=True)
        os.close(os.open(path / name, os.O_CREAT | os.O_WRONLY))
    sizes = np.minimum(per_shard, num_samples - np.arange(num_shards) * per_shard)
    columns = [names, ["train"] * num_shards, sizes, np.zeros(num_shards, np.int64), [""] * num_shards]
    pq.write_table(pa.table(dict(zip(SHARDS.names, columns, strict=True)), SHARDS), path / SHARDS_FILE)
    with pq.ParquetWriter(path / SAMPLES_FILE, SAMPLES, compression="none", use_dictionary=True) as writer:
        group = samples(2**18, per_shard)  # Every one alike, or a billion rows take an hour.
        for first in range(0, num_samples, 2**18):
            writer.write_table(group.slice(0, 1 if sparse else num_samples - first))
    info = {
        "format": FORMAT, "fingerprint": "0" * 16, "samples": {"train": num_samples}, "shards": {"train": num_shards},
        "files": {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in (SAMPLES_FILE, SHARDS_FILE)},
        "classes": [f"class{number}" for number in range(21_841)],
    }  # fmt: skip
    (path / INFO).write_text(json.dumps(info))
    if sparse:
        make_holes(path, num_samples)


def make_holes(path: Path, num_samples: int) -> None:
    digest = open_dataset(path).info["files"][SAMPLES_FILE][:16]
    folder = path / mapped_index.INDEX_FOLDER / f"train-{digest}"
    folder.mkdir(parents=True)
    lengths = {column: num_samples + (column == "label_starts") for column in mapped_index.COLUMNS}
    for column, length in lengths.items():
        (folder / column).touch()
        os.truncate(folder / column, length * np.dtype(mapped_index.COLUMNS[column]).itemsize)
    checksums = {column: file_xxh128(folder / column) for column in mapped_index.COLUMNS}
    info = asdict(
        mapped_index.IndexInfo(mapped_index._FORMAT, lengths, max_labels=1, max_label=0, xxh128=checksums, check="")
    )
    (folder / mapped_index._INFO).write_text(json.dumps({**info, "check": mapped_index._check(info)}))


def file_xxh128(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while part := file.read(2**24):
            digest.update(part)
    return digest.hexdigest()


def samples(n: int, per_shard: int) -> pa.Table:
    rows = np.arange(n)
    labels = pa.ListArray.from_arrays(np.arange(n + 1, dtype=np.int32), (rows % 21_841).astype(np.int32))
    zeros = pa.array(np.zeros(n, np.int32))
    columns = [
        pa.array(["key"]).take(zeros), pa.array(rows % per_shard * 110_080 + 512), pa.array(np.full(n, 109_000)),
        pa.DictionaryArray.from_arrays(zeros, ["jpg"]), labels, pa.array(np.full(n, 500, np.int32)),
        pa.array(np.full(n, 375, np.int32)), pa.array([b"0" * 16], pa.binary(16)).take(zeros),
        pa.DictionaryArray.from_arrays(zeros, ["train"]), pa.array((rows // per_shard).astype(np.int32)),
    ]  # fmt: skip
    return pa.table(columns, schema=SAMPLES)


def memory() -> tuple[float, float]:
    """MB of this process alone (private pages), and its peak in all."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return private / 1e3, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def start_up(path: Path) -> SampleOrder:
    """From the manifest to the address of the first sample, as a rank does it."""
    before = memory()[0]
    begin, cpu_begin = time.perf_counter(), time.process_time()
    split = open_dataset(path).split("train")
    order = SampleOrder(split.shard_sizes, 0, BATCH, STREAMS, WINDOW)
    row = int(order.slice(0)[0][0])
    address = split.shard_paths[int(split.shard_of(np.asarray(row)))], *split.place_of(row)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    private, peak = memory()
    print(f"{len(split):,} samples in {len(split.shard_paths):,} shards: first address {address}")
    print(
        f"start-up {seconds:.2f} s ({cpu_seconds:.2f} s of CPU); private memory {private - before:.0f} MB more than the imports' {before:.0f} MB; peak {peak:.0f} MB"
    )
    return order


def seeks(order: SampleOrder) -> None:
    """A process that knows nothing yet asks for the whole batch of a step in another epoch."""
    every, steps, cpu = order.num_samples / BATCH, [], []
    for epoch in range(1, 8):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        order.slice(int((epoch + 0.37) * every))
        steps.append((time.perf_counter() - begin) * 1e3)
        cpu.append((time.process_time() - cpu_begin) * 1e3)
    within = []
    for step in range(int(7.4 * every), int(7.4 * every) + 64):
        begin = time.perf_counter()
        order.slice(step)
        within.append((time.perf_counter() - begin) * 1e3)
    print(
        f"seek {np.median(steps):.0f} ms (worst {max(steps):.0f}; CPU {np.median(cpu):.0f}, worst {max(cpu):.0f}); next step {np.median(within):.2f} ms (worst {max(within):.1f})"
    )


def walk(order: SampleOrder) -> None:
    """Every row of an epoch exactly once: a bit for each."""
    n, chunk, begin = order.num_samples, 2**22, time.perf_counter()
    seen = np.zeros(n, bool)
    for first in range(n, 2 * n, chunk):
        rows, _ = order.rows(np.arange(first, min(first + chunk, 2 * n)))
        assert not seen[rows].any(), f"a row twice, at positions from {first}"
        seen[rows] = True
    assert seen.all()
    print(f"each of {n:,} rows once in epoch 1, looked at one by one in {time.perf_counter() - begin:.0f} s")


def balanced(num_samples: int, per_shard: int) -> None:
    """Classes of 66 to 16,583 at 14.2 M samples; epoch 288 is that of step 1,000,000."""
    shares = (np.arange(21_841) + 300.0) ** -1.2
    labels = np.random.default_rng(0).choice(21_841, num_samples, p=shares / shares.sum()).astype(np.int32)
    sizes = np.minimum(per_shard, num_samples - np.arange(0, num_samples, per_shard))
    starts, before = np.concatenate([[0], np.cumsum(sizes)]), memory()[0]
    begin = time.process_time()
    order = SampleOrder(sizes, 0, BATCH, STREAMS, WINDOW, ClassBalance(labels, starts, 0.5, 0))
    times = [time.process_time() - begin]
    for epoch in (0, 1, 288):
        begin = time.process_time()
        order.slice(epoch * num_samples // BATCH + 2)
        times.append(time.process_time() - begin)
    begin, first = time.process_time(), 288 * num_samples // BATCH + 3
    for step in range(first, first + 200):
        order.slice(step)
    private, peak = memory()
    print(
        f"start {times[0]:.2f} s of CPU; epochs 0, 1, 288: {', '.join(f'{seconds:.2f}' for seconds in times[1:])} s; a step "
        f"{(time.process_time() - begin) * 5:.2f} ms; {len(order._epoch(288).blocks):,} blocks; private memory {private - before:.0f} MB "
        f"more than before ({before:.0f} MB); peak {peak:.0f} MB"
    )


if __name__ == "__main__":
    folder, num_samples, per_shard = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if "balance" in sys.argv[4:]:
        balanced(num_samples, per_shard)
        sys.exit()
    if "make" in sys.argv[4:]:
        begin = time.perf_counter()
        make(folder, num_samples, per_shard, "sparse" in sys.argv[4:])
        written = time.perf_counter()
        open_dataset(folder).index("train")
        print(f"manifest written in {written - begin:.0f} s, its index in {time.perf_counter() - written:.0f} s")
        sys.exit()  # What making it took is not what opening it takes.
    order = start_up(folder)
    seeks(order)
    if "epoch" in sys.argv[4:]:
        walk(order)
