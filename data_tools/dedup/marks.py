"""The lists of copies that training excludes: `exclude/<name>.parquet` of the searched data set, of all its splits."""

import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dedup.compared import ComparedSplit
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.exclusion import EXCLUDED, excluded_rows, read_lists, write_list
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.retry import StorageError


def earlier_marks(data: Dataset, name: str) -> pa.Table:
    """The list of earlier searches (schema EXCLUDED)."""
    try:  # Not the report, which a dry run has replaced, too.
        return read_lists(data, name)[name]
    except StorageError:
        raise
    except UserError:  # There is none, or it is of other data.
        return EXCLUDED.empty_table()


def write_marks(searched: ComparedSplit, name: str, marks: pa.Table, sheet: AnyPath) -> str:
    """Replace the list's marks of the searched split, keep those of other splits, and return what was done, to be printed.

    marks: EXCLUDED. sheet: of their pairs.
    """
    earlier = earlier_marks(searched.dataset, name)
    of_others = _usable(searched.dataset, name, earlier.filter(pc.not_equal(earlier["split"], searched.split)))
    path = write_list(searched.dataset, name, pa.concat_tables([marks, of_others]))
    done = f"marked {counted(len(marks), 'copy')} in {path}; look at {sheet}" if len(marks) else f"wrote {path}"
    if len(of_others):
        splits = ", ".join(of_others["split"].unique().to_pylist())
        done += f"\nkept {counted(len(of_others), 'mark')} of earlier searches in {splits}"
    return done


def nothing_marked(marks: pa.Table, folder: AnyPath) -> str:
    """What a dry run did, to be printed. folder: of its report and sheet."""
    return f"dry_run: none of the {counted(len(marks), 'copy')} was marked; report and sheet of pairs are in {folder}"


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
