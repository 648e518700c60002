"""A random part of a split: for studies of how much data is enough, and for a quick look at any run.

Each sample has a place in a line that only the seed decides; a subset is the line's beginning, so the smaller is inside
the larger.
"""

import numpy as np

from pipeline.config import Limit
from pipeline.data import rng
from pipeline.errors import UserError

_LIMIT = 18


def beyond_limit(num_rows: int, left_out: np.ndarray, limit: Limit, seed: int) -> np.ndarray:
    """Rows that a limit leaves out beside those of the lists, `left_out`: int64, ascending.

    Raises UserError for more samples than there are, and for none.
    """
    rows = np.delete(np.arange(num_rows), left_out)
    count = limit.count(len(rows))
    if not 0 < count <= len(rows):
        raise UserError(f"data.limit = {limit} is {count:,} samples, and the split has {len(rows):,}.")
    places = rng.bits(seed, _LIMIT, rows)
    last = np.partition(places, count - 1)[count - 1]
    return rows[places > last]
