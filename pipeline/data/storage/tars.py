"""Whether the tars of opened splits are there, with their sizes: checked by one process, or by all ranks together."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.storage.bucket import AnyPath, file_size, state_of, to_path
from pipeline.data.storage.parquet import REMEDY
from pipeline.data.storage.retry import Retry

if TYPE_CHECKING:
    from pipeline.process.distributed import Ranks

_THREADS = 16
_NAMED = 3


@dataclass(frozen=True)
class TarsToCheck:
    """The tars of a split. info: dataset.json, by which hosts know whether they have the same files.

    tars: (file name or URL, bytes in the manifest, whether all samples are used) of those of which samples are used;
    others may be missing. Unless all are used, a local one may be cut. In a bucket it must not, since its readers
    compare its size or checksum.
    """

    info: AnyPath
    tars: Sequence[tuple[str, int, bool]]
    retry: Retry

    def problems(self, part: int = 0, parts: int = 1) -> list[str]:
        """What is wrong with one of so many equal parts of the tars, a sentence for each."""
        with ThreadPoolExecutor(_THREADS) as pool:  # A file server takes a millisecond, a bucket 30, for each.
            return [*filter(None, pool.map(self._problem_of, self.tars[part::parts]))]

    def _problem_of(self, tar: tuple[str, int, bool]) -> str:
        path, expected, is_complete = tar
        try:
            size = file_size(to_path(path, self.retry))
        except FileNotFoundError:
            return f"{path} is missing"
        if size != expected and (is_complete or "://" in path):
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
    # The same on hosts that share a file system, and others for copies on their own disks.
    mine = tuple(state_of(split.info) for split in splits)
    same = [rank for rank, files in enumerate(ranks.gather(mine)) if files == mine]
    place = same.index(ranks.rank)
    problems = [problem for split in splits for problem in split.problems(place, len(same))]
    found = ranks.gather((len(problems), problems[:_NAMED]))
    refuse_problems(sorted({one for _, some in found for one in some}), sum(count for count, _ in found))
