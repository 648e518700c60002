"""The sharding job: list the source, plan the shards, write each in a Ray task, merge the manifest.

A shard is a pure function of (sample table, seed, number, settings), so two runs write the same bytes. A killed job is
resumed by the same command, which recognises finished shards by their part files and checksums.
"""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq

from data_tools.sharding.copies import copy_notes, exact_copies
from data_tools.sharding.kinds import join_channels, source_pixels, split_pages
from data_tools.sharding.plan import PlannedShard, make_plan
from data_tools.sharding.selection import (
    apply_rules,
    describe_groups,
    describe_targets,
    groups_of,
    hold_out,
    odd_classes,
    readable_names,
    refuse_untrained,
    with_groups,
)
from data_tools.sharding.source_table import SOURCE_TABLE, difference, mark_changed, save
from data_tools.sharding.values import check_range, measure_values
from data_tools.sharding.write_shard import Done, ShardingJob, part_path, read_rows, write_planned
from data_tools.sources import Listing, list_source
from data_tools.sources.layouts.archive import remove_unpacked
from data_tools.sources.listing import NAMED, Skipped, reasons
from data_tools.sources.split_files import PARTS, PLAN
from data_tools.tasks import remove_leftovers, tasks_on_cluster
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import as_csv
from pipeline.base.json_record import quoted
from pipeline.base.locks import only_writer
from pipeline.base.progress import PROGRESS_FILE, duration
from pipeline.base.words import counted, first_of, missing, of_classes, printable, si, significant
from pipeline.cluster import ray_tasks
from pipeline.data.dataset.manifest import INFO, Dataset, Shard, open_dataset, write_dataset
from pipeline.data.dataset.split import BadBudget
from pipeline.data.images.stored import describe_left_out
from pipeline.data.storage.atomic import replacing, write_files
from pipeline.data.storage.bucket import AnyPath, name_inside, remove_tree
from pipeline.data.storage.retry import StorageError
from pipeline.settings.commands.data import ShardConfig

# Lists the samples of a source: (source, settings, staging) -> Listing; see `list_source`.
Lister = Callable[[AnyPath, ShardConfig, AnyPath], Listing]
STAGING, SKIPPED, FILLED = ".staging", "skipped.csv", "filled.csv"
# Settings that determine the bytes; a folder made with other values is refused.
_DECISIVE = ("seed", "val_share", "samples_per_shard", "resize_short", "jpeg_quality", "inspect")
# The same, recorded only if set. (Class lists and maps are part of the listing's digest.)
_DECISIVE_IF_SET = (
    "holdout_per_class",
    "min_images",
    "group_column",
    "group_pattern",
    "target_columns",
    "channels",
    "channel_pattern",
    "missing_channels",
    "pages",
    "to_rgb8",
    "nodata",
)
_DEFAULTS = ShardConfig(source="", out="")


def run(config: ShardConfig, list_samples: Lister = list_source) -> Dataset:
    """Make, resume or verify the data set config.out. Raises UserError; then dataset.json is not written.

    list_samples: lists the samples of config.source.
    """
    source, out = resolve("source", config.source), resolve("out", config.out)
    if name_inside(out, source) is not None:
        raise UserError(f"out = {config.out} lies inside source = {config.source}. Choose a folder elsewhere.")
    with only_writer(out):
        return _run(source, out, config, list_samples)


