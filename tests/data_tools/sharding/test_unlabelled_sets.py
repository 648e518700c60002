"""Data sets without labels: shards of images alone, the same from every source, and every job on data reads them."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from raw_images import jpeg, settings, write_folder, write_tar

from data_tools.check import verify
from data_tools.sharding import index, shard
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.settings.commands.data import IndexConfig, VerifyConfig

PHOTOS = {
    f"{folder}/{i:02d}.jpg": jpeg(100 * f + i) for f, folder in enumerate(("2019", "2020/may")) for i in range(12)
}


@pytest.fixture(scope="module")
def photos(ray_cluster: int, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    at = tmp_path_factory.mktemp("photos")
    source = write_folder({**PHOTOS, "notes.txt": b"x"}, at / "raw")
    return shard.run(settings(source, at / "photos", layout="images", val_share=0.2))


def test_shards_hold_the_images_alone(photos: Dataset) -> None:
    assert (photos.num_classes, photos.splits) == (0, ["train", "val"])
    names = []
    for path in photos.path.glob("*.tar"):
        with tarfile.open(path) as tar:
            names += tar.getnames()
    assert sorted(names) == sorted(PHOTOS)
    info = json.loads((photos.path / "dataset.json").read_text())
    assert (info["classes"], info["num_classes"]) == ([], 0)
    assert photos.split("train").max_labels == 0


def _tars(at: Path, labels: bool = False) -> Path:
    at.mkdir()
    for number in range(2):
        files: dict[str, bytes] = {}
        for i in range(3):
            key = f"{number}{i}"
            files |= {f"{key}.jpg": jpeg(int(key)), f"{key}.txt": b"a cat", f"{key}.json": b'{"caption": "a cat"}'}
        if labels and number:
            files |= {"9.jpg": jpeg(9), "9.cls": b"1"}
        write_tar(files, at / f"{number:05d}.tar")
    return at


def test_tars_of_captions_are_indexed_where_they_lie(ray_cluster: int, tmp_path: Path, capfd) -> None:
    source = _tars(tmp_path / "tars")
    dataset = index.run(IndexConfig(source=str(source)))
    assert "train 6 images without labels in 2 shards, " in capfd.readouterr().out
    assert (dataset.num_classes, len(dataset.split("train")), dataset.split("train").max_labels) == (0, 6, 0)
    assert dataset.split("train").keys(range(6)) == ["00", "01", "02", "10", "11", "12"]
    report = verify.run(VerifyConfig(data=str(source)))
    assert report["is_whole"], report["kinds"]
    # Sharded, they are the same images under the same keys; with its manifest beside the tars, too.
    made = shard.run(settings(source, tmp_path / "out"))
    assert sorted(made.split("train").keys(range(6))) == ["00", "01", "02", "10", "11", "12"]
    (tmp_path / "names.txt").write_text("cat\n")
    with pytest.raises(UserError, match=r"6 of 6 samples are bad.*: no whole numbers under any of labels"):
        index.run(IndexConfig(source=str(source), out=str(tmp_path / "other"), label_names=str(tmp_path / "names.txt")))


def test_among_labelled_samples_one_without_a_label_is_bad(ray_cluster: int, tmp_path: Path, capfd) -> None:
    source = _tars(tmp_path / "tars", labels=True)
    with pytest.raises(UserError, match=r"6 of 7 samples are bad.*00000.tar: 00.jpg \(.json: no whole numbers"):
        index.run(IndexConfig(source=str(source)))
    dataset = index.run(IndexConfig(source=str(source), max_bad_share=0.9))
    assert "left out 1 tar without samples" in capfd.readouterr().out
    split = open_dataset(dataset.path).split("train")
    assert split.keys([0]) == ["9"]
    assert np.array_equal(split.label_values, [1])
    assert (source / "skipped.csv").read_text().count("\n") == 7
    report = verify.run(VerifyConfig(data=str(source)))
    assert report["is_whole"], report["kinds"]
