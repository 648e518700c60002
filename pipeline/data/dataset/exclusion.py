"""Samples that are in a data set but excluded when a split is opened: damaged ones, copies of test images, a random part.

A job that judges samples (verify, dedup), or a person, writes a list, `exclude/<name>.parquet` in the data set's folder. The
shards stay as they are. A list is valid for the data it was made for, by the data set's fingerprint, and for the rows of the manifest
it was made for, by their keys: a tar indexed again may have other rows, if more of its images are skipped.
"""

import io
import json
from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from pipeline.base import random_numbers
from pipeline.base.errors import UserError, raise_outage
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted
from pipeline.data.dataset.tables import SAMPLES_FILE, ManifestTables
from pipeline.data.storage.atomic import write_files
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.parquet import open_parquet
from pipeline.data.storage.retry import StorageError
from pipeline.settings.quantities import Limit

FOLDER = "exclude"
# The list of copies within a split, whose reasons name the image that was kept: "copy of KEY, distance 0.031".
NEAR_COPIES = "near_copies"
_COPY_OF = r"^copy of (?P<kept>.*), distance \d"
# row: the sample's row in its split in the manifest (`dataset.table(split)`). reason: one line for people.
EXCLUDED = pa.schema([("split", pa.string()), ("row", pa.int64()), ("key", pa.string()), ("reason", pa.string())])
# Metadata of a list's file. samples: SHA-256 of the samples.parquet it was made for; with the same file, keys need not be compared.
# It and the checksum are missing in lists of earlier versions and of other writers.
_FINGERPRINT, _CHECKSUM, _SAMPLES = b"fingerprint", b"checksum", b"samples"


def write_list(dataset: ManifestTables, name: str, samples: pa.Table) -> AnyPath:
    """Write or replace the list `name` of a data set; samples: EXCLUDED. An empty list says that none were found."""
    table = samples.select(EXCLUDED.names).cast(EXCLUDED).sort_by([("split", "ascending"), ("row", "ascending")])
    for split in table["split"].unique().to_pylist():
        in_split = table.filter(pc.equal(table["split"], split))
        keys = dataset.table(split, verify=False).keys(in_split["row"].to_numpy())
        assert keys == in_split["key"].to_pylist(), f"list {name}: rows of {split!r} are not those of the manifest"
    metadata = {_FINGERPRINT: dataset.fingerprint.encode(), _CHECKSUM: _checksum(table), _SAMPLES: _samples(dataset)}
    content = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), content)
    folder, file = dataset.path / FOLDER, f"{name}.parquet"
    write_files(folder, {file: content.getvalue()})
    return folder / file


def names_of_lists(dataset: ManifestTables) -> list[str]:
    """The names of all lists of a data set, which are not read."""
    return list(_find(dataset))


def read_lists(dataset: ManifestTables, choice: str | Collection[str] = "all") -> dict[str, pa.Table]:
    """The chosen lists of a data set, by name, in the order of names.

    choice: "all", "none", or names with commas between, as settings have it; or the names themselves. Raises UserError for a list that is
    missing, damaged or made for other data.
    """
    found = _find(dataset)
    if isinstance(choice, str):
        by_word = {"all": list(found), "none": []}
        chosen = by_word.get(choice, sorted({name.strip() for name in choice.split(",")}))
    else:
        chosen = sorted(choice)
    for name in chosen:
        if name not in found:
            known = f"It has: {', '.join(found)}." if found else "It has none."
            raise UserError(f"{dataset.path} has no list {name!r} of excluded samples. {known}")
    return {name: _read(dataset, found[name]) for name in chosen}


def earlier_list(dataset: ManifestTables, name: str) -> pa.Table:
    """The list of earlier runs of a job (EXCLUDED); empty if it is missing, damaged or of other data, since it will be replaced."""
    try:
        return read_lists(dataset, name)[name]
    except StorageError:
        raise
    except UserError:
        return EXCLUDED.empty_table()


def lost_copies(dataset: ManifestTables, name: str) -> str:
    """A line about images that are excluded as near copies of one that the list `name` excludes, too, so that none of them is left; "" for none."""
    copies, listed = (earlier_list(dataset, of) for of in (NEAR_COPIES, name))
    lost = []
    for split in listed["split"].unique().to_pylist() if name != NEAR_COPIES else []:
        keys, of_split = (table.filter(pc.equal(table["split"], split)) for table in (listed, copies))
        kept = pc.struct_field(pc.extract_regex(of_split["reason"], _COPY_OF), "kept")
        is_lost = pc.and_not(pc.is_in(kept, keys["key"]), pc.is_in(of_split["key"], keys["key"]))
        lost += of_split["key"].filter(is_lost).to_pylist()
    if not lost:
        return ""
    return (
        f"note: the list {name} has images whose near copies are excluded for them: {counted(len(lost), 'copy')}, such as {lost[0]}. To have one "
        f"of each back: python launch/dedup.py data={dataset.path} within_split=true"
    )


