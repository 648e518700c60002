"""A random part of a split: for studies of how much data is enough, for a quick look at any run, for choosing settings.

Each sample has a place in a line that only the seed decides; a subset is the line's beginning, so the smaller is inside
the larger.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline import random_numbers
from pipeline.data.dataset.split import Split
from pipeline.errors import UserError
from pipeline.random_numbers import Purpose
from pipeline.settings.quantities import Limit
from pipeline.settings.run import DataConfig

if TYPE_CHECKING:
    from pipeline.data.dataset.manifest import Dataset


def beyond_limit(num_rows: int, left_out: np.ndarray, limit: Limit, seed: int) -> np.ndarray:
    """Rows that a limit leaves out beside those of the lists, `left_out`: int64, ascending.

    Raises UserError for more samples than there are, and for none.
    """
    rows = np.delete(np.arange(num_rows), left_out)
    count = limit.count(len(rows))
    if not 0 < count <= len(rows):
        raise UserError(f"data.limit = {limit} is {count:,} samples, and the split has {len(rows):,}.")
    places = random_numbers.bits(seed, Purpose.SUBSET, rows)
    last = np.partition(places, count - 1)[count - 1]
    return rows[places > last]


def run_splits(dataset: "Dataset", config: DataConfig, seed: int) -> tuple[Split, Split]:
    """(training split, evaluation split) of a run. Raises UserError as `Dataset.split` does, and for a dev of no sample."""
    train = dataset.split(config.train_split, config.exclude, config.limit, seed)
    if not config.dev_share:
        return train, dataset.split(config.eval_split, config.exclude)
    return hold_out(train, config.dev_share, seed)


def hold_out(split: Split, share: float, seed: int) -> tuple[Split, Split]:
    """(the rest, a random share of it called "dev"). Raises UserError when either would be empty."""
    count = round(share * len(split))
    if not 0 < count < len(split):
        raise UserError(
            f"data.dev_share = {share} of the {len(split):,} samples of {split.name!r} is {count:,} samples."
        )
    rows = np.arange(len(split))
    # By their rows in the manifest: a sample's place does not depend on what else is left out.
    places = random_numbers.bits(seed, Purpose.DEV_SPLIT, split.manifest_rows(rows))
    is_dev = places <= np.partition(places, count - 1)[count - 1]
    return split.only(rows[~is_dev]), replace(split.only(rows[is_dev]), name="dev")
