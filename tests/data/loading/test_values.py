"""Images of any channels and type through the loader, against independent computations in float64."""

import io
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from tiny import make_dataset

from pipeline.architecture.pixels import FULL_RANGE, RGB8, Pixels
from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.random_numbers import Purpose
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.decode import DecodeError, decode
from pipeline.data.loading.distort import distort
from pipeline.data.loading.loader import Loader, normalise
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.values import batch_values, to_rgb
from pipeline.data.loading.views import ANTIALIAS, BICUBIC, Views, eval_view, resize, train_views, write_train_view
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig

CPU = torch.device("cpu")
TYPES = ("uint8", "uint16", "int16", "float32")
WITHOUT_FLIP = AugmentConfig(crop="none", flip=False)


def pixels_of(channels: int, kind: str, **more: object) -> Pixels:
    """With another range, mean and deviation in each channel."""
    low, high = FULL_RANGE.get(kind, (-2.0, 2.0))
    span, place = high - low, np.arange(channels) / (4 * channels)
    columns = {
        "low": low + 0.1 * span * place,
        "high": high - 0.2 * span * place,
        "mean": 0.3 + place,
        "std": 0.2 + place,
    }
    names = tuple(f"c{number}" for number in range(channels))
    return Pixels(names, kind, **{name: tuple(map(float, column)) for name, column in columns.items()}, **more)


