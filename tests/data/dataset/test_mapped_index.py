"""The memory-mapped index equals the manifest, is made once for all processes, and is stored wherever that is
possible.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.base.errors import UserError
from pipeline.data.dataset import mapped_index
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.data.dataset.mapped_index import open_index

LABELS = [[row % 5] * (row % 4) for row in range(20)]
HASHES = [bytes([row + 1]) * 16 for row in range(20)]
TARGETS = [[row / 4, None if row % 3 else -row] for row in range(20)]
_COLUMNS = {
    "offset": pa.int64(),
    "size": pa.int64(),
    "labels": pa.list_(pa.int32()),
    "xxh128": pa.binary(16),
    "targets": pa.list_(pa.float32(), 2),
}


def read(columns: list[str]) -> list[pa.Table]:
    """20 samples in row groups of 7."""
    whole = {
        "offset": [2**40 + row for row in range(20)],
        "size": [3 * row for row in range(20)],
        "labels": LABELS,
        "xxh128": HASHES,
        "targets": TARGETS,
    }
    schema = pa.schema([(column, _COLUMNS[column]) for column in columns])
    return [pa.table({column: whole[column][first : first + 7] for column in columns}, schema) for first in (0, 7, 14)]


def check(found: mapped_index.ManifestIndex) -> None:
    assert found.offsets[:].tolist() == [2**40 + row for row in range(20)]
    assert found.sizes[:].tolist() == [3 * row for row in range(20)]
    starts = found.label_starts
    assert [found.labels[starts[row] : starts[row + 1]].tolist() for row in range(20)] == LABELS
    assert (len(found), found.max_labels) == (20, 3)
    assert [found.hashes[row].tobytes() for row in range(20)] == HASHES
    expected = [[np.nan if value is None else value for value in row] for row in TARGETS]
    assert np.array_equal(found.targets[:], np.array(expected, np.float32), equal_nan=True)


def refuse(columns: list[str]) -> list[pa.Table]:
    raise AssertionError("samples.parquet is read although there is an index")


def test_made_once_then_mapped(tmp_path: Path) -> None:
    folder = tmp_path / "index" / "train"
    check(open_index([folder], read))
    again = open_index([folder], refuse)
    check(again)
    assert isinstance(again.offsets[:].base.base, np.memmap)
    # Nothing but the columns, their description and the lock.
    assert sorted(path.name for path in folder.parent.iterdir()) == [".train.lock", "train"]


@pytest.mark.parametrize("damage", ["cut", "no json", "half json", "other format", "column gone", "killed"])
def test_a_damaged_index_is_made_again(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    open_index([tmp_path / "train"], read)
    info = json.loads((folder / "index.json").read_text())
    if damage == "cut":
        (folder / "sizes").write_bytes((folder / "sizes").read_bytes()[:-8])
    elif damage == "no json":
        (folder / "index.json").unlink()
    elif damage == "half json":
        (folder / "index.json").write_text('{"format": "vit-ind')
    elif damage == "other format":
        (folder / "index.json").write_text(json.dumps({**info, "format": "vit-index/0"}))
    elif damage == "column gone":
        (folder / "labels").unlink()
    else:  # As SIGKILL leaves it in the middle of writing.
        shutil.copytree(folder, tmp_path / ".train.tmp")
        shutil.rmtree(folder)
    check(open_index([tmp_path / "train"], read))
    check(open_index([tmp_path / "train"], refuse))
    assert not (tmp_path / ".train.tmp").exists()


def test_where_the_first_folder_cannot_be_written_the_next_is_used(tmp_path: Path) -> None:
    # A file in place of the folder makes it unwritable, for root as well.
    (tmp_path / "data").write_text("")
    blocked, cache = tmp_path / "data" / "index", tmp_path / "cache"
    check(open_index([blocked / "train", cache / "train"], read))
    check(open_index([blocked / "train", cache / "train"], refuse))

    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        open_index([blocked / "train"], read)


@pytest.mark.slow
def test_processes_that_start_together_make_it_once(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_mapped_index import check, open_index, read
def slow(columns):
    with open(Path(sys.argv[1]) / "made", "a") as file:
        file.write("x")
    time.sleep(0.5)
    return read(columns)
print("ready", flush=True)
sys.stdin.readline()
check(open_index([Path(sys.argv[1]) / "index" / "train"], slow))
"""
    here = Path(__file__).parent
    arguments = [sys.executable, "-c", code, str(tmp_path), str(here)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(arguments, cwd=here.parents[2], stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.close()
    assert [process.wait(300) for process in processes] == [0, 0]
    assert (tmp_path / "made").read_text() == "x"


def test_a_data_set_has_its_index_from_the_start_and_gets_a_lost_one_back(
    tmp_path: Path, make_dataset: Callable[..., Dataset]
) -> None:
    path = make_dataset(tmp_path / "data", [b"x" * (row + 1) for row in range(20)], LABELS, 8).path
    assert len(list((path / "index").glob("train-*/index.json"))) == 1
    for _ in range(2):
        split = open_dataset(path).split("train")
        assert isinstance(split.index.offsets[:].base.base, np.memmap)
        assert split.index.sizes[:].tolist() == list(range(1, 21))
        assert [split.labels_of(row).tolist() for row in range(20)] == LABELS
        shutil.rmtree(path / "index")


def test_another_manifest_in_the_same_folder_has_an_index_of_its_own(
    tmp_path: Path, make_dataset: Callable[..., Dataset]
) -> None:
    old = make_dataset(tmp_path / "old", [b"x"] * 20, LABELS, 8).path
    new = make_dataset(tmp_path / "new", [b"xy"] * 20, [[7]] * 20, 8).path
    shutil.copytree(old / "index", new / "index", dirs_exist_ok=True)
    assert open_dataset(new).split("train").labels_of(3).tolist() == [7]
