"""Views: random parts depend on (seed, epoch, sample) only and have the right distribution; the rest is exact."""

import cv2
import numpy as np
import pytest

from pipeline.base import random_numbers
from pipeline.data.loading import views
from pipeline.data.loading.views import inception_crop, write_eval_view, write_train_view
from pipeline.settings.run import AugmentConfig


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    """Smooth, so that two resizing methods are comparable, and different everywhere."""
    small = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    return cv2.resize(small, (160, 120), interpolation=cv2.INTER_CUBIC)


def view(
    image: np.ndarray, size: int = 32, seed: int = 0, epoch: int = 0, sample: int = 0, **config: object
) -> np.ndarray:
    out = np.full((size, size, 3), 77, np.uint8)
    write_train_view(image, out, AugmentConfig(**config), seed, epoch, sample)
    return out


def evaluated(image: np.ndarray, size: int, **config: object) -> np.ndarray:
    out = np.full((size, size, 3), 77, np.uint8)
    write_eval_view(image, out, AugmentConfig(**config))
    return out


def crops(height: int, width: int, count: int, **config: float) -> np.ndarray:
    """(count, 4) of (top, left, height, width)."""
    settings = AugmentConfig(**config)
    return np.array(
        [inception_crop(height, width, settings, random_numbers.draws(0, 3, 0, sample)) for sample in range(count)]
    )


@pytest.mark.parametrize(("height", "width"), [(300, 400), (500, 200), (64, 64)])
def test_crops_obey_area_and_aspect(height: int, width: int) -> None:
    top, left, h, w = crops(height, width, 2000).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + h <= height).all()
    assert (left + w <= width).all()
    share = h * w / (height * width)
    assert share.min() >= 0.05
    assert share.max() <= 1
    narrow = crops(height, width, 200, area_min=0.3, area_max=0.5).T
    assert (
        0.3
        <= (narrow[2] * narrow[3]).min() / (height * width)
        <= (narrow[2] * narrow[3]).max() / (height * width)
        <= 0.5
    )
    # The width is rounded to whole pixels.
    assert (w >= np.floor(h * 3 / 4)).all()
    assert (w <= np.ceil(h * 4 / 3)).all()


def test_crops_fill_their_range() -> None:
    top, left, h, w = crops(300, 400, 2000).T
    share, aspect = h * w / 120_000, w / h
    assert share.min() < 0.06
    assert share.max() > 0.95
    assert 0.74 < aspect.min() < 0.77
    assert 1.30 < aspect.max() < 1.35
    # The position is uniform.
    assert abs((top / np.maximum(300 - h, 1))[h < 250].mean() - 0.5) < 0.03
    assert abs((left / np.maximum(400 - w, 1))[w < 350].mean() - 0.5) < 0.03
    # As TensorFlow's sample_distorted_bounding_box: the height is uniform, for square crops from sqrt(5 %) to all of
    # it.
    square = crops(300, 300, 2000, aspect_min=1.0, aspect_max=1.0).T[2]
    assert abs(square.mean() - (67 + 300) / 2) < 5


def test_no_valid_crop_is_the_whole_image() -> None:
    # The whole of a 4:1 image has an aspect far from 1.
    assert crops(100, 400, 20, area_min=1.0, aspect_min=1.0, aspect_max=1.0).tolist() == [[0, 0, 100, 400]] * 20


@pytest.mark.parametrize("crop", ["inception", "resize_crop", "resize_small_crop"])
def test_same_identity_same_view(crop: str, image: np.ndarray) -> None:
    assert np.array_equal(view(image, crop=crop, sample=5), view(image, crop=crop, sample=5))
    others = [{"sample": 6}, {"epoch": 1, "sample": 5}, {"seed": 1, "sample": 5}]
    for other in others:
        assert not np.array_equal(view(image, crop=crop, sample=5), view(image, crop=crop, **other)), other


def test_half_of_the_views_are_flipped(image: np.ndarray) -> None:
    plain = view(image, crop="none", flip=False)
    flipped = 0
    for sample in range(600):
        found = view(image, crop="none", sample=sample)
        is_flipped = np.array_equal(found, plain[:, ::-1])
        assert is_flipped or np.array_equal(found, plain)
        flipped += is_flipped
    assert 250 < flipped < 350  # 4 standard deviations


def test_inception_view_is_its_crop_resized(image: np.ndarray) -> None:
    for sample in range(20):
        top, left, h, w = inception_crop(120, 160, AugmentConfig(), random_numbers.draws(0, 3, 0, sample))
        expected = cv2.resize(image[top : top + h, left : left + w], (32, 32), interpolation=cv2.INTER_LINEAR)
        assert np.array_equal(view(image, flip=False, sample=sample), expected)


def test_bilinear_everywhere_is_the_same_in_training_and_evaluation() -> None:
    image = np.random.default_rng(3).integers(0, 256, (128, 170, 3), np.uint8)
    resized = cv2.resize(image, (40, 40), interpolation=cv2.INTER_LINEAR)
    assert np.array_equal(view(image, 40, crop="none", flip=False, resize_filter="bilinear"), resized)
    assert np.array_equal(evaluated(image, 40, eval_crop="resize", resize_filter="bilinear"), resized)
    assert not np.array_equal(evaluated(image, 40, eval_crop="resize", resize_filter="linear"), resized)


