"""Health of a run: loss spikes, collapsed features, and ranks that are slower than the others. Hangs: watchdog.py."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor

from pipeline.process.distributed import Ranks, name_ranks
from pipeline.settings.run import HealthConfig

# Lower bound of the deviation, as a share of the mean: a loss that has nearly converged has a deviation near 0, and
# every small change would be a spike.
_MIN_DEVIATION = 0.01
_NAMED_HOSTS = 4


class SpikeScore:
    """Distance of a step's loss from the mean of the last `window` losses, in their standard deviations.

    recent: those losses, oldest first. They go into the checkpoint, so that a resumed run finds the same spikes.
    """

    def __init__(self, window: int, recent: Iterable[float] = ()) -> None:
        self.recent: deque[float] = deque(recent, maxlen=window)

    def add(self, loss: float) -> float:
        """Score of the next loss: inf if it is not finite, 0 while fewer than half a window of losses are known."""
        if not math.isfinite(loss):
            return math.inf
        score = 0.0
        if 2 * len(self.recent) >= (self.recent.maxlen or 0):
            mean = statistics.fmean(self.recent)
            score = (loss - mean) / max(statistics.pstdev(self.recent, mean), _MIN_DEVIATION * abs(mean), 1e-12)
        # Spikes are kept too: after a lasting change of level, losses of the new level are not spikes.
        self.recent.append(loss)
        return score


class SpikePolicy:
    """Finds loss spikes and decides what follows, by `health.on_spike`.

    warn: continue. rollback: return to a checkpoint before the first spike. `react` is collective.

    num_spikes: since the run's first start, also those that were rolled back; the same on every rank.
    """

    def __init__(self, config: HealthConfig, ranks: Ranks, recent: Iterable[float] = (), num_spikes: int = 0) -> None:
        self.config, self.ranks = config, ranks
        self.scores = SpikeScore(config.spike_window, recent)
        self.num_spikes = num_spikes
        self._waiting: list[tuple[int, Tensor]] = []

    def add(self, step: int, loss: Tensor) -> None:
        """Keep the loss of a step, from 1, for `react`. Does not wait for the device or the other ranks."""
        self._waiting.append((step, loss))

    def react(self) -> tuple[list[str], int | None]:
        """Check the losses that were added. Returns (a line for each spike since the last call, oldest first; before
        which step to roll back).
        """
        losses = self.ranks.sum(*(float(loss) for _, loss in self._waiting)) if self._waiting else []
        lines: list[str] = []
        first = None
        for (step, _), total in zip(self._waiting, losses, strict=True):
            loss = total / self.ranks.world_size
            if (score := self.scores.add(loss)) > self.config.spike_sigma:
                first = first or step
                lines.append(
                    f"step {step:,}: a loss of {loss:.4f} is {score:.1f} standard deviations above those before it"
                )
        self.num_spikes += len(lines)
        self._waiting = []
        return lines, first if self.config.on_spike == "rollback" else None

    def forget(self, recent: Iterable[float]) -> None:
        """Continue with the losses of a checkpoint."""
        self.scores = SpikeScore(self.config.spike_window, recent)


class Reports:
    """Says once that something is wrong, and once more when it is not any longer.

    what: is wrong, such as "collapse".

    first: the first line said since this start, "" for none; for the end of the run.
    """

    def __init__(self, what: str) -> None:
        self.what, self.first = what, ""
        self._wrong: set[str] = set()

    def changed(self, source: str, step: int, found: str) -> list[str]:
        """Lines for the log. source: what was looked at, such as "probe". found: what is wrong; "" for nothing."""
        if bool(found) == (source in self._wrong):
            return []
        self._wrong ^= {source}
        if not found:
            return [f"step {step:,}: the {source} shows no {self.what} any longer"]
        line = f"step {step:,}: {self.what}: {found}"
        self.first = self.first or line
        return [line]


class SlowRanks:
    """Reports each straggler once, after two readings in a row, and once more when it is normal again."""

    def __init__(self, hosts: Sequence[str], ratio: float) -> None:
        self.hosts, self.ratio = hosts, ratio
        self._named: set[int] = set()
        self._before: set[int] = set()

    def changed(self, seconds: Sequence[float]) -> list[str]:
        """A line for all ranks that have become slow, and one for all that are normal again. seconds: each rank's own
        work.
        """
        median = statistics.median_low(seconds)
        is_on = self.ratio and median > 0
        slow = {rank: own / median for rank, own in enumerate(seconds) if is_on and own > self.ratio * median}
        # Two readings, because any host may be busy for a moment.
        new = sorted(self._before & slow.keys() - self._named)
        over = sorted(self._named - self._before - slow.keys())
        self._before, self._named = set(slow), self._named.union(new).difference(over)
        lines = []
        if new:
            ratio = max(slow[rank] for rank in new)
            lines.append(f"slow: {self._where(new)}: data and forward passes take {ratio:.1f} times the median rank's")
        if over:
            lines.append(f"no longer slow: {self._where(over)}")
        return lines

    def _where(self, ranks: Sequence[int]) -> str:
        """The ranks, and where they are: a network or a storage slows many at once."""
        hosts = sorted({self.hosts[rank] for rank in ranks})
        return f"{name_ranks(ranks)} on {', '.join(hosts[:_NAMED_HOSTS])}{', ...' * (len(hosts) > _NAMED_HOSTS)}"