def noise(kind: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Values all over the type's range; floats from -3 to 3, or of a batch from 0 to 1 (kind "share")."""
    rng = np.random.default_rng(seed)
    if kind == "bool":
        return rng.random(shape) < 0.5
    if kind == "share":
        return rng.random(shape, np.float32)
    if kind.startswith("float"):
        return (6 * rng.random(shape) - 3).astype(kind)
    low, high = FULL_RANGE[kind]
    return rng.integers(int(low), int(high), shape, kind, endpoint=True)


def as_read(image: np.ndarray, pixels: Pixels) -> np.ndarray:
    """What the docstring of `Pixels` says, float64 (C, H, W)."""
    values = image.astype(np.float64)
    is_missing = np.isnan(values) | (values == pixels.nodata if pixels.nodata is not None else False)
    low, high, mean, std = map(np.array, (pixels.low, pixels.high, pixels.mean, pixels.std))
    share = np.where(is_missing, 0, ((values - low) / (high - low)).clip(0, 1))
    return ((share - mean) / std).transpose(2, 0, 1)


# ---------------------------------------------------------------------- from the decoded array to the model's input
@pytest.mark.parametrize("kind", [*FULL_RANGE, "float16", "float32", "float64"])
@pytest.mark.parametrize("channels", [1, 4, 6])
def test_a_model_reads_the_clipped_standardised_share_of_the_range(kind: str, channels: int) -> None:
    image = noise(kind, 9, 7, channels)
    pixels = pixels_of(channels, kind, nodata=None if kind == "bool" else float(image[0, 0, 0]))
    if kind.startswith("float"):
        image[1, 1] = np.nan
    values = batch_values(image, pixels)
    assert values.dtype == pixels.batch_type
    assert values.itemsize <= 2 or image.itemsize > 2 or kind == "float16"
    found = normalise(torch.from_numpy(values)[None], CPU, torch.float32, pixels)[0].numpy()
    assert np.abs(found - as_read(image, pixels)).max() < 2e-6 / min(pixels.std)


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_infinite_values_are_a_bad_image_unless_they_are_nodata(kind: str) -> None:
    image = noise(kind, 4, 4, 2)
    image[2, 1, 1] = -np.inf
    file = io.BytesIO()
    np.save(file, image)
    for nodata in (None, -9999.0, np.inf):
        with pytest.raises(DecodeError):
            decode(file.getvalue(), pixels=pixels_of(2, kind, nodata=nodata))
    pixels = pixels_of(2, kind, nodata=-np.inf)
    values = batch_values(decode(file.getvalue(), pixels=pixels), pixels)
    assert np.isfinite(values).all()
    assert values[2, 1, 1] == 0


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("channels", [1, 4, 6])
@pytest.mark.parametrize("processes", [0, 1])
def test_batches_equal_the_arrays_that_were_written(kind: str, channels: int, processes: int, tmp_path: Path) -> None:
    pixels = pixels_of(channels, kind)
    split = open_dataset(make_dataset(tmp_path, {"train": 6}, size=16, pixels=pixels)).split("train")
    rows = np.array([3, 0, 5])
    writers = (
        eval_view(AugmentConfig(eval_crop="resize"), 16, pixels),
        train_views((Views(2, 16, WITHOUT_FLIP),), 0, pixels=pixels),
    )
    arrays = [np.load(io.BytesIO(ShardReader(split).read(row))) for row in rows]
    for writer in writers:
        with Loader(split, writer, 2, 1, 0.0, processes=processes) as loader:
            (batch,) = loader.batches([(rows, np.zeros(3, np.int64))])
        assert batch.valid.all()
        assert str(batch.images.dtype) == f"torch.{kind}"
        for view in batch.views[0]:
            found = normalise(view, CPU, torch.float32, pixels).numpy()
            for image, array in zip(found, arrays, strict=True):
                assert np.abs(image - as_read(array, pixels)).max() < 2e-6 / min(pixels.std)


def test_images_of_other_channels_than_the_model_reads_are_refused_by_both_lists() -> None:
    bands, rgb16 = pixels_of(4, "uint16"), Pixels.full_range(RGB8.channels, "uint16")
    for other in (pixels_of(5, "uint16"), pixels_of(4, "int16"), RGB8):
        with pytest.raises(UserError, match="c3"):
            bands.reading(other, "weights", "data")
    with pytest.raises(UserError, match="uint16"):
        RGB8.reading(rgb16, "weights", "data")
    assert bands.reading(pixels_of(4, "uint16", nodata=7.0), "", "").nodata == 7


# ---------------------------------------------------------------------- resizing
def weights_of(inputs: int, outputs: int, method: int) -> np.ndarray:
    """float64 (outputs, inputs): what each output pixel is made of. Sides of pixels are at whole numbers."""
    scale = inputs / outputs
    centers, places = (np.arange(outputs)[:, None] + 0.5) * scale, np.arange(inputs)[None] + 0.5
    if method == cv2.INTER_AREA:
        edges = np.minimum(centers + scale / 2, places + 0.5) - np.maximum(centers - scale / 2, places - 0.5)
        return edges.clip(0) / scale
    if method == cv2.INTER_LINEAR:
        padded = np.maximum(0, 1 - np.abs(centers - (np.arange(-1, inputs + 1)[None] + 0.5)))
        padded[:, 1] += padded[:, 0]
        padded[:, -2] += padded[:, -1]
        return padded[:, 1:-1]
    x = np.abs(centers - places) / max(scale, 1)
    if method == ANTIALIAS:
        found = np.maximum(0, 1 - x)
    else:  # Keys' cubic with a = -0.5, as Pillow.
        found = np.where(x < 1, 1.5 * x**3 - 2.5 * x**2 + 1, np.where(x < 2, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2, 0))
    return found / found.sum(1, keepdims=True)


@pytest.mark.parametrize("method", [cv2.INTER_LINEAR, cv2.INTER_AREA, ANTIALIAS, BICUBIC])
@pytest.mark.parametrize("kind", ["uint8", "uint16", "int16", "share"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 13])
def test_resizing_against_float64(method: int, kind: str, channels: int) -> None:
    image = noise(kind, 40, 37, channels)[2:37, 1:34]  # Rows that do not follow one another, as in a crop.
    if (kind, method) == ("uint8", BICUBIC):
        image = image // 2 + 64  # Pillow clips between rows and columns.
    for height, width in ((12, 17), (60, 70)) if method != cv2.INTER_AREA else ((12, 17),):
        rows, columns = weights_of(35, height, method), weights_of(33, width, method)
        expected = np.einsum("hH,HWc,wW->hwc", rows, image.astype(np.float64), columns)
        limits = (0, 1) if kind == "share" else FULL_RANGE[kind]
        room = {"share": 3e-6, "uint8": 1.6}.get(kind, 0.75)  # 8 bits are computed in integers.
        out = np.empty((3, height, width, channels), image.dtype)
        for found in (resize(image, (width, height), method), resize(image, (width, height), method, out[1])):
            assert found.shape == expected.shape
            assert np.abs(found - expected.clip(*limits)).max() < room
        assert np.array_equal(found, out[1])


# ---------------------------------------------------------------------- augmentations
def drawn(name: str, sample: int, draw: int) -> float:
    return random_numbers.draws(3, Purpose.named(name), 2, sample)(draw)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("channels", [1, 3, 6])
def test_flips_and_turns_move_pixels_only(kind: str, channels: int) -> None:
    image = noise("share" if kind == "float32" else kind, 12, 12, channels)
    pixels, seen = pixels_of(channels, kind), set()
    config = AugmentConfig(crop="none", flip_vertical=True, turns=True)
    for sample in range(40):
        plain, found = np.empty((2, *image.shape), image.dtype)
        write_train_view(image, plain, AugmentConfig(crop="none"), 3, 2, sample, pixels)
        write_train_view(image, found, config, 3, 2, sample, pixels)
        is_flipped, turns = drawn("flip_vertical", sample, 0) < 0.5, int(4 * drawn("turns", sample, 0))
        assert np.array_equal(found, np.rot90(plain[::-1] if is_flipped else plain, turns))
        seen.add((is_flipped, turns))
    assert len(seen) == 8


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("channels", [3, 6])
def test_brightness_contrast_and_dropped_channels(kind: str, channels: int) -> None:
    image, pixels = noise("share" if kind == "float32" else kind, 10, 14, channels), pixels_of(channels, kind)
    low, limits = np.array(pixels.batch_range()[0]), (0, 1) if kind == "float32" else FULL_RANGE[kind]
    room, dropped = 1e-6 if kind == "float32" else 0.501, 0
    for sample in range(20):
        found = image.copy()
        distort(found, AugmentConfig(channel_brightness=0.4, channel_contrast=0.3), 3, 2, sample, pixels)
        for channel in range(channels):
            bright = 1 + 0.4 * (2 * drawn("channel_brightness", sample, channel) - 1)
            contrast = 1 + 0.3 * (2 * drawn("channel_contrast", sample, channel) - 1)
            values = low[channel] + bright * (image[..., channel].astype(np.float64) - low[channel])
            values = values.mean() + contrast * (values - values.mean())
            assert np.abs(found[..., channel] - values.clip(*limits)).max() < room
        found = image.copy()
        distort(found, AugmentConfig(drop_channels=0.6), 3, 2, sample, pixels)
        draws = [drawn("drop_channels", sample, channel) for channel in range(channels)]
        for channel, draw in enumerate(draws):
            is_dropped = draw < 0.6 and draw < max(draws)
            dropped += is_dropped
            as_read_low = normalise(torch.from_numpy(found)[None], CPU, torch.float32, pixels)[0, channel]
            expected = image[..., channel] if not is_dropped else found[..., channel]
            assert np.array_equal(found[..., channel], expected)
            if is_dropped:
                assert torch.allclose(as_read_low, torch.tensor(-pixels.mean[channel] / pixels.std[channel]), atol=1e-5)
    assert 0.4 < dropped / (20 * channels) < 0.75


@pytest.mark.parametrize("kind", TYPES)
def test_noise_is_normal_and_a_share_of_each_channels_range(kind: str) -> None:
    pixels = pixels_of(4, kind)
    low, high = map(np.array, pixels.batch_range())
    middle = ((low + high) / 2).astype(pixels.batch_type)
    image = np.broadcast_to(middle, (64, 64, 4))
    for sample in range(6):
        found = image.copy()
        distort(found, AugmentConfig(noise=0.05), 3, 2, sample, pixels)
        std = 0.05 * drawn("noise", sample, 0) * (high - low)
        added = (found.astype(np.float64) - image) / std
        room = 0.05 if std.min() > 2 or kind == "float32" else 0.5 / std.min()
        assert np.abs(added.std((0, 1)) - 1).max() < room + 0.03
        assert np.abs(added.mean((0, 1))).max() < 0.08
        if kind != "uint8":
            assert 0.67 < (np.abs(added) < 1).mean() < 0.695
        again = image.copy()
        distort(again, AugmentConfig(noise=0.05), 3, 2, sample, pixels)
        assert np.array_equal(found, again)


@pytest.mark.parametrize("kind", TYPES)
def test_erasing_of_any_image(kind: str) -> None:
    pixels = pixels_of(5, kind)
    low, high = map(np.array, pixels.batch_range())
    for sample in range(8):
        image = noise("share" if kind == "float32" else kind, 32, 32, 5)
        found = image.copy()
        distort(found, AugmentConfig(erase=1.0), 3, 2, sample, pixels)
        changed = (found != image).any(2)
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        box = found[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert ((box >= low - 1) & (box <= high + 1)).mean() > 0.95
        assert ((box - low) / (high - low)).mean() == pytest.approx(0.5, abs=0.12)


@pytest.mark.parametrize(
    "name", ["color_jitter", "saturation", "hue", "three_augment", "grey", "solarise", "randaugment_layers"]
)
def test_augmentations_of_colours_are_refused_by_name_for_other_images(name: str) -> None:
    config = AugmentConfig(**{name: 1 if name == "randaugment_layers" else 0.1})
    config.check_views(ImageSize(8, 8), RGB8)
    for pixels in (pixels_of(3, "uint8"), Pixels.full_range(RGB8.channels, "uint16"), pixels_of(1, "float32")):
        with pytest.raises(UserError, match=f"augment.{name}"):
            train_views((Views(1, 8, config),), 0, pixels=pixels)


# ---------------------------------------------------------------------- pictures
def test_pictures_show_named_or_first_channels_by_the_range() -> None:
    for kind in TYPES:
        image = noise("share" if kind == "float32" else kind, 2, 5, 6, 4)
        for names, shown in ((("nir", "blue", "red", "green"), [2, 3, 1]), (("a", "b", "c", "d"), [0, 1, 2])):
            pixels = Pixels(
                names, kind, *[getattr(pixels_of(4, kind), name) for name in ("low", "high", "mean", "std")]
            )  # type: ignore[arg-type]
            low, high = (np.array(ends)[shown] for ends in pixels.batch_range())
            share = ((image[..., shown].astype(np.float64) - low) / (high - low)).clip(0, 1)
            bright = replace(pixels, mean=(0.6,) * 4)
            assert np.abs(to_rgb(image, bright) - 255 * share).max() <= 0.5 + 1e-6
            # The recorded mean, which is darker than 0.4, is shown as that.
            pixels, expected = replace(pixels, mean=(0.1,) * 4), 255 * share ** (np.log(0.4) / np.log(0.1))
            found = to_rgb(image, pixels)
            assert found.dtype == np.uint8
            assert np.abs(found - expected).max() <= 0.5 + 1e-6
