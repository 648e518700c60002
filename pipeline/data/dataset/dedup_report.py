"""The report that launch/dedup.py leaves in a data set: how many of its images are copies of test images."""

from dataclasses import dataclass

from pipeline.base import json_record
from pipeline.data.storage.bucket import AnyPath, locate

DEDUP_REPORT = "dedup/report.json"


@dataclass(frozen=True)
class SearchedData:
    """The split that was searched for copies. name: as FOLDER:SPLIT."""

    fingerprint: str
    name: str

    def is_split(self, split: str) -> bool:
        return self.name.rpartition(":")[2] == split


@dataclass(frozen=True)
class TestSet:
    """A split whose images' copies were searched for. name: as FOLDER:SPLIT. copies: images of the data set that are
    copies.
    """

    name: str
    fingerprint: str
    copies: int


@dataclass(frozen=True)
class DedupReport:
    """The fields that are read of the report."""

    data: SearchedData
    against: list[TestSet]

    def in_words(self) -> str:
        """Each test set and the number of its copies, such as "pets:test 12; cifar10:test 3"."""
        return "; ".join(f"{part.name} {part.copies:,}" for part in self.against) or "no test set"


def read_dedup_report(dataset: AnyPath) -> DedupReport:
    """Raises FileNotFoundError if the data set was not searched, and UserError for a damaged report."""
    path = locate(dataset, DEDUP_REPORT)
    return json_record.parse(path.read_bytes(), DedupReport, str(path))
