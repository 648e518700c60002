"""The order of a mixture: a pure function of (seed, epoch, position), made of the order of each set.

`Shares` says from which set a sample comes and how many of that set came before; the set's own order, over its own
epochs, says which sample that is. A small set begins its next epoch while a large one is still in its first. Samples of
a mixture are numbered through the sets: row r of a set is row (rows of the sets before it) + r.

The shares may change at the start of a batch: each *phase* continues every set where the one before left it.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.base.random_numbers import Purpose, torch_seed
from pipeline.data.dataset.split import Split
from pipeline.data.loading.order import Order, order_of_split
from pipeline.data.mixture.phases import Mixture, Phase
from pipeline.data.mixture.split import MixedSplit
from pipeline.settings.run import DataConfig

_SEED_OF_SET = Purpose.named("order of one set of a mixture")


class MixtureOrder(Order):
    """Maps positions 0, 1, 2, ... of training to rows of a mixture.

    orders: of the sets. phases: ascending, from batch 0 on; each has a share for each set.
    """

    def __init__(self, orders: Sequence[Order], phases: Sequence[Phase], global_batch: int) -> None:
        self.orders, self.global_batch = orders, global_batch
        self.set_starts = np.concatenate([[0], np.cumsum([order.num_samples for order in orders])])
        self.num_samples = int(self.set_starts[-1])
        self.is_balanced = any(order.is_balanced for order in orders)
        self.shares = [phase.shares for phase in phases]
        self.starts = np.array([phase.first_batch * global_batch for phase in phases], np.int64)
        # (phases, sets): how many samples of each set come before a phase.
        self.taken = np.zeros((len(phases), len(orders)), np.int64)
        for number, length in enumerate(np.diff(self.starts).tolist()):
            self.taken[number + 1] = self.taken[number] + self.shares[number].first(length)

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sets, places = self.locate(positions)
        rows, epochs = np.empty_like(places), np.empty_like(places)
        for number, order in enumerate(self.orders):
            mine = np.flatnonzero(sets == number)
            if len(mine):
                rows[mine], epochs[mine] = order.rows(places[mine])
        return rows + self.set_starts[sets], epochs

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """The epoch of each position, int64: that of its set."""
        sets, places = self.locate(positions)
        return places // np.diff(self.set_starts)[sets]

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(set, number of samples of that set before) of the samples at these positions, int64 each."""
        positions = np.asarray(positions, np.int64)
        phases = np.searchsorted(self.starts, positions, side="right") - 1
        sets, places = np.empty_like(positions), np.empty_like(positions)
        for phase in np.unique(phases).tolist():
            of_phase = phases == phase
            of_set, place = self.shares[phase].locate(positions[of_phase] - self.starts[phase])
            sets[of_phase], places[of_phase] = of_set, self.taken[phase, of_set] + place
        return sets, places

    def first(self, num_samples: int) -> np.ndarray:
        """How many of the first `num_samples` samples come from each set, int64 (sets,)."""
        phase = int(np.searchsorted(self.starts, num_samples, side="right")) - 1
        return self.taken[phase] + self.shares[phase].first(num_samples - int(self.starts[phase]))


def train_order(split: Split, data: DataConfig, seed: int, global_batch: int) -> Order:
    """The order of a run's training split."""
    if not isinstance(split, MixedSplit):
        return order_of_split(split, data, seed, global_batch)
    mixture = split.mixture
    orders = [
        order_of_split(part, data, seed_of_set(seed, number), samples_a_round(mixture, number, data, global_batch))
        for number, part in enumerate(split.parts)
    ]
    return MixtureOrder(orders, mixture.phases, global_batch)


def seed_of_set(seed: int, number: int) -> int:
    """The seed of the order of a set, which is the run's for set 0: it is in the order that it has alone."""
    return torch_seed(seed, _SEED_OF_SET, number) if number else seed


def samples_a_round(mixture: Mixture, number: int, data: DataConfig, global_batch: int) -> int:
    """How many samples of a set are taken from its streams in one round: about as many as a batch has of it when it is
    first used.

    So a rank reads few shards at a time. Later phases do not change it, or else they would change the set's order.
    """
    return data.streams * max(1, round(global_batch * mixture.first_share(number) / data.streams))
