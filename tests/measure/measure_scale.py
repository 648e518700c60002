"""Start-up, memory, seek and order of a data set of any size, without its images: the numbers in docs/data_format.md.

    python tests/measure/measure_scale.py FOLDER 14200000 4057
    python tests/measure/measure_scale.py - 14200000 1000 balance
    python tests/measure/measure_scale.py - 64 0 lines

The numbers are of samples, and of samples a shard; FOLDER is made once. The second is of data.balance=0.5, of labels in
memory; the third, of the collective call of a log line on 64 ranks (docs/performance.md). Keys and checksums are all
alike, and the shards are empty files.
"""

import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.data.dataset.manifest import FORMAT, INFO, SAMPLES, SAMPLES_FILE, SHARDS, SHARDS_FILE, open_dataset
from pipeline.data.loading.balance import ClassBalance
from pipeline.data.loading.order import SampleOrder

BATCH, STREAMS, WINDOW, CLASSES, GROUP = 4096, 16, 4096, 21_841, 2**18


def make(path: Path, num_samples: int, per_shard: int) -> None:
    """A manifest as write_dataset makes it, but a row group at a time, and its index."""
    path.mkdir(parents=True)
    sizes = np.minimum(per_shard, num_samples - np.arange(0, num_samples, per_shard))
    names = [f"train-{number:07d}.tar" for number in range(len(sizes))]
    for name in names:
        (path / name).touch()
    columns = [names, ["train"] * len(sizes), sizes, np.zeros(len(sizes), np.int64), [""] * len(sizes)]
    pq.write_table(pa.table(dict(zip(SHARDS.names, columns, strict=True)), SHARDS), path / SHARDS_FILE)
    with pq.ParquetWriter(path / SAMPLES_FILE, SAMPLES, compression="none", use_dictionary=True) as writer:
        group = samples(per_shard)
        for first in range(0, num_samples, GROUP):
            writer.write_table(group.slice(0, num_samples - first))
    info = {
        "format": FORMAT,
        "fingerprint": "0" * 16,
        "samples": {"train": num_samples},
        "shards": {"train": len(sizes)},
        "files": {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in (SAMPLES_FILE, SHARDS_FILE)},
        "classes": [f"class{number}" for number in range(CLASSES)],
    }
    (path / INFO).write_text(json.dumps(info))
    open_dataset(path).index("train")


def samples(per_shard: int) -> pa.Table:
    rows, zeros = np.arange(GROUP), pa.array(np.zeros(GROUP, np.int32))
    labels = pa.ListArray.from_arrays(np.arange(GROUP + 1, dtype=np.int32), (rows % CLASSES).astype(np.int32))
    sides = [pa.array(np.full(GROUP, side, np.int32)) for side in (500, 375)]
    columns = [
        pa.array(["key"]).take(zeros),
        pa.array(rows % per_shard * 110_080 + 512),
        pa.array(np.full(GROUP, 109_000)),
        pa.DictionaryArray.from_arrays(zeros, ["jpg"]),
        labels,
        *sides,
        pa.array([b"0" * 16], pa.binary(16)).take(zeros),
        pa.DictionaryArray.from_arrays(zeros, ["train"]),
        pa.array((rows // per_shard).astype(np.int32)),
    ]
    return pa.table(columns, schema=SAMPLES)


def memory() -> str:
    """Of this process: its private pages, and its peak in all."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return f"{private / 1e3:.0f} MB private, peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB"


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


def balanced(num_samples: int, per_shard: int) -> None:
    """Classes of 66 to 16,583 at 14.2 M samples; epoch 288 is that of step 1,000,000."""
    shares = (np.arange(CLASSES) + 300.0) ** -1.2
    labels = np.random.default_rng(0).choice(CLASSES, num_samples, p=shares / shares.sum()).astype(np.int32)
    sizes = np.minimum(per_shard, num_samples - np.arange(0, num_samples, per_shard))
    print(f"before: {memory()}")
    begin = time.process_time()
    balance = ClassBalance(labels, np.concatenate([[0], np.cumsum(sizes)]), 0.5, 0)
    order = SampleOrder(sizes, 0, BATCH, STREAMS, WINDOW, balance)
    print(f"start {time.process_time() - begin:.2f} s of CPU")
    for epoch in (0, 1, 288):
        begin, first = time.process_time(), epoch * num_samples // BATCH + 2
        order.slice(first)
        started = time.process_time()
        for step in range(200):
            order.slice(first + 1 + step)
        each = (time.process_time() - started) * 5
        print(f"epoch {epoch}: {started - begin:.2f} s of CPU, then {each:.2f} ms a step; {memory()}", flush=True)


def lines(num_ranks: int) -> None:
    """The call that gathers the numbers of a log line, of ranks on this machine."""
    import torch

    from pipeline.process.distributed import Ranks
    from pipeline.process.launcher import free_port

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    children = [os.fork()]
    while children[-1] and len(children) < num_ranks:
        children.append(os.fork())
    if children[-1]:
        for _ in children:
            os.wait()
        return
    rank = len(children) - 1
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    ranks = Ranks(rank, rank, num_ranks, torch.device("cpu"))
    taken = []
    for _ in range(6):
        ranks.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        ranks.gather_numbers({"a line": [0.5] * 40})
        taken.append((time.perf_counter() - begin, time.process_time() - cpu))
    seconds, cpu = np.median(taken[1:], 0)
    total = ranks.sum(float(cpu))[0]
    if ranks.is_main:
        print(f"{seconds * 1e3:.0f} ms, {total * 1e3:.0f} ms of CPU of all ranks", flush=True)
    ranks.barrier()
    os._exit(0)


if __name__ == "__main__":
    folder, num_samples, per_shard = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if sys.argv[4:] == ["balance"]:
        balanced(num_samples, per_shard)
    elif sys.argv[4:] == ["lines"]:
        lines(num_samples)
    elif folder.exists():
        start_up(folder)
    else:  # What making it took is not what opening it takes: the next start measures.
        make(folder, num_samples, per_shard)
