"""What a task's finished data set records of its origin: the entry in dataset.json, and keys.parquet."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from data_tools.sources.listing import Listing
from data_tools.vtab.keys import KEYS_FILE, digest
from pipeline.base import json_record
from pipeline.data.dataset.manifest import INFO, Dataset, open_dataset
from pipeline.data.storage.bucket import AnyPath

_NAMED = 3


def read_about(dataset: Dataset) -> dict[str, Any] | None:
    """Returns the entry of `prepare.py` in dataset.json, None for other data sets. Raises UserError for an invalid
    entry.
    """
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
    """Returns the listing without its table of keys if the finished data set in out has another: dataset.json has the
    digest of that one.

    Another origin of the same samples lists the keys in another order. (The sharding job refuses other samples.)
    """
    table = listing.extra_tables.get(KEYS_FILE)
    about = read_about(open_dataset(out)) if table is not None and (out / INFO).exists() else None
    return listing if about is None or digest(table) == about.get("keys_sha256") else replace(listing, extra_tables={})


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
