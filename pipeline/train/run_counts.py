"""Counts of a run since its first start, over all ranks: unreadable images and retried storage requests."""

from collections.abc import Iterable, Mapping

from pipeline.checkpoint.store import Counts
from pipeline.data.loading.loader import Batch
from pipeline.data.storage.retry import Retry
from pipeline.process.distributed import Ranks


class RunCounts:
    """Continues the counts of a checkpoint, so that a resumed run reports what an undisturbed one would.

    A rank counts without the others; `gather_on_all_ranks` adds up. A rollback takes nothing back: the images of the discarded
    steps could not be read, and their batches are not read again.

    unreadable: row of the training split -> why it cannot be read. Each row counts once, however often and on whichever rank it was met.
    """

    def __init__(self, before: Counts, retry: Retry, ranks: Ranks) -> None:
        """before: of the checkpoint that the run resumes from. retry: counts this rank's retries since this start."""
        self.retry, self.ranks = retry, ranks
        self.unreadable = dict(before.unreadable)
        self.storage_retries = before.storage_retries
        self._new: dict[int, str] = {}
        self._retries_counted = 0  # Of this rank since this start, contained in storage_retries.

    def add(self, batches: Iterable[Batch], reasons: Mapping[int, str]) -> None:
        """Count the unreadable images of a completed step on this rank. reasons: of all unreadable rows."""
        for batch in batches:
            for row in batch.rows[~batch.valid.numpy()].tolist():
                if row not in self.unreadable:
                    self._new[row] = reasons[row]

    def gather_on_all_ranks(self) -> None:
        """Add what all ranks counted since the last call: afterwards the counts are the same on every rank."""
        retries = self.retry.retries
        for unreadable, new_retries in self.ranks.gather((self._new, retries - self._retries_counted)):
            for row, reason in unreadable.items():
                self.unreadable.setdefault(row, reason)
            self.storage_retries += new_retries
        self._new, self._retries_counted = {}, retries

    def to_save(self, loss_spikes: int) -> Counts:
        """The counts of a checkpoint, as they were last gathered. loss_spikes: so far, the same on every rank."""
        return Counts(loss_spikes, self.storage_retries, sorted(self.unreadable.items()))
