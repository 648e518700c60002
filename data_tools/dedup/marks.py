"""The lists of copies that training excludes: `exclude/<name>.parquet` of the searched data set, of all its splits."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dedup.compared import FOLDER, MAX_PICTURED, ComparedSplit
from data_tools.dedup.search_shard import Pairs
from pipeline.base.gallery import Tile
from pipeline.base.words import counted
from pipeline.data.dataset.exclusion import EXCLUDED, earlier_list, write_list
from pipeline.data.storage.atomic import write_files
from pipeline.data.storage.bucket import AnyPath


def describe(
    searched: ComparedSplit, copies: Pairs, others: list[str], notes: list[str], tile: Callable[[int], Tile]
) -> tuple[pa.Table, list[tuple[Tile, Tile]]]:
    """Returns the exclusion list (schema EXCLUDED) and pairs to draw, (other image, copy), largest distance first.

    others: what each is a copy of. notes: of each, after its reason. tile: the other image of a pair, by its number.
    """
    keys, distances = searched.keys(copies.rows), [f"{distance:.3f}" for distance in copies.distances.tolist()]
    columns = {
        "split": [searched.split] * len(keys),
        "row": copies.rows.tolist(),
        "key": keys,
        "reason": [
            f"copy of {other}, distance {distance}{note}"
            for other, distance, note in zip(others, distances, notes, strict=True)
        ],
    }
    most_distant = np.argsort(-copies.distances, kind="stable")[:MAX_PICTURED].tolist()
    pictures = [(tile(i), searched.tile(int(copies.rows[i]), f"{distances[i]}  {keys[i]}")) for i in most_distant]
    return pa.Table.from_pydict(columns, EXCLUDED), pictures


def finish(
    searched: ComparedSplit,
    name: str,
    marks: pa.Table,
    report: dict[str, Any],
    report_file: str,
    sheet: tuple[str, bytes | None],
) -> str:
    """Write the list, unless report["marked"] is False, then the report and the sheet of pairs; returns what was done,
    to be printed.

    marks: EXCLUDED. sheet: its file's name and content; None removes an older one.
    """
    folder = searched.dataset.path / FOLDER
    if report["marked"]:
        # An older report speaks of the older list. Without one, readers say "not searched".
        (folder / report_file).unlink(missing_ok=True)
        done = _write_marks(searched, name, marks, folder / sheet[0])
    else:
        done = (
            f"dry_run: none of the {counted(len(marks), 'copy')} was marked; report and sheet of pairs are in {folder}"
        )
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    write_files(folder, {report_file: text, sheet[0]: sheet[1]}, mark=report_file)
    return done


def _write_marks(searched: ComparedSplit, name: str, marks: pa.Table, sheet: AnyPath) -> str:
    """Replace the list's marks of the searched split, keep those of other splits, and return what was done."""
    earlier = earlier_list(searched.dataset, name)
    of_others = earlier.filter(pc.not_equal(earlier["split"], searched.split))
    if replaced := len(earlier) - len(of_others):
        print(f"replaces {counted(replaced, 'mark')} of the last search of this split")
    path = write_list(searched.dataset, name, pa.concat_tables([marks, of_others]))
    done = f"marked {counted(len(marks), 'copy')} in {path}; look at {sheet}" if len(marks) else f"wrote {path}"
    if len(of_others):
        splits = ", ".join(of_others["split"].unique().to_pylist())
        done += f"\nkept {counted(len(of_others), 'mark')} of earlier searches in {splits}"
    return done
