"""What a task's finished data set records of its origin: the entry in dataset.json, and keys.parquet."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from data_tools.sources.listing import Listing
from data_tools.vtab.keys import KEYS_FILE, by_pool, digest, read_keys
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import INFO, Dataset, open_dataset
from pipeline.data.storage.bucket import AnyPath

_NAMED = 3


def read_about(dataset: Dataset) -> dict[str, Any] | None:
    """Returns the entry of `prepare.py` in dataset.json, None for other data sets. Raises UserError for an invalid entry."""
    where = str(dataset.path / INFO)
    source = json_record.convert(dataset.info.get("source"), dict[str, Any], where, "source")
    if source.get("vtab") is None:
        return None
    about = json_record.convert(source["vtab"], dict[str, Any], where, "source.vtab")
    kinds: dict[str, Any] = {"task": str, "from": str, "published": bool, "notes": list[str]}
    if about.get("from") != "lists":
        kinds["keys_sha256"] = str
    for name, kind in kinds.items():
        json_record.convert(about.get(name), kind, where, f"source.vtab.{name}")
    return about


def as_recorded(listing: Listing, out: AnyPath) -> Listing:
    """Returns the listing with the keys in the order of the finished data set in out, if that has the same samples.

    Another origin of the same samples lists the keys in another order, and dataset.json has the digest of the first one's table.
    Raises UserError if keys or labels of samples that are in no split differ.
    """
    table = listing.extra_tables.get(KEYS_FILE)
    if table is None or not (out / INFO).exists():
        return listing
    dataset = open_dataset(out)
    about = read_about(dataset)
    if about is None or "keys_sha256" not in about or dataset.info["source"].get("sha256") != listing.digest():
        return listing  # The sharding job refuses other samples.
    notes = []
    if listing.about["vtab"]["published"] and not about["published"]:
        notes.append(
            f"{out} was made with published=false, which it keeps saying, and so do its scores. To change that, remove it, and run "
            "again"
        )
    if about["keys_sha256"] != digest(table):
        table = _recorded_keys(table, out, about, listing.source)
        listing.about["vtab"]["keys_sha256"] = about["keys_sha256"]
    return replace(listing, notes=[*listing.notes, *notes], extra_tables={**listing.extra_tables, KEYS_FILE: table})


def _recorded_keys(table: pa.Table, out: AnyPath, about: dict[str, Any], source: AnyPath) -> pa.Table:
    """Returns the content of keys.parquet in out. Raises UserError if it is damaged, or table has other rows."""
    try:
        recorded = read_keys(out / KEYS_FILE)
    except (OSError, pa.ArrowException):
        recorded = None
    if recorded is None or digest(recorded) != about["keys_sha256"]:
        raise UserError(
            f"{out / KEYS_FILE} is missing or damaged, and {source} has other keys or another order of them. Give the "
            f"{about['from']} that the data set was made of, or remove {out}, and run again."
        )
    if changed := [*changes(by_pool(table), by_pool(recorded))]:
        raise UserError(
            f"{out} was made of other keys or labels than {source} has now: {'; '.join(changed)}. Choose another out=..., or remove "
            "the folder."
        )
    return recorded


def changes(now: Mapping[str, tuple[list[str], Any]], kept: Mapping[str, tuple[list[str], Any]]) -> Iterator[str]:
    """Yields a description of each difference between the keys and labels of a source and those of keys.parquet."""
    for name in sorted(now.keys() | kept.keys()):
        if name not in now or name not in kept:
            yield f"pool {name!r} is only in {'the source' if name in now else KEYS_FILE}"
            continue
        of_source, of_file = (dict(zip(keys, labels.tolist(), strict=True)) for keys, labels in (now[name], kept[name]))
        yield from differences(f"{KEYS_FILE}, pool {name!r},", of_source, of_file)


def differences(where: str, expected: dict[str, int], found: dict[str, Any]) -> Iterator[str]:
    """Yields a description of each kind of difference between two mappings of keys to labels."""
    others = [key for key in expected.keys() & found.keys() if expected[key] != found[key]]
    for what, keys in (
        ("lacks", expected.keys() - found.keys()),
        ("has, and should not,", found.keys() - expected.keys()),
        ("has with another label", others),
    ):
        if keys:
            some = sorted(keys)[:_NAMED]
            yield f"{where} {what} {len(keys):,}: {', '.join(some)}{', ...' if len(keys) > _NAMED else ''}"
