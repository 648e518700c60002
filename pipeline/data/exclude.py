"""Samples that a data set has but training leaves out: damaged ones, copies of test images. The shards stay as they are.

Whoever judges samples (verify, dedup, a person) writes one list, `exclude/<name>.parquet` in the data set's folder, and
whoever opens a split leaves them out. A list belongs to the bytes it was made for, by the data set's fingerprint.
"""

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.bucket import AnyPath
from pipeline.data.manifest import Dataset, replacing
from pipeline.errors import UserError

FOLDER = "exclude"
# row: of the sample in its split, as the manifest has it. reason: one line for people.
EXCLUDED = pa.schema([("split", pa.string()), ("row", pa.int64()), ("key", pa.string()), ("reason", pa.string())])
_FINGERPRINT = b"fingerprint"


def write_list(dataset: Dataset, name: str, samples: pa.Table) -> AnyPath:
    """Write (or replace) the list `name` of a data set; samples: EXCLUDED. An empty list is one too: nothing was found."""
    folder = dataset.path / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.parquet"
    table = samples.select(EXCLUDED.names).cast(EXCLUDED).sort_by([("split", "ascending"), ("row", "ascending")])
    with replacing(path) as file:
        pq.write_table(table.replace_schema_metadata({_FINGERPRINT: dataset.fingerprint.encode()}), file)
    return path


def read_lists(dataset: Dataset) -> dict[str, pa.Table]:
    """Every list of a data set, by name, in the order of names. Raises UserError for one of other data or a damaged one."""
    lists = {}
    found: list[AnyPath] = [*(dataset.path / FOLDER).glob("[!.]*.parquet")]
    for path in sorted(found, key=str):
        try:
            with path.open("rb") as file:
                table = pq.read_table(file)
            made_for = table.schema.metadata[_FINGERPRINT].decode()
            table = table.select(EXCLUDED.names).cast(EXCLUDED)
        except (pa.ArrowInvalid, KeyError, TypeError):
            raise UserError(f"{path} is damaged. Remove it, and make it again.") from None
        if made_for != dataset.fingerprint:
            raise UserError(
                f"{path} was made for data {made_for}, but {dataset.path} is now {dataset.fingerprint}. Make it again, "
                "or remove it."
            )
        lists[path.stem] = table
    return lists
