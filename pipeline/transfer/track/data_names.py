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

    They are made of the data set's folder alone, and where these do not tell entries apart, of as many folders above it, too, as do.
    Raises UserError where none do.
    """
    # Once, because it may ask the store of a URL.
    found = {entry: location_and_split(entry) for entry in entries}
    folders = {entry: _folders(location) for entry, (location, _) in found.items()}
    for depth in range(1, max(map(len, folders.values()), default=1) + 1):
        names = {entry: _names(folders[entry][-depth:], found[entry][1]) for entry in entries}
        metrics = {name.metric for name in names.values()}
        if len(metrics) == len({name.folder for name in names.values()}) == len(names) and _TAKEN not in metrics:
            return names
    raise UserError(
        f"also: the scores on {' and '.join(entries)} would have the name of others, top1_{' or top1_'.join(sorted(metrics))}. Leave one "
        "out, or rename a folder."
    )


def _folders(location: str) -> tuple[str, ...]:
    """The folders of a path or URL, the data set's own last."""
    _, is_url, path = location.rpartition("://")
    return PurePosixPath(path.partition("?")[0] if is_url else path).parts or (".",)


def _names(folders: tuple[str, ...], split: str) -> DataName:
    name = "_".join(part.strip("/").replace(":", "_") for part in folders)
    return DataName(accepted_name(name + f"_{split}" * bool(split)), f"{name}-{split or 'val'}")
