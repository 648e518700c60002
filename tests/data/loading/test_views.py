"""Several views of an image: one decoding, each view as if it were drawn alone, the same in any batch."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import train_view

from pipeline.data.dataset.manifest import Dataset, Split
from pipeline.data.loading import jpeg_region, views
from pipeline.data.loading.decode import decode
from pipeline.data.loading.loader import Batch, Loader
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.views import (
    Views,
    ViewWriter,
    train_views,
    view_seed,
)
from pipeline.settings.run import AugmentConfig

COUNT, SEED = 24, 3
GLOBAL = AugmentConfig(area_min=0.25, color_jitter=0.4)
LOCAL = replace(GLOBAL, area_min=0.05, area_max=0.25, randaugment_layers=1, erase=0.5)
GROUPS = (Views(2, 64, GLOBAL), Views(3, 32, LOCAL))
Encode = Callable[..., bytes]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, encode: Encode, make_dataset: Callable[..., Dataset]) -> Dataset:
    generator = np.random.default_rng(0)
    files = []
    for row in range(COUNT):
        pixels = generator.integers(0, 256, (*generator.integers(60, 120, 2), 3), np.uint8)
        tags = Image.Exif()
        tags[0x0112] = row % 8 + 1
        files.append(encode(pixels, "PNG") if row % 6 == 5 else encode(pixels, "JPEG", exif=tags))
    return make_dataset(tmp_path_factory.mktemp("views") / "data", files, [[row % 5] for row in range(COUNT)], 9)


def requests(size: int = 10) -> list[tuple[np.ndarray, np.ndarray]]:
    rows = np.random.default_rng(1).permutation(COUNT)
    return [(rows[i : i + size], np.full(len(rows[i : i + size]), 2)) for i in range(0, COUNT, size)]


def load(split: Split, writer: ViewWriter, threads: int = 2, prefetch: int = 2, bad: float = 0.0) -> list[Batch]:
    with Loader(split, writer, threads, prefetch, bad) as loader:
        return [replace(batch, views=tuple(v.clone() for v in batch.views)) for batch in loader.batches(requests())]


def test_each_view_is_drawn_as_if_it_were_alone(dataset: Dataset) -> None:
    split = dataset.split("train")
    batches = load(split, train_views(GROUPS, SEED))
    assert [[tuple(group.shape) for group in batch.views] for batch in batches] == [
        [(2, n, 64, 64, 3), (3, n, 32, 32, 3)] for n in (10, 10, 4)
    ]
    settings = [(config, side) for count, side, config in ((2, 64, GLOBAL), (3, 32, LOCAL)) for _ in range(count)]
    for number, (config, side) in enumerate(settings):
        alone = load(split, train_view(config, view_seed(SEED, number), side))
        for batch, expected in zip(batches, alone, strict=True):
            found = [view for group in batch.views for view in group]
            assert torch.equal(found[number], expected.images)
            assert torch.equal(batch.labels, expected.labels)
    for batch in batches:
        assert all(group.dtype == torch.uint8 and group.flatten(0, 1).is_contiguous() for group in batch.views)
        for group in batch.views:
            assert not any(torch.equal(group[0], other) for other in group[1:])


@pytest.mark.parametrize("crop", ["inception", "random_resized"])
def test_views_that_repeat_others_show_the_same_at_their_size(crop: str, encode: Encode) -> None:
    """Of an image whose red is its column and whose green is its row, each pixel of a view is the mean of the four of
    the view of twice its size.
    """
    rows, columns = np.indices((200, 250), np.uint8)
    data = encode(np.stack([columns, rows, 0 * rows], 2), "PNG")
    config = AugmentConfig(crop=crop, area_min=0.3, flip_vertical=True, turns=True)
    groups = (Views(1, 16, config), Views(2, 16, replace(config, blur=1.0)), Views(2, 8, LOCAL))
    repeated = (Views(3, 32, views.undistorted(replace(config, grey=1.0, erase=1.0)), repeats=0), Views(1, 16, config))
    seen = set()
    for row in range(40):
        outs = [np.zeros((side, side, 3), np.uint8) for side in (16, 16, 16, 8, 8, 32, 32, 32, 16)]
        train_views((*groups, *repeated), SEED).write(data, outs, 1, row)
        for number in range(3):
            large = outs[5 + number].astype(float)
            reduced = (large[::2, ::2] + large[1::2, ::2] + large[::2, 1::2] + large[1::2, 1::2]) / 4
            # Rounding; blur changes the edges alone.
            inner = slice(4, -4) if number else slice(None)
            assert np.abs(reduced - outs[number])[inner, inner].max() < 1.6
        alone = [np.zeros((16, 16, 3), np.uint8)]
        train_view(config, view_seed(SEED, 8), 16).write(data, alone, 1, row)
        assert np.array_equal(outs[8], alone[0]), "numbers count all views before"
        before = [np.zeros_like(out) for out in outs[:5]]
        train_views(groups, SEED).write(data, before, 1, row)
        assert all(np.array_equal(a, b) for a, b in zip(before, outs, strict=False))
        seen.add(tuple(np.sign(np.diff(outs[0][[0, 0, -1], [0, -1, 0]].astype(int), axis=0)).ravel()))
    assert len(seen) == 8, "each turn and flip"


def test_seeds_of_views() -> None:
    """They decide what every resumed run with several views trains on, so they must never change."""
    assert [view_seed(3, number) for number in range(3)] == [3, 12214057047995133590, 961052965737857799]
    assert len({view_seed(seed, number) for seed in range(20) for number in range(20)}) == 400


def test_an_image_is_decoded_once(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = []

    def counted(data: bytes, *given: object) -> np.ndarray:
        image = decode(data, *given)
        boxes.append(image.shape[:2])
        return image

    monkeypatch.setattr(views, "decode", counted)
    split = dataset.split("train")
    load(split, train_views(GROUPS, SEED))
    assert len(boxes) == COUNT
    whole = [decode(ShardReader(split).read(row)).shape[:2] for row in range(COUNT)]
    boxes.clear()
    load(split, train_views([Views(4, 16, LOCAL)], SEED), threads=1)
    assert len(boxes) == COUNT
    assert sum(h * w for h, w in boxes) < 0.95 * sum(h * w for h, w in whole)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("crop", ["inception", "resize_small_crop"])
def test_a_region_gives_the_views_of_the_whole_image(
    orientation: int, crop: str, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """resize_small_crop needs the whole image beside views that do not."""
    tags = Image.Exif()
    tags[0x0112] = orientation
    pixels = np.random.default_rng(orientation).integers(0, 256, (145, 177, 3), np.uint8)
    files = [encode(pixels, "JPEG", exif=tags, subsampling=2), encode(pixels, "JPEG", exif=tags, progressive=True)]
    for filter in ("linear", "antialias"):
        groups = (
            Views(2, 24, AugmentConfig(area_max=0.1, resize_filter=filter)),
            Views(1, (16, 20), AugmentConfig(crop=crop, area_max=0.2, resize_filter=filter)),
        )
        for data in files:
            for row in range(10):
                found, expected = ([np.zeros((24, 24, 3), np.uint8) for _ in "12"] for _ in "ab")
                for outs, library in ((found, jpeg_region._LIBRARY), (expected, None)):
                    outs.append(np.zeros((16, 20, 3), np.uint8))
                    with monkeypatch.context() as patch:
                        patch.setattr(jpeg_region, "_LIBRARY", library)
                        train_views(groups, SEED).write(data, outs, 1, row)
                assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
                alone = np.empty((24, 24, 3), np.uint8)
                views.write_train_view(decode(data), alone, groups[0].augment, view_seed(SEED, 1), 1, row)
                assert np.array_equal(found[1], alone)
