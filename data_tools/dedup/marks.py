"""The lists of copies that training excludes: `exclude/<name>.parquet` of the searched data set, of all its splits."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dedup.compared import FOLDER, ComparedSplit
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.exclusion import EXCLUDED, earlier_list, excluded_rows, write_list
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.storage.atomic import write_files
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.retry import StorageError


def finish(
    searched: ComparedSplit,
    name: str,
    marks: pa.Table,
    report: dict[str, Any],
    report_file: str,
    sheet: tuple[str, bytes | None],
) -> str:
    """Write the list, unless report["marked"] is False, then the report and the sheet of pairs; returns what was done, to be printed.

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
    of_others = _usable(searched.dataset, name, earlier.filter(pc.not_equal(earlier["split"], searched.split)))
    path = write_list(searched.dataset, name, pa.concat_tables([marks, of_others]))
    done = f"marked {counted(len(marks), 'copy')} in {path}; look at {sheet}" if len(marks) else f"wrote {path}"
    if len(of_others):
        splits = ", ".join(of_others["split"].unique().to_pylist())
        done += f"\nkept {counted(len(of_others), 'mark')} of earlier searches in {splits}"
    return done


def _usable(data: Dataset, name: str, marks: pa.Table) -> pa.Table:
    """These marks; none if their rows are not those of the manifest, as after indexing again."""
    splits = marks["split"].unique().to_pylist()
    try:
        for split in splits:
            data.table(split, verify=False)
            excluded_rows(data, split, name)
    except StorageError:
        raise
    except UserError as error:
        print(f"note: the earlier marks in {', '.join(splits)} are dropped: {error}")
        return EXCLUDED.empty_table()
    return marks
