"""The parts of VTAB's preparation: TFRecords, label rules, converted images, the table of tasks, the rule of the
splits.
"""

import io

import numpy as np
import pytest
import scipy.ndimage
import simplejpeg
from PIL import Image
from raw_images import encoded, noise
from vtab_originals import tfrecord, turned

from data_tools.vtab.datasets import DATASETS
from data_tools.vtab.readers import convert, labels
from data_tools.vtab.readers.tfrecords import crc32c, records
from data_tools.vtab.split import choose, hashed_order
from pipeline.base.errors import UserError
from pipeline.data.loading.decode import DecodeError, decode
from pipeline.experiment.vtab_tasks import GROUPS, TASKS


def numbered(**counts: int) -> dict[str, list[str]]:
    return {pool: [str(number) for number in range(count)] for pool, count in counts.items()}


def test_golden_splits() -> None:
    """protocol E2: published ids of prepared copies of CIFAR and SUN397 lead to these."""
    order = hashed_order("train", numbered(train=50_000)["train"])
    assert order[:5].tolist() == [16399, 1680, 47917, 17307, 27051]
    assert hashed_order("test", numbered(test=10_000)["test"])[0] == 9933
    chosen = choose(DATASETS["cifar100"], numbered(train=50_000, test=10_000))
    train, val = chosen["train800"]["train"].tolist(), chosen["val200"]["train"].tolist()
    assert (train[:3], train[-1], len(train)) == ([16399, 1680, 47917], 45288, 800)
    assert (val[0], len(val)) == (13431, 200)
    assert chosen["train800val200"]["train"].tolist() == train + val
    assert sorted(chosen["test"]["test"].tolist()) == list(range(10_000))
    sun = [
        "/r/rope_bridge/sun_biqflnsoednmhvce.jpg",
        "/t/tower/sun_avxiyhlcnzjayhrk.jpg",
        "/b/bedroom/sun_aakynfpfyupnkxtn.jpg",
        "/t/track/outdoor/sun_aophkoiosslinihb.jpg",
    ]
    assert hashed_order("train", sun[::-1]).tolist() == [3, 2, 1, 0]


def test_too_few_samples_and_keys_twice_are_refused() -> None:
    with pytest.raises(UserError, match="svhn: 900 samples of 'train'"):
        choose(DATASETS["svhn"], numbered(train=900, test=1))
    with pytest.raises(UserError, match="svhn: 2 samples of 'test', 1 of them"):
        choose(DATASETS["svhn"], {**numbered(train=9000), "test": ["0", "0"]})
    with pytest.raises(UserError, match="svhn: 0 samples of 'test'"):
        choose(DATASETS["svhn"], numbered(train=9000))


def test_the_table_of_tasks() -> None:
    assert [sum(task.group == group for task in TASKS) for group in GROUPS] == [7, 4, 8]
    assert len({task.name for task in TASKS}) == len({task.title for task in TASKS}) == 19
    assert {task.dataset for task in TASKS} == DATASETS.keys()
    for task in TASKS:
        test = DATASETS[task.dataset].test
        size = DATASETS[task.dataset].counts[test.pool]
        assert task.num_test == size - test.percent * size // 100


@pytest.mark.parametrize(
    ("depth", "label"),
    [(7.9, 0), (8.0, 0), (8.000001, 1), (8.5, 1), (9.0, 2), (9.2, 3), (9.5, 3), (10.0, 4), (10.1, 5), (42.0, 5)],
)
def test_bins_of_clevr(depth: float, label: int) -> None:
    assert labels.clevr_distance([depth, 99.0, depth + 1]) == label


@pytest.mark.parametrize(("nearest", "label"), [(-3.0, 0), (8.0, 0), (8.01, 1), (20.0, 1), (20.01, 2), (900.0, 2)])
def test_bins_of_kitti(nearest: float, label: int) -> None:
    assert labels.kitti_distance([nearest + 5, nearest]) == label
    assert labels.kitti_distance([]) == 3


def test_bins_of_dsprites() -> None:
    assert np.bincount(labels.dsprites_orientation(np.arange(40))).tolist() == [3, 2] * 8
    assert np.bincount(labels.dsprites_location(np.arange(32))).tolist() == [2] * 16


