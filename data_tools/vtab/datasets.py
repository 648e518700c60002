"""The 16 source data sets of VTAB-1k: files and their URLs, numbers of images, and boundaries of the splits
(datasets.yaml).
"""

from dataclasses import dataclass

from pipeline.settings.yaml_reader import read_table

# In the official train list of SUN397, but undecodable, so that some copies omit it. No split of VTAB-1k contains it.
UNREADABLE = "/t/track/outdoor/sun_aophkoiosslinihb.jpg"


@dataclass(frozen=True)
class PublishedFile:
    """A published file. size: in bytes, 0 if not published. sha256: hex, "" if not published. url: may require a
    login.
    """

    name: str
    url: str
    size: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class PoolSlice:
    """The part of a pool (a split of tensorflow_datasets) that begins at `percent` of it, rounded down, in the order of
    the hash.
    """

    pool: str
    percent: int = 0


@dataclass(frozen=True)
class DataSet:
    """A source data set. name: name of its folder. counts: number of samples of each pool.

    val: val200 is the first 200 samples of this part. test: all samples of this part. (train800 is always the beginning
    of `train`.)
    hint: how to get or use the files.
    """

    name: str
    files: tuple[PublishedFile, ...]
    counts: dict[str, int]
    val: PoolSlice = PoolSlice("validation")
    test: PoolSlice = PoolSlice("test")
    hint: str = ""


DATASETS: dict[str, DataSet] = {dataset.name: dataset for dataset in read_table(__file__, list[DataSet])}
