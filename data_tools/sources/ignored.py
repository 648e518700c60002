"""Files of a source that are no samples: which they are, how a note counts them, and which layout reads them."""

import re
from dataclasses import dataclass, field

from pipeline.base.words import counted, printable
from pipeline.data.loading.decode import SYSTEM_FOLDERS

# Number of examples in a message.
NAMED = 3
_may_be_of_a_system = re.compile("|".join(map(re.escape, sorted(SYSTEM_FOLDERS)))).search
# Extension -> what to do to have such files read.
_READ_OTHERWISE = {
    ".parquet": "layout=parquet reads Parquet files",
    ".tar": "layout=webdataset reads tars of samples",
    ".csv": "a list of images is given as source=FILE.csv",
    ".tsv": "a list of images is given as source=FILE.tsv",
}


@dataclass
class Few:
    """A count of names, with the first few as examples."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(printable(name))

    def counted(self, noun: str) -> str:
        return counted(self.count, noun)

    def __str__(self) -> str:
        return ", ".join(self.first) + ", ..." * (self.count > len(self.first))


def other_layout(ignored: Few) -> str:
    """Says which layout reads files like the first that were ignored; empty if none does."""
    ways = {way: None for name in ignored.first for ext, way in _READ_OTHERWISE.items() if name.lower().endswith(ext)}
    return f" ({'; '.join(ways)}.)" if ways else ""


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name, or one that it lies in, is hidden, or in a folder that a system adds (SYSTEM_FOLDERS)."""
    if not ("/." in name or name.startswith(".") or _may_be_of_a_system(name)):
        return False
    return any(part.startswith(".") or part in SYSTEM_FOLDERS for part in name.split("/"))
