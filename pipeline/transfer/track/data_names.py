"""Names of the data sets that a grid's final weights are also scored on, in metrics and in folders of reports."""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import location_and_split
from pipeline.monitor.metrics_file import accepted_name

# top1_std is the deviation over seeds.
_TAKEN = "std"


class DataName(NamedTuple):
    """metric: what follows top1_, as "pets_test". folder: of the report in <run>/evaluate, as "pets-test"."""

    metric: str
    folder: str


def data_names(entries: Sequence[str]) -> dict[str, DataName]:
    """Entry, `folder` or `folder:split` -> its names, which no other entry has. entries: different ones.

    They are made of the data set's folder alone, and begin with folders above it where these tell two entries apart. Raises
    UserError where they do not.
    """
    # Once, because it may ask the store of a URL.
    found = {entry: location_and_split(entry) for entry in entries}
    folders = {entry: _folders(location) for entry, (location, _) in found.items()}
    depths = dict.fromkeys(entries, 1)
    while True:
        names = {entry: _names(folders[entry][-depth:], found[entry][1]) for entry, depth in depths.items()}
        clashes = [
            [entry, *others]
            for entry, name in names.items()
            if (others := [other for other in entries if other != entry and _are_same(name, names[other])])
            or name.metric == _TAKEN
        ]
        if not clashes:
            return names
        longer = [entry for entry, *_ in clashes if depths[entry] < len(folders[entry])]
        if not longer:
            entries_of_one, metric = " and ".join(clashes[0]), names[clashes[0][0]].metric
            raise UserError(
                f"also: the scores on {entries_of_one} would have the name of others, top1_{metric}. Leave one out, or rename a folder."
            )
        for entry in longer:
            depths[entry] += 1


def _are_same(one: DataName, other: DataName) -> bool:
    return one.metric == other.metric or one.folder == other.folder


def _folders(location: str) -> tuple[str, ...]:
    """The folders of a path or URL, the data set's own last."""
    _, is_url, path = location.rpartition("://")
    return PurePosixPath(path.partition("?")[0] if is_url else path).parts or (".",)


def _names(folders: tuple[str, ...], split: str) -> DataName:
    name = "_".join(part.strip("/").replace(":", "_") for part in folders)
    return DataName(accepted_name(name + f"_{split}" * bool(split)), f"{name}-{split or 'val'}")
