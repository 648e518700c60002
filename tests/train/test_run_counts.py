"""What a run counts over its starts: rows once, retries of this start beside those before."""

import numpy as np
import torch

from pipeline.checkpoint.store import Counts
from pipeline.data.loading.loader import Batch
from pipeline.data.storage.retry import Retry
from pipeline.process.distributed import Ranks
from pipeline.train.bookkeeping import RunCounts

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
        assert (counts.storage_retries, counts.unreadable) == (8, {3: "torn", 8: "black"})
