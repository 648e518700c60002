"""Is the run well? A loss that jumps, a rank that hangs, a rank that is slower than the others."""

import faulthandler
import math
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pipeline.distributed import Ranks
from pipeline.settings.run import HealthConfig

# A loss that has almost stopped moving has a deviation near 0, and every wobble would be a spike.
_SMALLEST_DEVIATION = 0.01
_HANG_CODE = 1
_ANSWER_SECONDS = 5.0


class SpikeScore:
    """How far each step's loss lies above those before it, in standard deviations of the last `window` of them.

    What a run remembers of this is `recent`, oldest first; it goes into the checkpoint, so that a resumed run judges as
    the unbroken one.
    """

    def __init__(self, window: int, recent: Iterable[float] = ()) -> None:
        self.recent: deque[float] = deque(recent, maxlen=window)

    def add(self, loss: float) -> float:
        """The score of the next loss: inf when it is no number, 0 while fewer than half a window are known."""
        if not math.isfinite(loss):
            return math.inf
        score = 0.0
        if 2 * len(self.recent) >= (self.recent.maxlen or 0):
            mean = statistics.fmean(self.recent)
            score = (loss - mean) / max(statistics.pstdev(self.recent, mean), _SMALLEST_DEVIATION * abs(mean), 1e-12)
        # A spike is remembered too: after a lasting change of level it stops being one.
        self.recent.append(loss)
        return score


@dataclass(frozen=True)
class Spike:
    """A loss that stands out. step: from 1, as log lines count."""

    step: int
    loss: float
    score: float

    def __str__(self) -> str:
        return f"step {self.step:,}: a loss of {self.loss:.4f} is {self.score:.1f} standard deviations above those before it"


class LossWatch:
    """Holds every step's loss against those before it. All methods but `add` are collective."""

    def __init__(self, config: HealthConfig, ranks: Ranks, recent: Iterable[float] = ()) -> None:
        self.config, self.ranks = config, ranks
        self.scores = SpikeScore(config.spike_window, recent)
        self.num_spikes = 0
        self._waiting: list[tuple[int, Tensor]] = []
        self._found: list[Spike] = []

    def accept(self, step: int, loss: Tensor) -> bool:
        """Judge this step's loss (a rank's mean) at once: False for a spike."""
        return self._judge(step, self.ranks.mean(loss))

    def add(self, step: int, loss: Tensor) -> None:
        """Judge it later: nothing waits for the device, or for the other ranks, until then."""
        self._waiting.append((step, loss))

    def catch_up(self) -> list[Spike]:
        """Judge what waits; what stood out since the last time, oldest first."""
        losses = self.ranks.sum(*(float(loss) for _, loss in self._waiting)) if self._waiting else []
        for (step, _), loss in zip(self._waiting, losses, strict=True):
            self._judge(step, loss / self.ranks.world_size)
        found = self._found
        self._waiting, self._found = [], []
        return found

    def forget(self, recent: Iterable[float]) -> None:
        """Go on as from a checkpoint."""
        self.scores = SpikeScore(self.config.spike_window, recent)

    def _judge(self, step: int, loss: float) -> bool:
        score = self.scores.add(loss)
        if score <= self.config.spike_sigma:
            return True
        self.num_spikes += 1
        self._found.append(Spike(step, loss, score))
        return False


def stragglers(seconds: Sequence[float], ratio: float) -> dict[int, float]:
    """Ranks whose own work (before it waits for others) took over `ratio` times the median rank's, and how many times."""
    usual = statistics.median_low(seconds)
    return {rank: own / usual for rank, own in enumerate(seconds) if usual > 0 and own > ratio * usual}


