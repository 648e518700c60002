"""Data sets without labels: shards of images alone, the same from every source, and every job on data reads them."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from raw_images import contents, jpeg, settings, write_folder, write_tar

from data_tools.check import stats, verify
from data_tools.dedup import dedup
from data_tools.sharding import index, shard
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.data.mixture.run_data import hold_out
from pipeline.settings.commands.data import DedupConfig, IndexConfig, StatsConfig, VerifyConfig
from pipeline.settings.quantities import Limit

PHOTOS = {
    f"{folder}/{i:02d}.jpg": jpeg(100 * f + i) for f, folder in enumerate(("2019", "2020/may")) for i in range(12)
}


@pytest.fixture(scope="module")
def photos(ray_cluster: int, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    at = tmp_path_factory.mktemp("photos")
    source = write_folder({**PHOTOS, "copy.jpg": PHOTOS["2019/03.jpg"], "notes.txt": b"x"}, at / "raw")
    return shard.run(settings(source, at / "photos", layout="images", val_share=0.2, merge_copies=True))


def test_shards_hold_the_images_alone(photos: Dataset) -> None:
    assert (photos.num_classes, photos.splits) == (0, ["train", "val"])
    names = []
    for path in photos.path.glob("*.tar"):
        with tarfile.open(path) as tar:
            names += tar.getnames()
    kept = set(PHOTOS) - {"2019/03.jpg"} | {"copy.jpg"} if "copy.jpg" in names else set(PHOTOS)
    assert sorted(names) == sorted(kept)
    info = json.loads((photos.path / "dataset.json").read_text())
    assert (info["classes"], info["num_classes"]) == ([], 0)
    assert photos.split("train").max_labels == 0


def test_it_is_verified_and_a_damaged_shard_is_made_again(photos: Dataset, capfd) -> None:
    before = contents(photos.path)
    damaged = photos.path / "train-000000.tar"
    data = bytearray(damaged.read_bytes())
    data[600] ^= 0xFF
    damaged.write_bytes(data)
    assert not verify.run(VerifyConfig(data=str(photos.path), out=str(photos.path.parent / "verify")))["is_whole"]
    source = photos.path.parent / "raw"
    shard.run(settings(source, photos.path, layout="images", val_share=0.2, merge_copies=True))
    assert "images without labels in" in capfd.readouterr().out
    assert {name: data for name, data in contents(photos.path).items() if not name.startswith("exclude")} == before
    report = verify.run(VerifyConfig(data=str(photos.path), out=str(photos.path.parent / "verify")))
    assert report["is_whole"], report["kinds"]


def test_statistics_say_nothing_of_classes(photos: Dataset, tmp_path: Path, capfd) -> None:
    found = stats.run(StatsConfig(data=str(photos.path), out=str(tmp_path), sheet=6))
    said = capfd.readouterr().out
    assert "photos: images without labels, fingerprint" in said
    assert "class" not in said.partition("fingerprint")[2].partition("counted in")[0]
    assert found["splits"]["train"]["classes"]["max"] == 0
    assert {"histograms.png", "contact_sheet.png", "stats.json"} <= {path.name for path in tmp_path.iterdir()}


def test_limit_and_dev_share_and_exclusion_need_no_labels(photos: Dataset) -> None:
    whole = photos.split("train")
    half = photos.split("train", limit=Limit.parse("50%"))
    assert len(half) == round(len(whole) / 2)
    rest, dev = hold_out(whole, 0.25, seed=0)
    assert (len(rest) + len(dev), dev.name) == (len(whole), "dev")
    assert half.labels_of(0).tolist() == []


def test_copies_are_found(photos: Dataset, tmp_path: Path) -> None:
    train = photos.split("train")
    key = next(key for key in train.keys(range(len(train))) if f"{key}.jpg" in PHOTOS)
    source = write_folder({"a/b/1.jpg": PHOTOS[f"{key}.jpg"], "2.jpg": jpeg(999)}, tmp_path / "raw")
    others = shard.run(settings(source, tmp_path / "others", layout="images"))
    found = dedup.run(DedupConfig(data=str(photos.path), against=[str(others.path)], dry_run=True))
    assert (found["data"]["copies"], found["against"][0]["images_with_copies"]) == (1, 1)


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
    config = IndexConfig(source=str(source))
    dataset = index.run(config)
    assert "train 6 images without labels in 2 tars, skipped none" in capfd.readouterr().out
    assert (dataset.num_classes, len(dataset.split("train")), dataset.split("train").max_labels) == (0, 6, 0)
    assert dataset.split("train").keys(range(6)) == ["00", "01", "02", "10", "11", "12"]
    report = verify.run(VerifyConfig(data=str(source)))
    assert report["is_whole"], report["kinds"]
    assert index.run(config).fingerprint == dataset.fingerprint
    # Sharded, they are the same images under the same keys; with its manifest beside the tars, too.
    made = shard.run(settings(source, tmp_path / "out"))
    assert sorted(made.split("train").keys(range(6))) == ["00", "01", "02", "10", "11", "12"]
    (tmp_path / "names.txt").write_text("cat\n")
    with pytest.raises(UserError, match="no sample has a label, though class names are given"):
        index.run(IndexConfig(source=str(source), out=str(tmp_path / "other"), label_names=str(tmp_path / "names.txt")))


def test_among_labelled_samples_one_without_a_label_is_bad(ray_cluster: int, tmp_path: Path, capfd) -> None:
    source = _tars(tmp_path / "tars", labels=True)
    with pytest.raises(UserError, match=r"6 of 7 samples are bad.*00000.tar: 00.jpg \(.json: no whole numbers under"):
        index.run(IndexConfig(source=str(source)))
    dataset = index.run(IndexConfig(source=str(source), max_bad_share=0.9))
    assert "left out 1 tar without samples" in capfd.readouterr().out
    split = open_dataset(dataset.path).split("train")
    assert split.keys([0]) == ["9"]
    assert np.array_equal(split.label_values, [1])
    assert (source / "skipped.csv").read_text().count("\n") == 7
    report = verify.run(VerifyConfig(data=str(source)))
    assert report["is_whole"], report["kinds"]
