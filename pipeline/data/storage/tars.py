"""Whether the tars of opened splits are there, with their sizes: checked by one process, or by all ranks together."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.storage.bucket import AnyPath, file_size, to_path
from pipeline.data.storage.parquet import REMEDY
from pipeline.data.storage.retry import Retry

if TYPE_CHECKING:
    from pipeline.process.distributed import Ranks

_THREADS = 16
_NAMED = 3


@dataclass(frozen=True)
class TarsToCheck:
    """The tars of a split. info: dataset.json, by which hosts know whether they have the same files.

    paths: S file names or URLs. sizes: (S,) int64, in the manifest. used: numbers of those of which samples are used;
    others may be missing. is_complete: (S,), whether all samples are used; otherwise a local one may be cut. In a
    bucket it must not, since its readers compare its size or checksum.
    """

    info: AnyPath
    paths: Sequence[str]
    sizes: np.ndarray
    used: np.ndarray
    is_complete: np.ndarray
    retry: Retry

    def problems(self, part: int = 0, parts: int = 1) -> list[str]:
        """What is wrong with one of so many equal parts of the tars, a sentence for each."""
        with ThreadPoolExecutor(_THREADS) as pool:  # A file server takes a millisecond, a bucket 30, for each.
            found = pool.map(self._problem_of, self.used[part::parts].tolist())
            return [problem for problem in found if problem]

    def _problem_of(self, number: int) -> str:
        path, expected = self.paths[number], self.sizes[number]
        try:
            size = file_size(to_path(path, self.retry))
        except FileNotFoundError:
            return f"{path} is missing"
        if size != expected and (self.is_complete[number] or "://" in path):
            return f"{path} has {counted(size, 'byte')}, but {expected:,} in the manifest"
        return ""


def refuse_problems(problems: Sequence[str], count: int) -> None:
    """Raise UserError if there are any. problems: the first ones. count: of all."""
    if count:
        more = f" ({count:,} findings in all)" if count > _NAMED else ""
        raise UserError(f"{'; '.join(problems[:_NAMED])}{more}. {REMEDY}")


def check_tars_on_all_ranks(ranks: "Ranks", splits: Sequence[TarsToCheck]) -> None:
    """Check the tars of splits that all ranks have opened; ranks that have the same files share the work. Collective.

    Raises the same UserError on all ranks.
    """
    mine = tuple(_identity_of(split.info) for split in splits)
    same = [rank for rank, files in enumerate(ranks.gather(mine)) if files == mine]
    place = same.index(ranks.rank)
    problems = [problem for split in splits for problem in split.problems(place, len(same))]
    found = ranks.gather((len(problems), problems[:_NAMED]))
    refuse_problems(sorted({one for _, some in found for one in some}), sum(count for count, _ in found))


def _identity_of(path: AnyPath) -> tuple[int, int] | str:
    """The same on hosts that share a file system, and another one for copies on their own disks."""
    if not isinstance(path, Path):
        return str(path)
    stat = path.stat()
    return stat.st_ino, stat.st_ctime_ns