class SlowRanks:
    """Names stragglers: at the second reading in a row, not the same ones again, and when they are normal again."""

    def __init__(self, hosts: Sequence[str], ratio: float) -> None:
        self.hosts, self.ratio = hosts, ratio
        self._named: set[int] = set()
        self._before: set[int] = set()

    def changed(self, seconds: Sequence[float]) -> list[str]:
        """Lines for ranks that have become slow or normal again. seconds: of each rank's own work."""
        slow = stragglers(seconds, self.ratio) if self.ratio else {}
        # One reading says little: any host does something else for a moment.
        new = sorted(self._before & slow.keys() - self._named)
        over = sorted(self._named - self._before - slow.keys())
        self._before, self._named = set(slow), self._named.union(new).difference(over)
        return [
            *(
                f"rank {rank} on {self.hosts[rank]} is slow: its data and forward passes take {slow[rank]:.1f} times the median rank's"
                for rank in new
            ),
            *(f"rank {rank} on {self.hosts[rank]} is no longer slow" for rank in over),
        ]


class Watchdog:
    """Ends a run that stands still, and says which rank it waits for: host, step, phase and Python stack.

    Every rank tells its own watchdog what it is about to do. When nothing has been told for `minutes`, each rank writes
    `<folder>/rank-00003.txt`; the lowest rank that could write reads them all. Ranks in the phase of a collective wait
    for the others: the culprit is one that is elsewhere, or that cannot even write (stopped, swapped out, its host gone).
    """

    def __init__(self, folder: Path, rank: int, hosts: Sequence[str], minutes: float) -> None:
        self.folder, self.rank, self.hosts, self.seconds = folder, rank, hosts, minutes * 60
        self._at = (time.monotonic(), 0, "start")
        self._over = threading.Event()
        if self.seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def at(self, step: int, phase: str) -> None:
        """This rank begins a phase of a step: "data", "step" (with the others), "checkpoint", "evaluation"."""
        self._at = (time.monotonic(), step, phase)

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.seconds / 4)):
            since, step, phase = self._at
            if time.monotonic() - since > self.seconds:
                self._write(step, phase, time.monotonic() - since)
                # Ranks notice within a second or so of each other.
                if self._over.wait(_ANSWER_SECONDS):
                    return
                reports = self._read()
                if min(reports, default=self.rank) == self.rank:
                    for line in diagnosis(reports, self.hosts, self.folder):
                        print(line, file=sys.stderr, flush=True)
                # The main thread waits in a collective or a read and cannot be woken.
                os._exit(_HANG_CODE)

    def _write(self, step: int, phase: str, seconds: float) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"rank-{self.rank:05d}.txt", "w") as file:
            file.write(f"{phase} of step {step} for {seconds:.0f} s, {socket.gethostname()}, process {os.getpid()}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _read(self) -> dict[int, str]:
        """What each rank wrote about this hang: its first line. Files of an earlier hang are older."""
        newest = time.time() - self.seconds - 2 * _ANSWER_SECONDS
        found = {}
        for rank in range(len(self.hosts)):
            file = self.folder / f"rank-{rank:05d}.txt"
            if file.exists() and file.stat().st_mtime > newest:
                found[rank] = file.read_text().partition("\n")[0]
        return found


def diagnosis(reports: dict[int, str], hosts: Sequence[str], folder: Path) -> list[str]:
    """Lines that name whom the others wait for. reports: rank -> "<phase> of step <n> for ..."."""
    lines = []
    for rank, host in enumerate(hosts):
        if rank not in reports:
            lines.append(
                f"hang: rank {rank} on {host} gives no sign of life: stopped, out of memory, or its host is gone"
            )
    waiting = [rank for rank, report in reports.items() if report.startswith("step ")]
    for rank, report in reports.items():
        if rank not in waiting or (len(waiting) == len(hosts)):
            lines.append(
                f"hang: rank {rank} on {hosts[rank]} has been in {report}; stack in {folder / f'rank-{rank:05d}.txt'}"
            )
    if waiting and len(waiting) < len(hosts):
        lines.append(f"hang: {len(waiting)} ranks wait for them in a step; their stacks are in {folder}")
    return lines