def _run(source: AnyPath, out: AnyPath, config: ShardConfig, list_samples: Lister) -> Dataset:
    started = time.monotonic()
    finished = open_dataset(out) if (out / INFO).exists() else None
    if finished and finished.info["source"].get("indexed"):
        raise UserError(f"{out} has a manifest that launch/index.py made of tars. Choose another out=...")
    existing = finished.info if finished else _unfinished(out)
    if others := _other_settings(config, existing):
        raise UserError(f"{out} was made with {'; '.join(others)}. Choose another out=..., or remove the folder.")
    try:
        remove_leftovers(out, out / PARTS, out / STAGING)
        listing = apply_rules(list_samples(source, config, out / STAGING), config)
        listing = split_pages(with_groups(join_channels(listing, config), config.group_pattern), config)
        refuse_untrained(listing, config)
        names = readable_names(listing.classes, config.synset_names)
        identity = _identity(listing, config)
        if existing and existing["source"]["sha256"] != identity["source"]["sha256"]:
            changes = difference(out / SOURCE_TABLE, listing)
            raise UserError(
                f"{out} was made of other images of {existing['source']['path']}:"
                f" {changes or 'the same, but with other classes, groups or numbers'}. Choose another out=..., or"
                " remove the folder."
            )
        _print_listing(listing, time.monotonic() - started)
        as_listed, to_compare = listing, ""
        if existing:
            listing, to_compare = mark_changed(listing, out / SOURCE_TABLE)
        if to_compare:
            print(f"{to_compare}: their bytes are compared with those in the shards", flush=True)
        split = hold_out(listing, config)
        for note in (*describe_groups(groups_of(split)), *odd_classes(split), *describe_targets(split)):
            print(note)

        pixels = source_pixels(listing, config)
        if config.resize_short and not pixels.is_rgb8:
            raise UserError(
                f"resize_short = {config.resize_short} stores JPEGs, which cannot hold {pixels.describe()}. Leave it"
                " out."
            )
        check_range(pixels, config.values)
        known = {shard.name: shard for shard in finished.shards()} if finished and not finished.damaged_tables() else {}
        write_files(out / PARTS, {PLAN: json.dumps(identity)})
        if to_compare or not (out / SOURCE_TABLE).exists():
            save(listing, out / SOURCE_TABLE)  # Kept until all samples have been compared.
        for name, table in listing.extra_tables.items():
            with replacing(out / name) as file:
                pq.write_table(table, file, compression="zstd")
        listing = split
        plan = make_plan(listing, config, out)
        results = _run_jobs(listing, plan, config, out, known, pixels)
        if known:
            dataset = _check_remade(out, results, known)
        else:
            for done in results:
                if not done.shard.samples:  # All its images are bad.
                    (out / done.shard.name).unlink(missing_ok=True)
            _write_filled(out, results)
            dataset = write_manifest(
                out,
                {part_path(out, done.shard.name): done for done in results},
                listing.skipped,
                classes=listing.classes,
                **identity,
                class_names=names,
                pixels=pixels,
                targets=listing.targets,
            )
        if not dataset.pixels.is_measured or (config.values and not known):
            dataset = measure_values(dataset, config, config.max_bad_share)
        if to_compare:
            save(as_listed, out / SOURCE_TABLE)
        remove_tree(out / PARTS)
        remove_tree(out / STAGING)
        remove_leftovers(out)
    except StorageError:
        raise  # The object store cannot be reached, or refuses access: no clean-up is possible.
    except UserError:
        # Unpacked data is kept for a restart once there is a plan. For a refused source only cached member lists are
        # kept.
        if not (out / PARTS / PLAN).exists():
            (remove_tree if existing else remove_unpacked)(out / STAGING)
        raise
    _print_done(dataset, results, listing, plan, time.monotonic() - started, verified=bool(known))
    return dataset


def make_jobs(
    listing: Listing,
    plan: list[PlannedShard],
    config: ShardConfig,
    out: AnyPath,
    known: dict[str, Shard],
    pixels: Pixels = RGB8,
) -> Iterator[tuple[ShardingJob, int, AnyPath]]:
    """Yields the argument of `write_planned` for each shard of the plan. known: shards of a finished data set in `out`,
    by name. pixels: of its images.
    """
    for number, (name, split, _) in enumerate(plan):
        job = ShardingJob(
            source=str(listing.source),
            out=str(out),
            name=name,
            split=split,
            images=[],
            config=config,
            known=known.get(name),
            convert=listing.convert,
            has_labels=listing.is_labelled,
            pixels=pixels,
            targets=listing.targets,
        )
        yield job, number, listing.root


