"""Samples that a data set has but training leaves out: damaged ones, copies of test images. The shards stay as they are.

Whoever judges samples (verify, dedup, a person) writes one list, `exclude/<name>.parquet` in the data set's folder, and
whoever opens a split leaves them out. A list belongs to the bytes it was made for, by the data set's fingerprint.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from pipeline.data.dataset.manifest import Dataset, open_parquet
from pipeline.data.storage.bucket import AnyPath, make_folder
from pipeline.data.storage.whole import replacing
from pipeline.errors import UserError

FOLDER = "exclude"
# row: of the sample in its split, as the manifest has it: `dataset.table(split)`. reason: one line for people.
EXCLUDED = pa.schema([("split", pa.string()), ("row", pa.int64()), ("key", pa.string()), ("reason", pa.string())])
# Of a list's file. The checksum is missing in lists of earlier versions and of other writers.
_FINGERPRINT, _CHECKSUM = b"fingerprint", b"checksum"


def write_list(dataset: Dataset, name: str, samples: pa.Table) -> AnyPath:
    """Write (or replace) the list `name` of a data set; samples: EXCLUDED. An empty list is one too: nothing was found."""
    folder = dataset.path / FOLDER
    make_folder(folder)
    path = folder / f"{name}.parquet"
    table = samples.select(EXCLUDED.names).cast(EXCLUDED).sort_by([("split", "ascending"), ("row", "ascending")])
    for split in table["split"].unique().to_pylist():
        of_split = table.filter(pc.equal(table["split"], split))
        keys = dataset.table(split, prove=False).keys(of_split["row"].to_numpy())
        assert keys == of_split["key"].to_pylist(), f"list {name}: rows of {split!r} are not those of the manifest"
    with replacing(path) as file:
        about = {_FINGERPRINT: dataset.fingerprint.encode(), _CHECKSUM: _checksum(table)}
        pq.write_table(table.replace_schema_metadata(about), file)
    return path


def read_lists(dataset: Dataset, choice: str = "all") -> dict[str, pa.Table]:
    """The chosen lists of a data set, by name, in the order of names.

    choice: "all" there are, "none", or names with commas between. Raises UserError for a name that has no list, a list of
    other data and a damaged one.
    """
    there: list[AnyPath] = [*(dataset.path / FOLDER).glob("[!.]*.parquet")]
    found = {path.stem: path for path in sorted(there, key=str)}
    chosen = (
        list(found)
        if choice == "all"
        else []
        if choice == "none"
        else sorted({name.strip() for name in choice.split(",")})
    )
    for name in chosen:
        if name not in found:
            known = f"It has: {', '.join(found)}." if found else "It has none."
            raise UserError(f"{dataset.path} has no list {name!r} of samples to leave out. {known}")
    return {name: _read(dataset, found[name]) for name in chosen}


def excluded_rows(dataset: Dataset, split: str, choice: str) -> tuple[np.ndarray, dict[str, int]]:
    """Rows of a split, as the manifest has them, that the chosen lists leave out: int64, ascending, each once.

    And how many of them each list has: a sample may stand in several. Raises UserError as `read_lists` does, and for a
    row that the split does not have.
    """
    rows = {
        name: np.unique(table.filter(pc.equal(table["split"], split))["row"].to_numpy())
        for name, table in read_lists(dataset, choice).items()
    }
    for name, of_list in rows.items():
        if len(of_list) and not 0 <= of_list[0] <= of_list[-1] < dataset.info["samples"][split]:
            raise UserError(
                f"{dataset.path / FOLDER / name}.parquet names rows from {of_list[0]} to {of_list[-1]} of split {split!r}, "
                f"which has {dataset.info['samples'][split]:,} samples. Remove it, and make it again."
            )
    together = np.unique(np.concatenate([np.empty(0, np.int64), *rows.values()]))
    return together, {name: len(of_list) for name, of_list in rows.items()}


def _read(dataset: Dataset, path: AnyPath) -> pa.Table:
    try:
        table = open_parquet(path).read()
        made_for = table.schema.metadata[_FINGERPRINT].decode()
        checksum = table.schema.metadata.get(_CHECKSUM)
        table = table.select(EXCLUDED.names).cast(EXCLUDED)
        is_whole = not table["row"].null_count and not table["split"].null_count
        is_whole = is_whole and checksum in (None, _checksum(table))
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged. Remove it, and make it again.") from None
    if not is_whole:
        raise UserError(f"{path} is damaged. Remove it, and make it again.")
    if made_for != dataset.fingerprint:
        raise UserError(
            f"{path} was made for data {made_for}, but {dataset.path} is now {dataset.fingerprint}. Make it again, "
            "or remove it."
        )
    return table


def _checksum(table: pa.Table) -> bytes:
    """Of which samples a list names (EXCLUDED): hex, XXH3-128 of rows and splits."""
    splits = table["split"].combine_chunks().dictionary_encode()
    digest = xxhash.xxh3_128(table["row"].to_numpy().astype("<i8").tobytes())
    digest.update(splits.indices.to_numpy(zero_copy_only=False).astype("<i4").tobytes())
    digest.update(json.dumps(splits.dictionary.to_pylist()).encode())
    return digest.hexdigest().encode()
