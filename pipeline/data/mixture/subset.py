"""The splits of a run: for training, and for evaluation, which may be a random share of the training samples or missing."""

from dataclasses import replace

import numpy as np

from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.split import Split
from pipeline.settings.run_sections import DataConfig

# The default of data.eval_split.
_USUAL_SPLIT = "val"


def run_splits(dataset: Dataset, data: DataConfig, seed: int) -> tuple[Split, Split | None]:
    """(training split, evaluation split, None without one) of a run.

    Raises UserError as `Dataset.split` and `hold_out` do, and for a balance of classes where no sample of the split has a label.
    """
    train = dataset.split(data.train_split, data.exclude, data.limit, seed)
    if data.balance != 1 and not train.max_labels:
        raise UserError(
            f"data.balance = {data.balance:g} balances classes, and no sample of {dataset.path}, split {train.name!r}, has a label. "
            "Leave it at 1."
        )
    if data.dev_share:
        return hold_out(train, data.dev_share, seed)
    name = held_out_split(dataset, data)
    if name and name not in dataset.splits:
        raise UserError(
            f"data.eval_split = {name}: {dataset.path} has no split {name!r}. It has: {', '.join(dataset.splits)}. To evaluate on none: "
            "data.eval_split= (empty)."
        )
    return train, dataset.split(name, data.exclude) if name else None


def held_out_split(dataset: Dataset, data: DataConfig) -> str:
    """data.eval_split, "" if there is none: it is empty, or has its default and the data set has neither such a split nor labels."""
    is_missing = data.eval_split == _USUAL_SPLIT and data.eval_split not in dataset.splits
    return "" if is_missing and not dataset.classes else data.eval_split


def hold_out(split: Split, share: float, seed: int) -> tuple[Split, Split]:
    """(the rest, a random share called "dev") of a split. Raises UserError when either would be empty."""
    count = round(share * len(split))
    if not 0 < count < len(split):
        raise UserError(
            f"data.dev_share = {share} of the {counted(len(split), 'sample')} of {split.name!r} is {counted(count, 'sample')}."
        )
    rows = np.arange(len(split))
    # By rows of the manifest, so that the choice of a sample does not depend on which others are excluded.
    places = random_numbers.bits(seed, Purpose.DEV_SPLIT, split.manifest_rows(rows))
    is_dev = places <= np.partition(places, count - 1)[count - 1]
    return split.only(rows[~is_dev]), replace(split.only(rows[is_dev]), name="dev")