def excluded_rows(
    dataset: ManifestTables, split: str, choice: str | Collection[str]
) -> tuple[np.ndarray, dict[str, int]]:
    """(rows of a split in the manifest that the chosen lists exclude, how many of them each list has).

    The rows are int64, ascending, without repetition; a sample may be in several lists. Raises UserError as `read_lists`
    does, and for a row that the split does not have, or that has another key there.
    """
    lists = {name: table.filter(pc.equal(table["split"], split)) for name, table in read_lists(dataset, choice).items()}
    rows = {name: _distinct(table["row"].to_numpy()) for name, table in lists.items()}
    num_samples = dataset.info["samples"][split]
    for name, in_list in rows.items():
        if len(in_list) and not 0 <= in_list[0] <= in_list[-1] < num_samples:
            raise UserError(
                f"{dataset.path / FOLDER / name}.parquet has rows from {in_list[0]} to {in_list[-1]} of split {split!r}, "
                f"which has {counted(num_samples, 'sample')}. Remove it, and make it again."
            )
        _refuse_other_keys(dataset, split, name, lists[name])
    together = _distinct(np.concatenate([np.empty(0, np.int64), *rows.values()]))
    return together, {name: len(in_list) for name, in_list in rows.items()}


def rows_beyond_limit(num_rows: int, excluded: np.ndarray, limit: Limit, seed: int) -> np.ndarray:
    """Rows to exclude besides `excluded` so that `limit` samples are left: int64, ascending.

    The seed puts the samples in a random order, of which the first are kept; so a smaller subset is inside a larger one.
    Raises UserError for a limit of no sample, of more than there are, or of a part of one.
    """
    if limit.unit == "samples" and not limit.amount.is_integer():
        share = f" For a share of them, write {100 * limit.amount:g}%." if limit.amount < 1 else ""
        raise UserError(f"data.limit = {limit} is no whole number of samples.{share}")
    rows = np.delete(np.arange(num_rows), excluded)
    count = limit.count(len(rows))
    if not 0 < count <= len(rows):
        raise UserError(f"data.limit = {limit} is {counted(count, 'sample')}, and the split has {len(rows):,}.")
    places = random_numbers.bits(seed, Purpose.SUBSET, rows)
    last = np.partition(places, count - 1)[count - 1]
    return rows[places > last]


def _distinct(rows: np.ndarray) -> np.ndarray:
    """Each number once, ascending. np.unique of NumPy 2.4 does the same by a hash table, which takes 13 to 20 times as long for millions."""
    rows = np.sort(rows)
    return rows[np.diff(rows, prepend=rows[:1] - 1) != 0]


def _find(dataset: ManifestTables) -> dict[str, AnyPath]:
    there: list[AnyPath] = [*(dataset.path / FOLDER).glob("[!.]*.parquet")]
    return {path.stem: path for path in sorted(there, key=str)}


def _read(dataset: ManifestTables, path: AnyPath) -> pa.Table:
    damaged = UserError(f"{path} is damaged. Remove it, and make it again.")
    try:
        table = open_parquet(path).read()
        made_for = table.schema.metadata[_FINGERPRINT].decode()
        checksum, made_of = (table.schema.metadata.get(name) for name in (_CHECKSUM, _SAMPLES))
        table = table.select(EXCLUDED.names).cast(EXCLUDED)
        if table["row"].null_count or table["split"].null_count or checksum not in (None, _checksum(table)):
            raise damaged
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise_outage(error, path)
        raise damaged from None
    # Another range of values changes the fingerprint, and no sample.
    if made_for != dataset.fingerprint and not (made_of == _samples(dataset) != b""):
        raise UserError(
            f"{path} was made for data {made_for}, but {dataset.path} is now {dataset.fingerprint}. Make it again, "
            "or remove it."
        )
    return table.replace_schema_metadata({_SAMPLES: made_of or b""})


def _refuse_other_keys(dataset: ManifestTables, split: str, name: str, listed: pa.Table) -> None:
    """Raise UserError if a row of a list is another sample in the manifest. listed: the list's rows of the split."""
    if not len(listed) or (listed.schema.metadata[_SAMPLES] == _samples(dataset) != b""):
        return
    rows, keys = listed["row"].to_numpy(), listed["key"].to_pylist()
    for row, key, there in zip(rows.tolist(), keys, dataset.table(split, verify=False).keys(rows), strict=True):
        if key not in (None, there):
            raise UserError(
                f"{dataset.path / FOLDER / name}.parquet was made for another {SAMPLES_FILE}: row {row} of split {split!r} was {key!r}, "
                f"and is now {there!r}. Make it again, or remove it."
            )


def _samples(dataset: ManifestTables) -> bytes:
    return dataset.info["files"].get(SAMPLES_FILE, "").encode()


def _checksum(table: pa.Table) -> bytes:
    """Hex XXH3-128 of the rows and splits of a list (EXCLUDED)."""
    splits = table["split"].combine_chunks().dictionary_encode()
    digest = xxhash.xxh3_128(table["row"].to_numpy().astype("<i8").tobytes())
    digest.update(splits.indices.to_numpy(zero_copy_only=False).astype("<i4").tobytes())
    digest.update(json.dumps(splits.dictionary.to_pylist()).encode())
    return digest.hexdigest().encode()
