"""Near copies within a split: of those that are alike one is kept, the largest, and nothing else is marked."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from measure_dedup import PLANTS
from PIL import Image
from raw_images import encoded, settings, write_folder
from test_dedup import jpeg, picture, plain

from data_tools.dedup import dedup, within_split
from data_tools.sharding import shard
from pipeline.data.dataset.exclusion import EXCLUDED, read_lists, write_list
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.settings.commands.data import DedupConfig

SCENE = 25


def scene(number: int) -> np.ndarray:
    """What a camera that stands still sees: always the same, but for noise."""
    return (picture(500) + np.random.default_rng(number).normal(0, 4, (90, 120, 3))).clip(0, 255).astype(np.uint8)


def png(pixels: np.ndarray) -> bytes:
    return encoded(Image.fromarray(pixels), "PNG")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, ray_cluster: int) -> tuple[Dataset, dict[str, str]]:
    """A data set with strangers and copies, and the key of each copy -> that of the largest image of which it is
    one.
    """
    images = {f"a/{number:02d}.png": png(picture(number)) for number in range(len(PLANTS) + 8)}
    copy_of = {}
    for number, plant in enumerate(PLANTS.values()):
        copy = plant(picture(number), np.random.default_rng(number))
        images[f"a/copy{number}.jpg"] = jpeg(copy)
        of, kept = f"a/copy{number}", f"a/{number:02d}"
        if copy[..., 0].size > picture(number)[..., 0].size:  # Enlarged.
            of, kept = kept, of
        copy_of[of] = kept
    images["b/other_class.jpg"], copy_of["b/other_class"] = jpeg(picture(10)), "a/10"
    # A part in more bytes than the whole.
    images["a/13.jpg"], images["a/part.png"] = jpeg(picture(13)), png(picture(13)[7:-7, 9:-9])
    del images["a/13.png"]
    copy_of["a/part"] = "a/13"
    # A file twice that is a copy itself, and one without detail.
    for name in ("twice", "twice_too"):
        images[f"b/{name}.jpg"], copy_of[f"b/{name}"] = jpeg(picture(11)[:, ::-1]), "a/11"
    images |= {"b/plain.jpg": plain(90, 0), "b/plain_same.jpg": plain(90, 0), "b/plain_other.jpg": plain(91, 3)}
    copy_of["b/plain_same"] = "b/plain"
    frames = {f"b/scene{number:02d}": jpeg(scene(number)) for number in range(SCENE)}
    largest = max(frames, key=lambda key: len(frames[key]))
    images |= {f"{key}.jpg": data for key, data in frames.items()}
    copy_of |= {key: largest for key in frames if key != largest}
    folder = tmp_path_factory.mktemp("within")
    return shard.run(settings(write_folder(images, folder / "raw"), folder / "photos", samples_per_shard=16)), copy_of


@pytest.fixture
def photos(made: tuple[Dataset, dict[str, str]], tmp_path: Path) -> Dataset:
    return open_dataset(shutil.copytree(made[0].path, tmp_path / "photos"))


def marked(data: Dataset) -> dict[str, str]:
    """Key of each marked image -> that of the kept one."""
    rows = read_lists(data, "near_copies")["near_copies"].to_pylist()
    return {row["key"]: row["reason"].split(",")[0].removeprefix("copy of ") for row in rows}


def search(data: Dataset, **others: object) -> dict:
    return dedup.run(DedupConfig(data=str(data.path), within_split=True, **others))


def test_the_largest_of_those_that_are_alike_is_kept(
    made: tuple[Dataset, dict[str, str]],
    photos: Dataset,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(within_split, "_BLOCK", 7)
    report = search(photos)
    assert marked(photos) == made[1]
    data = report["data"]
    assert report == json.loads((photos.path / "dedup/near_copies.json").read_text())
    assert data["copies"] == len(made[1])
    assert data["plain"] == 3
    assert data["images_with_copies"] == len(set(made[1].values()))
    assert len(photos.split("train")) == data["images"] - len(made[1])
    with Image.open(photos.path / "dedup/near_copies.png") as sheet:
        assert np.asarray(sheet).std() > 30
    assert "block 2" in capfd.readouterr().out
    # Nothing but pairs is left, so the disk holds no second copy of the thumbnails; another run reads these and changes
    # nothing.
    (folder,) = (photos.path / "dedup/search").iterdir()
    kept = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert not [path.name for path in kept if path.stem.endswith(("kept", "images"))]
    assert search(photos) == report
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == kept


def test_images_of_16_bits_are_compared_as_their_pictures(ray_cluster: int, tmp_path: Path) -> None:
    """Copies of one another and of 8-bit photographs, and none among those whose picture is nearly constant."""

    def wide(pixels: np.ndarray) -> bytes:
        gray = pixels.astype(np.uint16) @ np.array([2, 5, 1], np.uint16)
        return encoded(Image.fromarray(300 + gray.astype(np.uint16)), "PNG")

    noise = (np.random.default_rng(number).integers(0, 9, (90, 120, 3)) for number in range(20))
    images = {f"{number:02d}.png": wide(picture(number)) for number in range(8)}
    images |= {f"flat{number:02d}.png": wide(80 + of_image) for number, of_image in enumerate(noise)}
    images |= {"copy.png": wide(picture(3)[:, ::-1][:84]), "scan.png": wide(picture(100)[5:, 5:])}
    photos = {f"{number}.jpg": jpeg(picture(number)) for number in range(98, 102)}
    bits16, bits8 = (
        shard.run(settings(write_folder(files, tmp_path / f"raw{bits}"), tmp_path / f"bits{bits}", layout="images"))
        for files, bits in ((images, 16), (photos, 8))
    )
    assert (bits16.pixels.type, bits8.pixels.type) == ("uint16", "uint8")
    report = search(bits16)
    assert marked(bits16) == {"copy": "03"}
    assert report["data"]["plain"] == 20
    dedup.run(DedupConfig(data=str(bits16.path), against=[str(bits8.path)]))
    (row,) = read_lists(bits16, "test_copies")["test_copies"].to_pylist()
    assert (row["key"], row["reason"].split(",")[0]) == ("scan", "copy of bits8:train/100")


def test_a_killed_search_goes_on(photos: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(within_split, "_BLOCK", 20)
    first = search(photos)
    (folder,) = (photos.path / "dedup/search").iterdir()
    first_block = [path for path in folder.iterdir() if path.name.startswith("1")]
    for path in set(folder.iterdir()) - set(first_block[1:]):  # As if it had been killed in the first block.
        path.unlink()
    (folder / "1-kept.npz").write_bytes(b"half a file of a killed job")
    kept = {path: path.stat().st_mtime_ns for path in first_block[1:]}
    (photos.path / "exclude/near_copies.parquet").write_bytes(b"damaged, and to be replaced")
    again = search(photos)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert again == first


def test_an_excluded_image_does_not_stand_for_its_copies(photos: Dataset, made: tuple[Dataset, dict[str, str]]) -> None:
    split = photos.split("train", "none")
    row = [split.keys(range(len(split))).index("a/00")]
    bad = pa.Table.from_pydict({"split": ["train"], "row": row, "key": ["a/00"], "reason": ["out of focus"]}, EXCLUDED)
    write_list(photos, "blurred", bad)
    write_list(photos, "dark", EXCLUDED.empty_table())
    for _ in range(2):
        report = search(photos)
        assert report["data"]["excluded_otherwise"] == 1
        assert marked(photos) == {key: of for key, of in made[1].items() if of != "a/00"}
