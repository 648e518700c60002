"""Ignored files of a source: which files are not samples, and the notes that count them."""

from dataclasses import dataclass, field

from pipeline.base.words import counted, printable
from pipeline.data.loading.decode import SYSTEM_FOLDERS

# Number of examples in a message.
NAMED = 3


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


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name, or one that it lies in, is hidden, or in a folder that a system adds
    (SYSTEM_FOLDERS).
    """
    return any(part.startswith(".") or part in SYSTEM_FOLDERS for part in name.split("/"))