@pytest.mark.parametrize(("resize_to", "side"), [(0, 37), (48, 48)])  # 0: 7/6 of 32
def test_resize_crop(resize_to: int, side: int, image: np.ndarray) -> None:
    resized = cv2.resize(image, (side, side), interpolation=cv2.INTER_LINEAR)
    windows = {
        resized[top : top + 32, left : left + 32].tobytes(): (top, left)
        for top in range(side - 31)
        for left in range(side - 31)
    }
    found = [
        windows[view(image, crop="resize_crop", resize_to=resize_to, flip=False, sample=i).tobytes()]
        for i in range(400)
    ]
    # Every position occurs, including the last ones.
    assert {top for top, _ in found} == {left for _, left in found} == set(range(side - 31))


def test_padding_is_a_reflection_around_the_image(image: np.ndarray) -> None:
    """torchvision's RandomCrop(32, padding=3, padding_mode="reflect")."""
    small = cv2.resize(image, (32, 32))
    padded = np.pad(small, ((3, 3), (3, 3), (0, 0)), mode="reflect")
    windows = {padded[y : y + 32, x : x + 32].tobytes(): (y, x) for y in range(7) for x in range(7)}
    for crop in ("resize_crop", "resize_small_crop"):
        views = [view(small, crop=crop, resize_to=32, padding=3, flip=False, sample=i) for i in range(300)]
        assert {windows[found.tobytes()] for found in views} == set(windows.values())


@pytest.mark.parametrize("upright", [False, True])
def test_resize_small_crop_keeps_the_aspect(upright: bool, image: np.ndarray) -> None:
    # 160 x 120 is resized to 64 x 48 (short side 48), then cropped at random to 32 x 32.
    source = np.ascontiguousarray(image.transpose(1, 0, 2)) if upright else image
    resized = cv2.resize(source, (48, 64) if upright else (64, 48), interpolation=cv2.INTER_AREA)
    windows = {
        resized[top : top + 32, left : left + 32].tobytes(): (top, left)
        for top in range(resized.shape[0] - 31)
        for left in range(resized.shape[1] - 31)
    }
    settings = {"crop": "resize_small_crop", "resize_to": 48, "flip": False}
    found = [windows[view(source, sample=i, **settings).tobytes()] for i in range(600)]
    assert {top for top, _ in found} == set(range(resized.shape[0] - 31))
    assert {left for _, left in found} == set(range(resized.shape[1] - 31))


def test_evaluation_view_by_hand() -> None:
    # 4 x 4 blocks of one value, shrunk by 4 by area, give these values; then the centre 2 of 2 x 4.
    values = np.arange(8, dtype=np.uint8).reshape(2, 4) * 20
    large = np.repeat(np.kron(values, np.ones((4, 4), np.uint8))[..., None], 3, axis=2)
    assert evaluated(large, 2, eval_resize=2)[..., 0].tolist() == values[:, 1:3].tolist()
    assert evaluated(large, 2, eval_crop="resize")[..., 0].tolist() == [[10, 50], [90, 130]]
    squashed = evaluated(large, 4, eval_crop="resize")
    assert np.array_equal(evaluated(large, 2, eval_crop="resize_center", eval_resize=4), squashed[1:3, 1:3])


def test_evaluation_of_small_images_interpolates(image: np.ndarray) -> None:
    small = image[:20, :30].copy()
    expected = cv2.resize(small, (384, 256), interpolation=cv2.INTER_LINEAR)[16:240, 80:304]
    assert np.array_equal(evaluated(small, 224), expected)
    expected = cv2.resize(small, (40, 40), interpolation=cv2.INTER_LINEAR)
    assert np.array_equal(evaluated(small, 40, eval_crop="resize"), expected)


def test_views_that_are_not_square(image: np.ndarray) -> None:
    def look(of: np.ndarray, height: int, width: int, **config: object) -> np.ndarray:
        out = np.full((height, width, 3), 77, np.uint8)
        write_eval_view(of, out, AugmentConfig(**config))
        return out

    # Short side of 24 x 56 to 30: the image, 120 x 160, must cover 30 x 70, so it is resized to 52 x 70; then the
    # centre.
    found = look(image, 24, 56, eval_resize=30)
    assert np.array_equal(found, cv2.resize(image, (70, 52), interpolation=cv2.INTER_AREA)[14:38, 7:63])
    assert np.array_equal(
        look(image, 24, 56, eval_crop="resize"), cv2.resize(image, (56, 24), interpolation=cv2.INTER_AREA)
    )
    standing = np.ascontiguousarray(image.transpose(1, 0, 2))
    for config in ({"eval_resize": 30}, {"eval_crop": "resize"}):
        turned = look(standing, 56, 24, **config).transpose(1, 0, 2)
        assert np.abs(turned.astype(int) - look(image, 24, 56, **config)).max() <= 1


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5000), (5000, 2), (2, 3), (1, 65500)])
def test_extreme_sizes(height: int, width: int) -> None:
    flat = np.full((height, width, 3), (10, 20, 30), np.uint8)
    for method in ("linear", "antialias"):
        for crop in ("inception", "resize_crop", "resize_small_crop", "none"):
            for sample in range(5):
                assert (view(flat, crop=crop, sample=sample, resize_filter=method) == (10, 20, 30)).all()
        for eval_crop in ("center", "resize"):
            assert (evaluated(flat, 224, eval_crop=eval_crop, resize_filter=method) == (10, 20, 30)).all()


def test_a_long_image_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1 x 65500 at a short side of 256 would be 12.9 GB.
    sizes = []
    resize = cv2.resize
    monkeypatch.setattr(
        views.cv2, "resize", lambda image, size, **rest: sizes.append(size) or resize(image, size, **rest)
    )
    evaluated(np.zeros((1, 65500, 3), np.uint8), 224)
    evaluated(np.zeros((65500, 1, 3), np.uint8), 224)
    assert sizes
    assert max(width * height for width, height in sizes) < 2_000_000