def _run_jobs(
    listing: Listing,
    plan: list[PlannedShard],
    config: ShardConfig,
    out: AnyPath,
    known: dict[str, Shard],
    pixels: Pixels,
) -> list[Done]:
    """Returns every shard's result, in plan order. Raises UserError when too many images are bad."""
    results: dict[int, Done] = {}
    skipped = list(listing.skipped)
    _check_budget(skipped, listing, config, 0)
    jobs = make_jobs(listing, plan, config, out, known, pixels)
    shown = (len(listing), len(plan), out, "sharded")
    with tasks_on_cluster(write_planned, jobs, config.num_tasks, *shown) as (tasks, progress):
        for number, done in tasks:
            results[number] = done
            skipped += done.skipped
            progress.add(plan[number].samples, done.shard.bytes, made=done.made or bool(known))
            _check_budget(skipped, listing, config, progress.done)
    return [results[number] for number in range(len(plan))]


def _check_budget(skipped: list[Skipped], listing: Listing, config: ShardConfig, num_read: int) -> None:
    """Raises UserError when too many images are bad. num_read: images read so far, without items that could not be
    listed.
    """
    num_items = len(listing) + len(listing.skipped)
    budget = 0 if listing.needs_all else BadBudget(config.max_bad_share).allowed(num_items)
    if len(skipped) > budget:
        way_out = "" if listing.needs_all else " or allow more (max_bad_share=0.1, say)"
        raise UserError(
            f"{len(skipped):,} of the {counted(num_read + len(listing.skipped), 'image')} read so far are bad, more"
            f" than {budget:,} of {num_items:,}: {reasons(skipped)}. To go on, make them readable{way_out}, and run"
            " again; if you remove them, or their sizes change, choose another out=... too."
        )


def write_manifest(out: AnyPath, results: Mapping[AnyPath, Done], skipped: Sequence[Skipped], **about: Any) -> Dataset:
    """Merge the part files of tasks into the manifest, and print what is to be known of the images.

    results: by the path of the part file. skipped: what was skipped beside the samples of the results. about: further
    arguments of `write_dataset`. Raises UserError for a split without images.
    """
    kept = {part: done.shard for part, done in results.items() if done.shard.samples}
    rows = sorted([*skipped, *(row for done in results.values() for row in done.skipped)])
    if empty := {done.shard.split for done in results.values()} - {shard.split for shard in kept.values()}:
        raise UserError(f"no image of split {min(empty)!r} can be used: {reasons(rows)}.")
    write_table(out / SKIPPED, ("key", "where", "reason"), rows)
    unread = sum((Counter(done.left_out) for done in results.values()), Counter[str]())
    dataset = write_dataset(out, [*kept.values()], map(read_rows, kept), left_out=unread, **about)
    for note in (*describe_left_out(unread), *copy_notes(dataset, exact_copies(dataset, "none"))):
        print(note)
    return dataset


def _write_filled(out: AnyPath, results: list[Done]) -> None:
    """Name the images that a conversion could not read completely."""
    filled = sorted(row for done in results for row in done.filled)
    write_table(out / FILLED, ("key", "where"), filled)
    if filled:
        print(
            f"note: {counted(len(filled), 'image')} of the source cannot be read completely, such as {filled[0][1]};"
            f" the rest is grey (see {FILLED}). If your copies are damaged, and not the originals: replace them, remove"
            f" {out}, and run again."
        )


def write_table(path: AnyPath, header: tuple[str, ...], rows: Sequence[tuple]) -> None:
    """Write a CSV file; without rows, remove it."""
    write_files(path.parent, {path.name: as_csv([header, *rows]) if rows else None})


def _check_remade(out: AnyPath, results: list[Done], known: dict[str, Shard]) -> Dataset:
    """Returns the finished data set. Raises UserError if a rewritten shard differs from the manifest."""
    if changed := _changed(results):
        raise UserError(
            f"{out} is finished, and {changed} in the source since. Shard into a new folder (out=...), or put back what"
            " was there."
        )
    for done in results:
        name = done.shard.name
        if not done.shard.samples:
            (out / name).unlink(missing_ok=True)
        elif done.shard != known.get(name):
            raise UserError(
                f"{out / name} was damaged, and made again it differs: images have changed in the source, though their "
                "names and sizes have not. Shard into a new folder (out=...)."
            )
    return open_dataset(out)


def _changed(results: list[Done]) -> str:
    """Counts and names the images that shards had otherwise than the source; empty for none."""
    keys = sorted(key for done in results for key in done.changed)
    return f"{counted(len(keys), 'image')} changed ({first_of(keys, NAMED)})" if keys else ""


