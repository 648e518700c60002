"""Copies of test images are found and marked, all of them and nothing else."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from measure_dedup import PLANTS, measure_recall
from PIL import Image
from raw_images import encoded, settings, write_folder

from data_tools.dedup import dedup, near_copies, search_shard
from data_tools.dedup.near_copies import NUM_CROPS, ImageIndex, is_plain, thumbnail
from data_tools.dedup.verify_pair import distance, reduced
from data_tools.sharding import shard
from pipeline.base.errors import UserError
from pipeline.data.dataset.dedup_report import read_dedup_report
from pipeline.data.dataset.exclusion import read_lists
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.settings import schema
from pipeline.settings.commands.data import DedupConfig
from pipeline.train.shown_facts import _test_copies

DEFAULT = DedupConfig(data="", against=[]).max_distance


def picture(seed: int, width: int = 120, height: int = 90) -> np.ndarray:
    """(height, width, 3) uint8: blots of all sizes in colours, as photographs have them."""
    rng = np.random.default_rng([5, seed])
    pixels = np.zeros((height, width, 3))
    for scale in (4, 8, 16, 32):
        blots = rng.normal(0, 1, (scale, scale, 3)).clip(-2, 2) * (60 / scale**0.5) + 15
        large = [Image.fromarray(blots[..., c].astype(np.float32)).resize((width, height), 3) for c in range(3)]
        pixels += np.stack([np.asarray(channel) for channel in large], -1)
    return (pixels + 70).clip(0, 255).astype(np.uint8)


def jpeg(pixels: np.ndarray) -> bytes:
    return encoded(Image.fromarray(pixels), "JPEG", quality=90)


def plain(level: int, seed: int) -> bytes:
    return jpeg((level + np.random.default_rng(seed).normal(0, 1, (60, 80, 3))).astype(np.uint8))


def planted() -> dict[str, tuple[str, bytes]]:
    """Key of each copy -> key of the test image that it is made of, and its bytes."""
    made = {}
    for number, plant in enumerate(PLANTS.values()):
        pixels = plant(picture(number), np.random.default_rng(number))
        made[f"b/plant{number}"] = (f"x/{number:02d}", encoded(Image.fromarray(pixels), "PNG"))
    made["b/same"] = ("x/20", jpeg(picture(20)))
    made["b/plain_same"] = ("x/plain", plain(90, 0))
    return made


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory, ray_cluster: int) -> tuple[Dataset, Dataset]:
    """Pre-training images (strangers, planted copies, plain ones) and test images; tests must not change them."""
    folder = tmp_path_factory.mktemp("dedup")
    train = {f"{'ab'[i % 2]}/{i:02d}.jpg": jpeg(picture(1000 + i)) for i in range(30)}
    train |= {f"a/plain{level}.jpg": plain(level, level) for level in (88, 90, 200)}
    train |= {f"{key}.png": data for key, (_, data) in planted().items()}
    tests = {f"x/{i:02d}.jpg": jpeg(picture(i)) for i in range(24)} | {"x/plain.jpg": plain(90, 0)}
    return (
        shard.run(settings(write_folder(train, folder / "raw"), folder / "train", samples_per_shard=4)),
        shard.run(settings(write_folder(tests, folder / "raw_test"), folder / "pets")),
    )


def copy(dataset: Dataset, tmp_path: Path) -> Dataset:
    return open_dataset(shutil.copytree(dataset.path, tmp_path / dataset.path.name))


def config(data: Dataset, *against: object, **others: object) -> DedupConfig:
    return DedupConfig(data=str(data.path), against=[str(entry) for entry in against], **others)


def test_copies_are_marked_and_nothing_else(sets: tuple[Dataset, Dataset], tmp_path: Path, capfd) -> None:
    train, tests = copy(sets[0], tmp_path), sets[1]
    before = sorted(path.name for path in tests.path.iterdir())
    report = dedup.run(config(train, tests.path))
    marks = read_lists(train)["test_copies"].to_pylist()
    found = {row["key"]: row["reason"] for row in marks}
    assert {key: reason.split(",")[0] for key, reason in found.items()} == {
        key: f"copy of pets:train/{of}" for key, (of, _) in planted().items()
    }
    assert [row["key"] for row in marks] == train.split("train", exclude="none").keys([row["row"] for row in marks])
    assert found["b/same"].endswith("distance 0.000")
    assert found["b/plain_same"].endswith("distance 0.000")

    assert report == json.loads((train.path / "dedup/report.json").read_text())
    assert report["data"]["copies"] == report["against"][0]["copies"] == len(planted())
    assert report["data"]["plain"] == 4
    assert "pets:train" in capfd.readouterr().out
    with Image.open(train.path / "dedup/pairs.png") as sheet:
        assert np.asarray(sheet).std() > 30
    assert sorted(path.name for path in tests.path.iterdir()) == before


def distances(images: list[np.ndarray], tests: list[np.ndarray]) -> np.ndarray:
    """Of every pair that the search proposes."""
    likely = ImageIndex(np.stack([thumbnail(pixels) for pixels in tests])).find(
        np.stack([thumbnail(pixels) for pixels in images])
    )
    return np.array(
        [
            distance(reduced(tests[of]), reduced(images[row]), crop, mirrored)
            for row, of, crop, mirrored in zip(
                likely.query, likely.test, likely.crop, likely.mirrored.tolist(), strict=True
            )
        ]
    )


def test_recall_on_planted_copies() -> None:
    recall = measure_recall([picture(seed, 96, 96) for seed in range(60)], DEFAULT)
    assert np.mean(list(recall.values())) >= 0.95, recall
    assert min(recall.values()) >= 0.9, recall


def test_strangers_are_no_copies_even_of_the_same_layout() -> None:
    def like(layout: int, seed: int) -> np.ndarray:
        """The same shapes, with fine details of its own."""
        shapes = cv2.GaussianBlur(picture(layout).astype(np.float32), (0, 0), 2)
        own = cv2.GaussianBlur(np.random.default_rng(seed).normal(0, 50, (90, 120, 1)).astype(np.float32), (0, 0), 1.5)
        return (shapes + own[..., None]).clip(0, 255).astype(np.uint8)

    tests = [picture(seed) for seed in range(60)]
    found = distances([picture(seed) for seed in range(5000, 5200)] + [like(seed, seed) for seed in range(60)], tests)
    assert len(found) >= 50, "the search sorts these out: they say nothing about the second look"
    assert found.min() > DEFAULT


def test_candidates_are_all_hashes_within_seven_bits() -> None:
    thumbs = np.stack([thumbnail(picture(seed)) for seed in range(8)])
    codes = near_copies._crop_hashes(thumbs)
    rng = np.random.default_rng(0)
    bits = [rng.choice(64, size, replace=False) for size in range(12) for _ in range(20)]
    flips = np.array([sum(1 << int(bit) for bit in chosen) for chosen in bits], np.uint64)
    queries = codes[rng.integers(len(codes), size=len(flips))] ^ flips
    near = np.bitwise_count(queries[:, None] ^ codes).reshape(len(queries), 8, NUM_CROPS).min(2) <= 7
    found = ImageIndex(thumbs).candidates(queries)
    pairs = list(zip(*found[:2].tolist(), strict=True))
    assert len(pairs) == len(set(pairs))
    assert set(zip(*(rows.tolist() for rows in np.nonzero(near)), strict=True)) <= set(pairs)


def test_an_index_mapped_from_files_finds_what_one_in_memory_finds(tmp_path: Path) -> None:
    thumbs = np.stack([thumbnail(picture(seed)) for seed in range(40)])
    index = ImageIndex(thumbs, np.arange(0, 40, 2))
    index.add(np.array([33, 35]))
    ImageIndex.write(thumbs, np.array([*range(0, 40, 2), 33, 35]), tmp_path)
    queries = near_copies._crop_hashes(thumbs)[::7] ^ np.uint64(1 << 40 | 1 << 3)
    expected = index.candidates(queries)
    assert set(expected[1].tolist()) == {*range(0, 40, 2), 33, 35}
    np.testing.assert_array_equal(ImageIndex.mapped(thumbs, tmp_path).candidates(queries), expected)


def test_an_index_of_a_killed_search_is_written_again(sets: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    train, tests = copy(sets[0], tmp_path), sets[1]
    expected = dedup.run(config(train, tests.path))
    (images,) = (train.path / "dedup/search").glob("*/tests.npz")
    index = search_shard.index_folder(images)
    assert not index.exists()  # Removed after the search: it is large, and made again when needed.
    index.mkdir()
    (index / "0.ivf").write_bytes(b"half of it")
    unfinished = index.with_name(f".{index.name}.0123abcd")
    unfinished.mkdir()
    unfinished.with_suffix(".0123abcd.tmp").touch()
    next(file for file in images.parent.glob("*.npz") if file != images).unlink()
    found = dedup.run(config(train, tests.path))
    assert found == expected
    assert [path.name for path in images.parent.iterdir() if path.suffix != ".npz"] == []


def test_images_without_detail_are_plain() -> None:
    gradient = np.tile(np.linspace(0, 255, 64).astype(np.uint8)[:, None, None], (1, 64, 3))
    tiny, flat = picture(0, 12, 40), np.full((50, 50, 3), 7, np.uint8)
    corner = flat.copy()
    corner[38:, 34:] = picture(0)[:12, :16]
    assert all(is_plain(pixels, thumbnail(pixels)) for pixels in (gradient, tiny, flat, corner))
    assert not is_plain(picture(0), thumbnail(picture(0)))


def test_killed_job_goes_on(sets: tuple[Dataset, Dataset], tmp_path: Path, capfd) -> None:
    """What is there of thumbnails and of the search is not made again; another threshold is no other search."""
    train, tests = copy(sets[0], tmp_path), sets[1]
    dedup.run(config(train, tests.path))
    marks, thumbnails = train.path / "exclude/test_copies.parquet", train.path / "dedup/thumbnails"
    whole = marks.read_bytes()
    (found,) = (train.path / "dedup/search").iterdir()
    first = {path: path.read_bytes() for folder in (thumbnails, found) for path in folder.iterdir()}
    marks.unlink()
    (train.path / "dedup/report.json").unlink()
    gone = [*sorted(thumbnails.iterdir())[2:5], *sorted(set(found.iterdir()) - {found / "tests.npz"})[2:]]
    for path in gone:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in first if path not in gone}
    capfd.readouterr()
    dedup.run(config(train, tests.path))
    assert "read earlier: 0" not in (said := capfd.readouterr().out)
    assert "test images: 2 of " in said
    assert {path: path.read_bytes() for path in first} == first
    assert marks.read_bytes() == whole

    (train.path / "dedup/progress.json").write_text("{}")  # Of a search that was killed after its last shard.
    assert dedup.run(config(train, tests.path, max_distance=0.0))["data"]["copies"] == 2
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(list((train.path / "dedup/search").iterdir())) == 1
    assert not (train.path / "dedup/progress.json").exists()


def kill(*_: object, **__: object) -> None:
    raise RuntimeError("killed")


def test_no_copies_is_an_empty_list(sets: tuple[Dataset, Dataset], tmp_path: Path, monkeypatch) -> None:
    strangers = {f"x/{i}.jpg": jpeg(picture(3000 + i)) for i in range(6)}
    other = shard.run(settings(write_folder(strangers, tmp_path / "raw"), tmp_path / "other"))
    train = copy(sets[0], tmp_path)
    names = ("dedup/thumbnails/.a.npz", "exclude/.test_copies.parquet")
    unfinished = [train.path / f"{name}.12345678.tmp" for name in names]  # Of a killed task, and of a killed search.
    for path in unfinished:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    # A kill between the list and the report: the report of an earlier search would say that its copies are marked.
    (train.path / "dedup/report.json").write_text("{}")
    monkeypatch.setattr(dedup, "write_files", kill)
    with pytest.raises(RuntimeError, match="killed"):
        dedup.run(config(train, other.path))
    monkeypatch.undo()
    assert len(read_lists(train)["test_copies"]) == 0
    with pytest.raises(FileNotFoundError):
        read_dedup_report(train.path)

    dedup.run(config(train, other.path))
    assert read_dedup_report(train.path).against[0].copies == 0
    assert not any(path.exists() for path in unfinished)
    assert len(read_lists(train)["test_copies"]) == 0
    assert not (train.path / "dedup/pairs.png").exists()


def test_mistakes_are_told(sets: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    train, tests = copy(sets[0], tmp_path), sets[1]
    mistakes = {
        "no such data set": config(train, tmp_path / "nothing"),
        "every image would be its own copy.*within_split=true": config(train, train.path),
        "has no split 'val'": config(train, f"{tests.path}:val"),
    }
    for message, made in mistakes.items():
        with pytest.raises(UserError, match=message):
            dedup.run(made)
    assert not (train.path / "dedup").exists()
    with pytest.raises(UserError, match="within_split=true"):
        schema.load(DedupConfig, None, [f"data={train.path}", f"against=[{tests.path}]", "within_split=true"])


def test_damage_stops_the_job_with_its_name(sets: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    train, tests = copy(sets[0], tmp_path), sets[1]
    files = {f"x/{i}.jpg": jpeg(picture(i)) for i in range(5)}
    # Cut, but with an end: only decoding finds it.
    files["x/broken.jpg"] = files["x/damaged.jpg"] = files["x/0.jpg"][:1500] + b"\xff\xd9"
    source = write_folder(files, tmp_path / "raw")
    broken = shard.run(settings(source, tmp_path / "broken", inspect="header", max_bad_share=1))
    with pytest.raises(UserError, match=r"2 of the 7 images .*: x/broken, x/damaged\."):
        dedup.run(config(train, broken.path))
    report = dedup.run(config(train, broken.path, max_bad_share=0.5))
    assert report["against"][0]["unreadable"] == 2

    thumbnails = sorted((train.path / "dedup/thumbnails").iterdir())
    thumbnails[0].write_bytes(thumbnails[0].read_bytes()[:-100])
    with pytest.raises(UserError, match=f"{thumbnails[0].name} is damaged. Remove it"):
        dedup.run(config(train, broken.path, tests.path, max_bad_share=0.5))


@pytest.mark.parametrize("damaged", ["searched", "test image"])
def test_a_damaged_shard_is_refused_until_it_is_repaired(
    damaged: str, sets: tuple[Dataset, Dataset], tmp_path: Path
) -> None:
    train, tests = (copy(dataset, tmp_path) for dataset in sets)
    dataset, key = (train, "b/same") if damaged == "searched" else (tests, "x/20")
    split = dataset.split("train")
    row = split.keys(range(len(split))).index(key)
    tar = Path(split.shard_paths[split.shard_of(row)])
    whole, begin, size = tar.read_bytes(), split.place_of(row)[0], split.place_of(row)[1]
    tar.write_bytes(whole[:begin] + bytes(size) + whole[begin + size :])
    with pytest.raises(UserError, match=rf"{tar.name} has other bytes at {begin:,} .*verify"):
        dedup.run(config(train, tests.path))
    tar.write_bytes(whole)
    assert dedup.run(config(train, tests.path))["data"]["copies"] == len(planted())


def test_a_search_of_another_split_keeps_the_marks(sets: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    """The marks of each split are those of its last search; the report is of the last search, and names its split."""
    files = {
        f"{split}/{of}.jpg": jpeg(picture(number))
        for split, of, number in (("train", "a/0", 0), ("train", "a/1", 2000), ("val", "a/2", 1), ("val", "a/3", 2001))
    }
    source = write_folder(files, tmp_path / "raw")
    train = shard.run(settings(source, tmp_path / "train", splits={"train": "train", "val": "val"}))
    for split in ("train", "val", "val", "train"):
        dedup.run(config(train, sets[1].path, split=split))
        assert read_dedup_report(train.path).data.is_split(split)
    marked = [(row["split"], row["key"]) for row in read_lists(train)["test_copies"].to_pylist()]
    assert marked == [("train", "a/0"), ("val", "a/2")]
    assert [len(train.split(split)) for split in train.splits] == [1, 1]
    assert _test_copies(train, "train") == "pets:train 1"
    assert _test_copies(train, "val") == "pets:train 1, searched in train:train, not in val"
