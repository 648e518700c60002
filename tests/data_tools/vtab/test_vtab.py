"""VTAB-1k's tasks from generated originals: the right images under the right keys, and splits that can be proved."""

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io
import webdataset
from raw_images import write_folder
from vtab_originals import NUM_TRAIN, NUM_VAL, Truth, settings, small_splits

from data_tools.vtab import prove as keys
from data_tools.vtab.prepare import run
from data_tools.vtab.readers import convert
from data_tools.vtab.split import SPLITS
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import INFO, SAMPLES_FILE, open_dataset, sign_tables
from pipeline.data.loading.decode import decode
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.settings.commands.data import VtabPrepareConfig

CONVERTED = ("sun397", "retinopathy")
SIZES = {"train800": NUM_TRAIN, "val200": NUM_VAL, "train800val200": NUM_TRAIN + NUM_VAL}


def refused(config: VtabPrepareConfig) -> str:
    with pytest.raises(UserError) as error, small_splits():
        run(config)
    return str(error.value)


def published_order(pool: str, names: list[str]) -> list[str]:
    """The rule as protocols write it."""
    return sorted(names, key=lambda key: int(hashlib.md5(pool.encode() + key.encode()).hexdigest(), 16))


def expected_splits(task: str, dataset: str, truth: Truth) -> dict[str, dict[str, tuple[str, str]]]:
    """Split -> key in shards -> (pool, key), with the official slices written out."""
    order = {pool: published_order(pool, list(found)) for pool, found in truth.labels[task].items()}
    n = {pool: len(names) for pool, names in order.items()}
    cuts = {
        "caltech101": ("train", 90, "test", 0),
        "cifar100": ("train", 90, "test", 0),
        "pets": ("train", 80, "test", 0),
        "svhn": ("train", 90, "test", 0),
        "eurosat": ("train", 60, "train", 80),
        "resisc45": ("train", 60, "train", 80),
        "clevr": ("train", 90, "validation", 0),
        "dsprites": ("train", 80, "train", 90),
        "smallnorb": ("test", 0, "test", 50),
    }
    val_pool, val_percent, test_pool, test_percent = cuts.get(dataset, ("validation", 0, "test", 0))
    val_start = n[val_pool] * val_percent // 100
    chosen = {
        "train800": [("train", key) for key in order["train"][:NUM_TRAIN]],
        "val200": [(val_pool, key) for key in order[val_pool][val_start : val_start + NUM_VAL]],
        "test": [(test_pool, key) for key in order[test_pool][n[test_pool] * test_percent // 100 :]],
    }
    chosen["train800val200"] = chosen["train800"] + chosen["val200"]

    def name(pool: str, key: str) -> str:
        return f"{pool}/" + key.lstrip("/").removesuffix(".jpg").removesuffix(".png").replace(".", "_")

    return {split: {name(*pair): pair for pair in pairs} for split, pairs in chosen.items()}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_each_split_has_the_images_and_labels_of_the_originals(task, vtab_tasks: tuple[Path, Truth]) -> None:
    folder, truth = vtab_tasks
    dataset = open_dataset(folder / "out" / task.name)
    expected = expected_splits(task.name, task.dataset, truth)
    assert dataset.splits == list(SPLITS)
    for name in SPLITS:
        found = {}
        for sample in webdataset.WebDataset(dataset.split(name).shard_paths, shardshuffle=False):
            (image,) = (sample[ext] for ext in ("jpg", "png") if ext in sample)
            found[sample["__key__"]] = (image, int(sample["cls"]))
        assert found.keys() == expected[name].keys()
        assert len(found) == SIZES.get(name, len(found)) > 0
        for number, (key, (pool, original)) in enumerate(expected[name].items()):
            image, label = found[key]
            assert label == truth.labels[task.name][pool][original]
            wanted = truth.images[task.dataset][pool, original]
            if isinstance(wanted, np.ndarray):
                gray = wanted if wanted.ndim == 3 else np.repeat(wanted[..., None], 3, axis=2)
                assert np.array_equal(decode(image), gray)
            elif task.dataset not in CONVERTED:
                assert image == wanted.replace(b"Exif\0\0", bytes(6))
            elif number < 2:  # To convert costs as much as all the rest.
                assert image == getattr(convert, task.dataset)(wanted)


def test_splits_that_were_made_are_proved(
    vtab_tasks: tuple[Path, Truth], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = vtab_tasks
    with small_splits():
        run(settings(folder / "out", prove=True, originals=str(folder / "originals")))
    lines = capsys.readouterr().out.splitlines()
    proved = [line.partition(":")[0] for line in lines if ": proved with reservations: train800 20, val200 5" in line]
    assert proved == [task.name for task in TASKS]
    assert all("keys and labels read again from" in line for line in lines)


def rewrite(path: Path, change: Callable[[list[dict]], None]) -> None:
    """Change the rows of a Parquet file, keeping its row groups."""
    file = pq.ParquetFile(path)
    groups = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    rows, schema = file.read().to_pylist(), file.schema_arrow
    change(rows)
    with pq.ParquetWriter(path, schema) as writer:
        table = pa.Table.from_pylist(rows, schema)
        for start, size in zip(np.cumsum([0, *groups[:-1]]), groups, strict=True):
            writer.write_table(table.slice(start, size), row_group_size=size)


def sign(folder: Path) -> None:
    """Make dataset.json agree with tables that were changed, as a forger would."""
    info = json.loads((folder / INFO).read_text())
    del info["checksum"]
    info["files"] = sign_tables(folder)
    info["source"]["vtab"]["keys_sha256"] = keys.digest(keys.read_keys(folder / keys.KEYS_FILE))
    (folder / INFO).write_text(json.dumps(info))


def first_of(rows: list[dict], split: str) -> dict:
    return next(row for row in rows if row["split"] == split)


def _rename(rows: list[dict]) -> None:
    first_of(rows, "train800")["key"] = "train/100000"


def _relabel(rows: list[dict]) -> None:
    row = first_of(rows, "test")
    row["labels"] = [(row["labels"][0] + 1) % 10]


def _another_picture(rows: list[dict]) -> None:
    first_of(rows, "train800val200")["xxh128"] = bytes(16)


def _relabel_keys(rows: list[dict]) -> None:
    for row in rows:
        row["label"] = 9 - row["label"]


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (SAMPLES_FILE, _rename, "train800 lacks 1: train/"),
        (SAMPLES_FILE, _relabel, "test has with another label 1: test/"),
        (SAMPLES_FILE, _another_picture, "train800val200 has other images"),
        (keys.KEYS_FILE, _relabel_keys, "train800 has with another label 20: train/"),
    ],
)
def test_a_forgery_is_not_proved(
    file: str,
    change: Callable[[list[dict]], None],
    said: str,
    vtab_tasks: tuple[Path, Truth],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(vtab_tasks[0] / "out" / "svhn", tmp_path / "svhn")
    rewrite(folder / file, change)
    assert "svhn" in refused(settings(tmp_path, prove=True))
    capsys.readouterr()
    sign(folder)
    assert "svhn" in refused(settings(tmp_path, prove=True))
    assert said in capsys.readouterr().out


def test_a_forgery_of_everything_is_found_with_the_originals(
    vtab_tasks: tuple[Path, Truth], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(vtab_tasks[0] / "out" / "svhn", tmp_path / "svhn")

    def relabel(rows: list[dict]) -> None:
        for row in rows:
            row["labels"] = [9 - row["labels"][0]]

    rewrite(folder / keys.KEYS_FILE, _relabel_keys)
    rewrite(folder / SAMPLES_FILE, relabel)
    sign(folder)
    with small_splits():
        run(settings(tmp_path, prove=True))
    refused(settings(tmp_path, prove=True, originals=str(vtab_tasks[0] / "originals")))
    assert "keys.parquet, pool 'train', has with another label 120" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []


def test_what_is_missing_is_named_and_the_rest_is_made(
    vtab_tasks: tuple[Path, Truth], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    originals = tmp_path / "originals"
    shutil.copytree(vtab_tasks[0] / "originals" / "eurosat", originals / "eurosat")
    shutil.copytree(vtab_tasks[0] / "originals" / "pets", originals / "pets")
    (originals / "pets" / "annotations.tar.gz").unlink()
    shutil.copytree(vtab_tasks[0] / "out" / "svhn", tmp_path / "out" / "svhn")
    said = refused(settings(tmp_path / "out", originals=str(originals)))
    printed = capsys.readouterr().out
    assert "annotations/trainval.txt" in said
    assert "2 of 19 tasks are ready: svhn (made before), eurosat" in printed
    for task in TASKS:
        if task.dataset not in ("eurosat", "pets", "svhn"):
            assert f"missing: {task.name}: {originals / task.dataset}: " in printed


def test_files_that_are_not_the_published_ones_are_refused(vtab_tasks: tuple[Path, Truth], tmp_path: Path) -> None:
    originals = tmp_path / "originals"
    shutil.copytree(vtab_tasks[0] / "originals" / "svhn", originals / "svhn")
    config = VtabPrepareConfig(out=str(tmp_path / "out"), originals=str(originals))
    size = (originals / "svhn" / "train_32x32.mat").stat().st_size
    assert f"train_32x32.mat has {size:,} bytes, but 182,040,794 were published" in refused(config)
    # The published size, other bytes.
    write_folder({"imagelabels.mat": bytes(502)}, originals / "flowers102")
    config = VtabPrepareConfig(out=str(tmp_path / "out"), originals=str(originals), tasks=["flowers102"])
    assert "imagelabels.mat does not have the published checksum" in refused(config)


def test_arrays_of_other_samples_than_the_labels_are_refused(vtab_tasks: tuple[Path, Truth], tmp_path: Path) -> None:
    """Unpacked, so without a checksum. More images than labels were taken, fewer ended the command with a traceback."""
    originals = tmp_path / "originals"
    for path in (vtab_tasks[0] / "originals" / "patch_camelyon").iterdir():
        write_folder({path.stem: gzip.decompress(path.read_bytes())}, originals / "patch_camelyon")
    stem = str(originals / "patch_camelyon" / "camelyonpatch_level_2_split_{}_x.h5")
    shutil.copy(stem.format("train"), stem.format("test"))
    (originals / "svhn").mkdir()
    for pool in ("train", "test"):
        arrays = scipy.io.loadmat(vtab_tasks[0] / "originals" / "svhn" / f"{pool}_32x32.mat")
        few = {"X": arrays["X"][..., :7], "y": arrays["y"]}
        scipy.io.savemat(originals / "svhn" / f"{pool}_32x32.mat", few)
    said = refused(settings(tmp_path / "out", originals=str(originals)))
    assert f"{stem.format('test')} has 60 images, but there are 12 labels" in said
    assert "train_32x32.mat has 7 images, but there are 120 labels" in said
    assert not list((tmp_path / "out").rglob("*"))


def test_a_bad_image_is_an_error_that_names_what_can_be_done(vtab_tasks: tuple[Path, Truth], tmp_path: Path) -> None:
    originals = tmp_path / "originals"
    shutil.unpack_archive(vtab_tasks[0] / "originals" / "dtd" / "dtd-r1.0.1.tar.gz", originals / "dtd")
    for image in originals.rglob("*.jpg"):
        image.write_bytes(image.read_bytes()[:-2])
    said = refused(settings(tmp_path / "out", originals=str(originals)))
    assert "read so far are bad, more than 0 of 62: dtd/images/banded/" in said
    assert "max_bad_share" not in said


def test_originals_with_damage_inside_are_counted(
    vtab_tasks: tuple[Path, Truth], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Separate files have no checksum, and OpenCV converts what it can read of a JPEG."""
    originals = shutil.copytree(vtab_tasks[0] / "originals" / "retinopathy", tmp_path / "originals" / "retinopathy")
    for number in range(4):
        image = originals / "test" / f"{number}_right.jpeg"
        image.write_bytes(image.read_bytes()[:-60] + b"\xff\xd9")
    with small_splits():
        run(settings(tmp_path / "out", originals=str(tmp_path / "originals"), tasks=["retinopathy"]))
    rows = (tmp_path / "out" / "retinopathy" / "filled.csv").read_text().splitlines()
    assert rows == ["key,where", *(f"test/{number}_right,test/{number}_right.jpeg" for number in range(4))]
    assert "4 images" in capsys.readouterr().out
    assert not [*(vtab_tasks[0] / "out").glob("*/filled.csv")]


def test_other_forms_of_the_same_files(vtab_tasks: tuple[Path, Truth], tmp_path: Path) -> None:
    """Caltech101 without the official list, CLEVR and KITTI unpacked: what differs is said."""
    originals = tmp_path / "originals"
    shutil.copytree(vtab_tasks[0] / "originals" / "caltech101", originals / "caltech101")
    (originals / "caltech101" / "train.txt").unlink()
    for name in ("clevr", "kitti"):
        for path in (vtab_tasks[0] / "originals" / name).iterdir():
            shutil.unpack_archive(path, originals / name)
    tasks = ["clevr_count", "kitti_distance", "caltech101"]
    with small_splits():
        run(settings(tmp_path / "out", originals=str(originals), tasks=tasks))
        run(settings(tmp_path / "out", prove=True))
    for name in tasks[:2]:
        ours, theirs = open_dataset(tmp_path / "out" / name), open_dataset(vtab_tasks[0] / "out" / name)
        assert ours.fingerprint == theirs.fingerprint