def test_crc32c() -> None:
    # RFC 3720, B.4; and the common check value.
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    # As the tests' own writer of TFRecords computes it.
    data = np.random.default_rng(0).bytes(70_000)
    for length in (0, 1, 5, 1023, 1024, 1025, 65_537, 70_000):
        (found,) = [content for _, content in records(io.BytesIO(tfrecord([data[:length]])), 0, length + 16, "x")]
        assert found == data[:length]


def test_a_retinopathy_image_is_what_the_protocol_says() -> None:
    """Against its formulas on floats, before JPEG: scaled to radius 300, 4 (image - average) + 128, a disc of 270."""
    height, width, radius = 700, 900, 320
    y, x = np.mgrid[:height, :width]
    inside = (y - height // 2) ** 2 + (x - width // 2) ** 2 < radius**2
    texture = scipy.ndimage.gaussian_filter(np.random.default_rng(0).normal(0, 1, (height, width, 3)), (6, 6, 0)) * 150
    pixels = (np.clip(texture + np.array([150, 90, 60]), 20, 230) * inside[..., None]).astype(np.uint8)
    found = decode(convert.retinopathy(simplejpeg.encode_jpeg(pixels, 100, colorsubsampling="444")))
    assert found.shape == (540, 540, 3)
    scale = 300 / ((pixels[height // 2].sum(axis=1) > 0).sum() / 2)
    small = scipy.ndimage.zoom(pixels.astype(float), (scale, scale, 1), order=1, grid_mode=True, mode="nearest")
    average = scipy.ndimage.gaussian_filter(small, (10, 10, 0), mode="mirror")
    expected = np.clip(4 * (small - average) + 128, 0, 255)
    top, left = small.shape[0] // 2 - 270, small.shape[1] // 2 - 270
    expected = expected[top : top + 540, left : left + 540]
    v, u = np.mgrid[:540, :540] - 270
    disc = v**2 + u**2 < 265**2
    # Blocks of 16 pixels that the disc's edge is not in are gray.
    assert np.abs(found[v**2 + u**2 > 296**2].astype(float) - 128).max() <= 1
    # Resampling by a pixel's fraction and JPEG at quality 72 remain.
    error = np.abs(found.astype(float) - expected)[disc]
    assert np.median(error) < 6
    assert np.corrcoef(found[disc].ravel(), expected[disc].ravel())[0, 1] > 0.97


def test_a_retinopathy_image_whose_eye_is_not_found() -> None:
    black = simplejpeg.encode_jpeg(np.zeros((100, 100, 3), np.uint8))
    assert decode(convert.retinopathy(black)).shape == (540, 540, 3)
    with pytest.raises(DecodeError):
        convert.retinopathy(b"\xff\xd8\xffno image")


def test_an_image_is_read_as_it_is_stored() -> None:
    """TensorFlow's decoder ignores EXIF (tensorflow#33932), so VTAB's images are not turned; our decoder turns them."""
    image = noise(2, width=40, height=24)
    plain = encoded(image, "JPEG")
    assert decode(turned(plain)).shape == (40, 24, 3)
    assert np.array_equal(decode(convert.as_stored(turned(plain))), decode(plain))
    for data in (plain, encoded(image, "PNG"), encoded(image, "JPEG", exif=Image.Exif().tobytes())):
        assert convert.as_stored(data) is data


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP"])
def test_a_sun397_image_is_small_and_a_jpeg(format: str) -> None:
    image = noise(3, width=600, height=400).resize((60, 40)).resize((600, 400))
    data = convert.sun397(encoded(image, format))
    assert Image.open(io.BytesIO(data)).format == "JPEG"
    # The factor is the square root of 120,000 / (600 x 400).
    assert decode(data).shape == (283, 424, 3)
    expected = np.asarray(Image.open(io.BytesIO(encoded(image, format))).convert("RGB").resize((424, 283)), float)
    assert np.abs(decode(data)[..., :: -1 if format == "GIF" else 1] - expected).mean() < 8
    small = encoded(noise(4, width=300, height=400), format)
    assert decode(convert.sun397(small)).shape == (400, 300, 3)
