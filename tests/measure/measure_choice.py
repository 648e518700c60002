"""What labels of chosen images are worth, beside labels of as many random ones: python tests/measure/measure_choice.py
TRAIN TEST

TRAIN, TEST: tables of launch/features.py of images with labels. Images of TRAIN are chosen as by launch/choose.py, or
at random. The few-shot probe (ridge regression, strength 1,024) learns their labels and is scored on TEST: the mean of
five seeds, the mean difference, their 95 % intervals, and how many classes were among the labels.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.evaluate import coverage, intervals
from pipeline.evaluate.probes import fewshot

SIZES, SEEDS, CANDIDATES, STRENGTH = (10, 20, 50, 100, 200, 500, 1000, 2000), 5, 10_000, 1024.0


def read(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Features, float32 (n, D), and class names, (n,), of the images that have both."""
    table = pq.read_table(path, columns=["label", "vector"]).drop_null()
    return np.stack(table["vector"].to_numpy()), np.array(table["label"].to_pylist())


def main(train: str, test: str) -> None:
    (features, names), (of_test, true) = read(train), read(test)
    classes, labels = np.unique(names, return_inverse=True)

    def chosen(generator: np.random.Generator) -> np.ndarray:
        candidates = generator.permutation(len(labels))[:CANDIDATES]
        found = features[candidates]
        return candidates[coverage.choose(coverage.directions(found), max(SIZES))]

    def at_random(generator: np.random.Generator) -> np.ndarray:
        return generator.permutation(len(labels))[: max(SIZES)]

    ways: dict[str, Callable[[np.random.Generator], np.ndarray]] = {"at random": at_random, "chosen": chosen}
    print(f"| labels | {' | '.join(ways)} | difference | classes among the labels |\n|---|{'---|' * (len(ways) + 2)}")
    orders = {name: [way(np.random.default_rng(seed)) for seed in range(SEEDS)] for name, way in ways.items()}
    for size in SIZES:
        cells, num_classes, of_ways = [], [], []
        for of_seeds in orders.values():
            scores = list[float]()
            for order in of_seeds:
                rows = order[:size]
                ridge = fewshot.fit(features[rows], labels[rows], len(classes))
                scores.append(float((classes[ridge(of_test, STRENGTH).argmax(1)] == true).mean()))
            of_ways.append(np.array(scores))
            interval = intervals.of_seeds(scores)
            cells.append(f"{100 * np.mean(scores):.1f} ({100 * interval.low:.1f} to {100 * interval.high:.1f})")
            num_classes.append(f"{np.mean([len(np.unique(labels[order[:size]])) for order in of_seeds]):.1f}")
        differences = 100 * (of_ways[1] - of_ways[0])  # Of pairs: both ways have the seed's permutation.
        half = intervals.quantile(SEEDS - 1) * differences.std(ddof=1) / SEEDS**0.5
        cells.append(f"{differences.mean():+.1f} ({differences.mean() - half:.1f} to {differences.mean() + half:.1f})")
        print(f"| {size:,} | {' | '.join(cells)} | {', '.join(num_classes)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
