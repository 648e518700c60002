"""What a run counts over its starts: rows once, retries of this start beside those before; and warnings at its end."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint.store import Counts
from pipeline.data.loading.loader import Batch
from pipeline.data.storage.retry import Retry
from pipeline.process.distributed import Ranks
from pipeline.train.bookkeeping import RunCounts, TrainingRun

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


def batch(rows: list[int], bad: set[int]) -> Batch:
    valid = torch.tensor([row not in bad for row in rows])
    images, labels = torch.zeros(len(rows), 1, 1, 3, dtype=torch.uint8), torch.zeros(len(rows), 1, dtype=torch.int64)
    return Batch((images[None],), labels, valid, np.array(rows), np.zeros(len(rows), np.int64))


def test_a_resumed_run_counts_on() -> None:
    retry = Retry()
    counts = RunCounts(Counts(1, 5, [(3, "torn")]), retry, ALONE)
    reasons = {3: "torn again", 8: "black", 9: "not yet in a step"}
    retry.retries += 2
    counts.add([batch([1, 3], {3}), batch([8, 2], {8})], reasons)
    counts.gather_on_all_ranks()
    counts.add([batch([8, 4], {8})], reasons)
    retry.retries += 1
    for _ in range(2):
        counts.gather_on_all_ranks()
        assert counts.to_save(loss_spikes=2) == Counts(2, 8, [(3, "torn"), (8, "black")])


@pytest.mark.parametrize(
    ("top1", "labels", "skipped", "words"),
    [
        (0.95, [0] * 50 + [1] * 50, 2, []),
        (0.55, [0] * 50 + [1] * 50, 2, ["55.00%", "50.00%", "100 images"]),  # Half of two classes is 50 %.
        (0.90, [0] * 88 + [1] * 12, 2, ["90.00%", "88.00%"]),  # The most common class alone has 88 %.
        (0.95, [0] * 50 + [1] * 50, 6, ["6 of 10 steps"]),
    ],
)
def test_a_run_that_learnt_nothing_ends_with_a_warning(
    top1: float, labels: list[int], skipped: int, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "scores.json").write_text(json.dumps({"step": 10, "top1": top1, "num_samples": 100}))
    data = SimpleNamespace(dataset=SimpleNamespace(num_classes=2), evaluation=Labels(labels))
    run: Any = SimpleNamespace(
        engine=SimpleNamespace(skipped_steps=skipped), progress=SimpleNamespace(step=10), data=data, folder=tmp_path
    )
    found = TrainingRun.caveats(run)
    assert bool(found) == bool(words)
    assert all(word in found for word in words), found


class Labels(list[int]):
    @property
    def label_values(self) -> np.ndarray:
        return np.array(self)
