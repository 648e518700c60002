"""Samples that are in a data set but excluded when a split is opened: damaged ones, copies of test images, a random
part.

A job that judges samples (verify, dedup), or a person, writes a list, `exclude/<name>.parquet` in the data set's
folder. The shards stay as they are. A list is valid for the samples.parquet that it was made for, by its SHA-256: a tar
indexed again may have other rows, if more of its images are skipped.
"""

import io
import json
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted
from pipeline.data.dataset.split import SAMPLES_FILE
from pipeline.data.storage.atomic import write_files
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.parquet import open_parquet, reading
from pipeline.data.storage.retry import StorageError
from pipeline.settings.quantities import Limit

if TYPE_CHECKING:
    from pipeline.data.dataset.manifest import Dataset

FOLDER = "exclude"
# The list of copies within a split.
NEAR_COPIES = "near_copies"
# row: the sample's row in its split in the manifest (`dataset.table(split)`). reason: one readable line.
EXCLUDED = pa.schema([("split", "string"), ("row", "int64"), ("key", "string"), ("reason", "string")])
# Metadata of a list's file. samples: SHA-256 of the samples.parquet it was made for.
_CHECKSUM, _SAMPLES = b"checksum", b"samples"
# Rows of a list that are read at a time.
_BATCH = 2**18


def write_list(dataset: "Dataset", name: str, samples: pa.Table) -> AnyPath:
    """Write or replace the list `name` of a data set; samples: EXCLUDED. An empty list says that none were found."""
    table = samples.select(EXCLUDED.names).cast(EXCLUDED).sort_by([("split", "ascending"), ("row", "ascending")])
    checksum, _ = _scan(table.to_batches(), "")
    metadata = {_CHECKSUM: checksum, _SAMPLES: dataset.info["files"][SAMPLES_FILE]}
    content = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), content)
    folder, file = dataset.path / FOLDER, f"{name}.parquet"
    write_files(folder, {file: content.getvalue()})
    return folder / file


def read_lists(dataset: "Dataset", choice: str = "all") -> dict[str, pa.Table]:
    """The chosen lists of a data set, by name, in the order of names, with keys and reasons.

    choice, and errors: as of `excluded_rows`.
    """
    tables = {}
    for name, path in _chosen(dataset, choice).items():
        _rows(dataset, path, "")
        with reading(path, "Remove it, and make it again."):
            tables[name] = open_parquet(path).read().select(EXCLUDED.names).cast(EXCLUDED)
    return tables


def _chosen(dataset: "Dataset", choice: str) -> dict[str, AnyPath]:
    """Name -> path of the chosen lists.

    choice: "all", "none", or names with commas between, as settings have it. Raises UserError for a missing list.
    """
    paths = paths_of_lists(dataset)
    by_word = {"all": list(paths), "none": []}
    chosen = by_word.get(choice, sorted({name.strip() for name in choice.split(",")}))
    for name in chosen:
        if name not in paths:
            known = ", ".join(paths) or "none"
            raise UserError(f"{dataset.path} has no list {name!r} of excluded samples. It has: {known}.")
    return {name: paths[name] for name in chosen}


def earlier_list(dataset: "Dataset", name: str) -> pa.Table:
    """The list of earlier runs of a job (EXCLUDED); empty if it is missing, damaged or of other data, since it will be
    replaced.
    """
    try:
        return read_lists(dataset, name)[name]
    except StorageError:
        raise
    except UserError:
        return EXCLUDED.empty_table()


def excluded_rows(dataset: "Dataset", split: str, choice: str) -> tuple[np.ndarray, dict[str, int]]:
    """(rows of a split in the manifest that the chosen lists exclude, how many of them each list has).

    The rows are int64, ascending, without repetition; a sample may be in several lists. choice: as of `_chosen`.
    Raises UserError for a list that is missing, damaged or made for other data.
    """
    together, counts = np.empty(0, np.int64), {}
    for name, path in _chosen(dataset, choice).items():
        rows = _rows(dataset, path, split)
        counts[name] = len(rows)
        together = np.union1d(together, rows) if len(together) else rows
    return together, counts


def rows_beyond_limit(num_rows: int, excluded: np.ndarray, limit: Limit, seed: int) -> np.ndarray:
    """Rows to exclude besides `excluded` so that `limit` samples are left: int64, ascending.

    The seed puts the samples in a random order, of which the first are kept; so a smaller subset is inside a larger
    one. Raises UserError for a limit of no sample, of more than there are, or of a part of one.
    """
    if limit.unit == "samples" and not limit.amount.is_integer():
        raise UserError(f"data.limit = {limit} must be a whole number of samples, or a share as 10%.")
    rows = np.delete(np.arange(num_rows), excluded)
    count = limit.count(len(rows))
    if not 0 < count <= len(rows):
        raise UserError(f"data.limit = {limit} is {counted(count, 'sample')}, and the split has {len(rows):,}.")
    places = random_numbers.bits(seed, Purpose.SUBSET, rows)
    last = np.partition(places, count - 1)[count - 1]
    return rows[places > last]


def paths_of_lists(dataset: "Dataset") -> dict[str, AnyPath]:
    """Name -> path of all lists of a data set, which are not read."""
    lists: list[AnyPath] = [*(dataset.path / FOLDER).glob("[!.]*.parquet")]
    return {path.stem: path for path in sorted(lists, key=str)}


def _rows(dataset: "Dataset", path: AnyPath, split: str) -> np.ndarray:
    """The rows of a split in a list: int64, ascending, without repetition. Reads neither keys nor reasons."""
    with reading(path, "Remove it, and make it again."):
        file = open_parquet(path)
        made_for, checksum = (file.schema_arrow.metadata[name] for name in (_SAMPLES, _CHECKSUM))
        found, rows = _scan(file.iter_batches(_BATCH, columns=["split", "row"]), split)
        if checksum != found:
            raise ValueError("it does not match its checksum")
    if made_for != dataset.info["files"][SAMPLES_FILE].encode():
        raise UserError(
            f"{path} was made for another {SAMPLES_FILE} than that of {dataset.path}. Make it again, or remove it."
        )
    return rows if (rows[1:] > rows[:-1]).all() else np.unique(rows)


def _scan(batches: Iterable[pa.RecordBatch], split: str) -> tuple[bytes, np.ndarray]:
    """(checksum of the rows and splits of a list, hex XXH3-128; the rows of one split)."""
    digest, counts = xxhash.xxh3_128(), Counter[str]()
    found = [np.empty(0, np.int64)]
    for batch in batches:
        rows = batch["row"].to_numpy().astype("<i8")
        digest.update(rows.tobytes())
        counts.update({one["values"]: one["counts"] for one in pc.value_counts(batch["split"]).to_pylist()})
        found.append(rows[pc.equal(batch["split"], split).to_numpy(zero_copy_only=False)])
    digest.update(json.dumps(counts).encode())
    return digest.hexdigest().encode(), np.concatenate(found)