def resolve(setting: str, value: str) -> AnyPath:
    """The absolute path or URL of the folder or file in a setting."""
    path = ray_tasks.shared_path(setting, value)
    if setting == "source" and not path.exists():
        raise UserError(f"source = {missing(value, way_out='Give the path of your images.')}")
    return path


def _unfinished(out: AnyPath) -> dict[str, Any] | None:
    """The record of an unfinished job. Raises UserError for foreign files and a damaged record."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return json_record.parse((out / PARTS / PLAN).read_bytes(), dict[str, Any], str(out / PARTS / PLAN))
    # A job killed while listing leaves progress.json, but no plan.
    names = {path.name for path in out.iterdir()} - {PROGRESS_FILE} if out.exists() else set()
    if foreign := sorted(name for name in names if not name.startswith(".")):
        raise UserError(
            f"out = {out} is not empty (it holds {foreign[0]}), and holds no data set. Choose an empty folder."
        )
    return None


def _identity(listing: Listing, config: ShardConfig) -> dict[str, Any]:
    is_set = [name for name in _DECISIVE_IF_SET if getattr(config, name) != getattr(_DEFAULTS, name)]
    return {
        "settings": {name: getattr(config, name) for name in (*_DECISIVE, *is_set)},
        "source": {
            "path": printable(str(listing.source)),
            "samples": len(listing),
            "bytes": listing.num_bytes,
            "sha256": listing.digest(),
            **listing.about,
        },
    }


def _other_settings(config: ShardConfig, existing: dict[str, Any] | None) -> list[str]:
    """The changed settings, such as "seed = 0, not 1"."""
    if not existing:
        return []
    made_with = existing["settings"]  # Perhaps by an earlier version, with settings that are no more.
    both = {
        name: (made_with.get(name, getattr(_DEFAULTS, name, None)), getattr(config, name, None))
        for name in (*_DECISIVE, *_DECISIVE_IF_SET, *made_with)
    }
    return [f"{name} = {quoted(old)}, not {quoted(new)}" for name, (old, new) in both.items() if old != new]


def _print_listing(listing: Listing, seconds: float) -> None:
    for note in listing.notes:
        print(note)
    print(
        f"{listing.source}: {counted(len(listing), 'image')} {of_classes(len(listing.classes))}, "
        f"{si(listing.num_bytes, 'B')}, listed in {duration(seconds)}",
        flush=True,
    )


def _print_done(
    dataset: Dataset, results: list[Done], listing: Listing, plan: list[PlannedShard], seconds: float, verified: bool
) -> None:
    made = [number for number, done in enumerate(results) if done.made and done.shard.samples]
    if verified:
        print(f"checked {counted(len(results), 'shard')}: {f'made {len(made)} again' if made else 'nothing to do'}")
    elif len(made) < len(results):
        print(f"already complete: {len(results) - len(made)} of {counted(len(results), 'shard')}")
    if changed := _changed(results):
        print(f"{changed} since the last start: their shards were written again")
    num_images = sum(plan[number].samples for number in made)
    rate = f" ({significant(num_images / seconds)} images/s)" if num_images else ""
    print_summary(dataset, results, f"{duration(seconds)}{rate}", None if verified else listing.skipped)


def print_summary(dataset: Dataset, results: list[Done], took: str, skipped: list[Skipped] | None) -> None:
    """Print what is in a data set. took: the time. skipped: what was skipped beside the samples of the results; None if
    these have read no images.
    """
    num_shards, num_bytes = sum(dataset.info["shards"].values()), sum(done.shard.bytes for done in results)
    samples = ", ".join(f"{split} {count:,}" for split, count in dataset.info["samples"].items())
    left_out = ""
    if skipped is not None:
        num_skipped = len(skipped) + sum(len(done.skipped) for done in results)
        left_out = (
            f", skipped {counted(num_skipped, 'bad image')} (listed in {dataset.path / SKIPPED})"
            if num_skipped
            else ", skipped none"
        )
    print(
        f"{dataset.path}: {samples} images {of_classes(dataset.num_classes)} in {counted(num_shards, 'shard')}, "
        f"{si(num_bytes, 'B')}{left_out}; {took}; fingerprint {dataset.fingerprint}"
    )
