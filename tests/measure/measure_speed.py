"""CPU time of operations that must stay fast: `python tests/measure/measure_speed.py`. Exits with 1 if one exceeds its limit.

CPU time depends on the machine and on its load, so these limits are no part of the tests.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.data.dataset.manifest import ROWS, Dataset, Shard, open_dataset, write_dataset
from pipeline.data.loading.order import SampleOrder
from pipeline.evaluate.classify import Predictions, outcomes, per_class, score
from pipeline.evaluate.probes import fewshot

_IMAGENET_21K_CLASSES = 21_843


def main() -> int:
    """Print each operation, its CPU seconds and its limit; returns how many exceed theirs."""
    num_slow = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, seconds, limit in measurements(Path(folder)):
            num_slow += seconds > limit
            print(f"{name}: {seconds:.4f} s, limit {limit:.4f} s{'  TOO SLOW' if seconds > limit else ''}", flush=True)
    return num_slow


def measurements(folder: Path) -> Iterator[tuple[str, float, float]]:
    """Yields (operation, CPU seconds, limit)."""
    order = large_order()
    seconds = [cpu_seconds(lambda step=step: order.slice(step)) for step in (0, 250_000, 90_000_000)]
    yield "order: one step of 4,096 from a million shards, however far", float(np.median(seconds)), 0.4

    order = SampleOrder(np.full(14_200, 1000), 0, 4096, 1024, 256)
    order.slice(0)
    # Comparing each sample with each window took 0.05 s, the present way 0.005 s.
    yield "order: one step with 1,024 streams", cpu_seconds(lambda: slice_steps(order, 1, 5)) / 4, 0.1

    early, late = (min(seconds_from(step) for _ in range(3)) for step in (0, 1_000_000))
    yield "order: 30 steps from step 1,000,000, against those from step 0", late, 2 * early + 0.02

    write_rows(folder / "million", np.arange(1_000_000) % 1000, 1000)
    yield "manifest: open a million rows", cpu_seconds(lambda: open_dataset(folder / "million").split("train")), 1

    rng = np.random.default_rng(0)
    labels = rng.integers(0, _IMAGENET_21K_CLASSES, 50_000)
    split = write_rows(folder / "scored", labels, _IMAGENET_21K_CLASSES).split("train")
    others = rng.integers(0, _IMAGENET_21K_CLASSES, (4, len(labels)))
    top = np.stack([np.where(rng.random(len(labels)) < 0.5, labels, 0), *others], 1)
    ones = np.ones(len(labels))
    predictions = Predictions(top, np.ones(top.shape, np.float32), ones, ones > 0, {})

    def scores() -> None:
        score(predictions, split, _IMAGENET_21K_CLASSES)
        per_class(*outcomes(predictions, split), _IMAGENET_21K_CLASSES)

    yield "scores: 50,000 images of 21,843 classes", cpu_seconds(scores), 2

    labels = rng.integers(0, _IMAGENET_21K_CLASSES, 2_000_000)
    choose = cpu_seconds(lambda: fewshot.choose_shots(labels, _IMAGENET_21K_CLASSES, 5, 0))
    yield "few-shot: choose 5 samples per class from 2 million", choose, 5


def cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def large_order() -> SampleOrder:
    """A million shards of about 1,000 samples."""
    return SampleOrder(np.random.default_rng(0).integers(900, 1101, 1_000_000), 0, 4096, 16, 4096)


def slice_steps(order: SampleOrder, first: int, end: int) -> None:
    for step in range(first, end):
        order.slice(step)


def seconds_from(first: int) -> float:
    """CPU seconds of 30 steps of an order without caches."""
    order = SampleOrder(np.full(200, 1000), 0, 256, 16, 4096)
    return cpu_seconds(lambda: slice_steps(order, first, first + 30))


def write_rows(folder: Path, labels: np.ndarray, num_classes: int) -> Dataset:
    """Write the manifest of a data set with these labels, whose one shard is a placeholder."""
    folder.mkdir()
    n = len(labels)
    table = pa.table(
        [
            pa.array(np.arange(n).astype(str)),
            pa.array(np.arange(n) * 512),
            pa.array(np.full(n, 400)),
            pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), ["jpg"]),
            pa.ListArray.from_arrays(pa.array(np.arange(n + 1, dtype=np.int32)), pa.array(labels.astype(np.int32))),
            pa.array(np.full(n, 32, np.int32)),
            pa.array(np.full(n, 32, np.int32)),
            pa.array([b"0" * 16] * n, pa.binary(16)),
        ],
        schema=ROWS,
    )
    (folder / "train-000000.tar").write_bytes(b"x")
    shards = [Shard("train-000000.tar", "train", n, 1, "")]
    return write_dataset(folder, shards, [table], list(map(str, range(num_classes))), {}, {})


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
