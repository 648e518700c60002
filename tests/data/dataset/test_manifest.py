"""The manifest: it reads back as written, fast and only as far as needed; damage is reported in one line."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.data.dataset import manifest
from pipeline.data.dataset.manifest import ROWS, Dataset, Shard, location_and_split, open_dataset, write_dataset
from pipeline.data.dataset.split import BadBudget
from pipeline.data.storage.cache import Storage
from pipeline.data.storage.tars import check_tars_on_all_ranks


def rows(first: int, labels: list[list[int]]) -> pa.Table:
    """Samples numbered from `first`, with these labels."""
    n = len(labels)
    columns = {
        "key": [f"c/{first + i}" for i in range(n)],
        "offset": [512 + 2048 * i for i in range(n)],
        "size": [100 + first + i for i in range(n)],
        "ext": ["jpg" if (first + i) % 3 else "png" for i in range(n)],
        "labels": labels,
        "width": [32] * n,
        "height": [24] * n,
        "xxh128": [bytes([i]) * 16 for i in range(n)],
    }
    return pa.Table.from_pydict(columns, ROWS)


def write(path: Path, name: str = "train", pixels: Pixels = RGB8) -> Dataset:
    path.mkdir(exist_ok=True)
    sizes = {f"{name}-000000.tar": 3, f"{name}-000001.tar": 2, "val-000000.tar": 1}
    shards = []
    for shard, samples in sizes.items():
        (path / shard).write_bytes(b"x" * 1000)
        shards.append(Shard(shard, shard.split("-")[0], samples, 1000, "ab" * 32))
    tables = [rows(0, [[0], [1, 2], []]), rows(3, [[2], [1]]), rows(5, [[0, 1, 2]])]
    return write_dataset(path, shards, tables, ["a", "b", "c"], {"path": "/raw"}, {"seed": 0}, pixels=pixels)


def test_arrays_of_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_ROWS_PER_GROUP", 2)  # Two row groups in one split.
    write(tmp_path)
    dataset = open_dataset(tmp_path)
    assert (dataset.splits, dataset.classes, dataset.num_classes) == (["train", "val"], ["a", "b", "c"], 3)
    train, val = dataset.split("train"), dataset.split("val")
    assert (len(train), len(val)) == (5, 1)
    assert train.shard_paths == [str(tmp_path / "train-000000.tar"), str(tmp_path / "train-000001.tar")]
    assert train.shard_sizes.tolist() == [3, 2]
    assert train.shard_starts.tolist() == [0, 3, 5]
    assert train.index.offsets[:].tolist() == [512, 2560, 4608, 512, 2560]
    assert train.index.sizes[:].tolist() == [100, 101, 102, 103, 104]
    assert [train.labels_of(row).tolist() for row in range(5)] == [[0], [1, 2], [], [2], [1]]
    assert val.labels_of(0).tolist() == [0, 1, 2]
    assert (train.max_labels, val.max_labels) == (2, 3)
    assert train.shard_of(np.array([[0, 2], [3, 4]])).tolist() == [[0, 0], [1, 1]]
    assert train.keys([4, 0, 3]) == ["c/4", "c/0", "c/3"]
    assert val.keys([0]) == ["c/5"]
    for array in (
        train.shard_sizes,
        train.shard_starts,
        train.index.offsets[:],
        train.index.sizes[:],
        train.label_counts,
    ):
        assert array.dtype == np.int64
    assert train.label_values.dtype == np.int32


def test_fingerprint_is_of_the_content_alone(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    assert first.fingerprint == second.fingerprint
    assert len(first.fingerprint) == 16
    assert write(tmp_path / "c", name="other").fingerprint != first.fingerprint


def test_what_values_mean_is_kept_and_8_bit_rgb_adds_nothing(tmp_path: Path) -> None:
    ct = Pixels(("ct",), "int16", (-1024.0,), (3071.0,), (0.3,), (0.2,), nodata=-2000.0)
    rgb = write(tmp_path / "rgb")
    found = [
        write(tmp_path / f"{number}", pixels=pixels) for number, pixels in enumerate((ct, replace(ct, mean=(0.4,))))
    ]
    assert open_dataset(found[0].path).pixels == open_dataset(found[0].path).split("train").pixels == ct
    assert open_dataset(rgb.path).pixels == RGB8
    assert "pixels" not in rgb.info
    assert len({rgb.fingerprint, *(one.fingerprint for one in found)}) == 3
    info = json.loads((found[0].path / "dataset.json").read_text())
    (found[0].path / "dataset.json").write_text(json.dumps({**info, "pixels": {**info["pixels"], "low": [4000.0]}}))
    with pytest.raises(UserError):
        open_dataset(found[0].path)


def test_a_kill_while_the_index_is_made_leaves_no_finished_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command found a finished data set, and never made the index."""

    def kill(*_: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(Dataset, "index", kill)
    with pytest.raises(RuntimeError, match="killed"):
        write(tmp_path)
    assert not (tmp_path / "dataset.json").exists()


def test_reading_needs_neither_torch_nor_ray() -> None:
    code = "import sys, pipeline.data.dataset.manifest; assert not {'torch', 'ray', 'PIL', 'cv2'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_a_split_is_named_after_a_colon_that_may_be_in_the_folder_too(tmp_path: Path) -> None:
    """A data set photos:v2 was taken for the split v2 of photos."""
    whole = f"{tmp_path}/photos:v2"
    assert location_and_split(whole) == (f"{tmp_path}/photos", "v2")
    (tmp_path / "photos:v2").mkdir()
    (tmp_path / "photos:v2" / "dataset.json").write_text("{}")
    assert location_and_split(whole) == (whole, "")
    assert location_and_split(f"{whole}:val") == (whole, "val")
    assert location_and_split(f"{tmp_path}/a:b/photos") == (f"{tmp_path}/a:b/photos", "")
    assert location_and_split("s3://bucket/set?region=eu:1") == ("s3://bucket/set?region=eu:1", "")


def test_what_is_no_data_set_is_said_and_the_splits_that_exist(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos.zip").touch()
    for name, said in (
        ("photos", r"source=\S*/photos out=\S*/photos_shards"),
        ("photos.zip", "source=.*photos.zip"),
        ("photoss", "photoss: no such data set"),
    ):
        with pytest.raises(UserError, match=said):
            open_dataset(tmp_path / name)
    dataset = write(tmp_path / "set")
    with pytest.raises(UserError, match=r"no split 'test'. It has: train, val.$"):
        dataset.split("test")
    dataset.info["samples"] = {"train": 2}
    assert "val_share=0.1" in dataset.without_split("test")


def test_bad_images_of_a_small_folder_have_a_larger_share() -> None:
    counts = {20: 1, 1_000: 10, 50_000: 500, 100_000: 1_000, 500_000: 1_000, 14_197_122: 14_197}
    assert {count: BadBudget(None).allowed(count) for count in counts} == counts
    assert BadBudget(0.001).allowed(1_000) == 1  # A share that is given counts alone.
    assert BadBudget(0.0).allowed(1_000) == 0
    assert BadBudget(None, least=10).allowed(20) == 10


def test_ranks_with_the_same_files_share_the_check_of_the_tars(tmp_path: Path) -> None:
    """Hosts with copies of their own check these."""
    write(tmp_path)
    storage = Storage(unchecked=[])
    open_dataset(tmp_path, storage).split("train")
    (tars,) = storage.unchecked
    for tar, *_ in tars.tars:
        Path(tar).unlink()
    found = []

    class Ranks:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def gather(self, value: object) -> list[object]:
            if isinstance(value[0], int):
                found.append(value[0])
                return [(0, [])]
            return [value, "a copy", value] if self.rank != 1 else ["another", value, "another"]

    for rank in range(3):
        check_tars_on_all_ranks(Ranks(rank), [tars])
    assert found == [1, 2, 1]
