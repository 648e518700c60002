"""Data sets of images that are not three 8-bit colours: what is one sample, what its values mean, and what is left
out.
"""

import io
import os
import signal
import tarfile
from dataclasses import replace
from pathlib import Path

import imagecodecs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
from PIL import Image
from raw_images import encoded, jpeg, noise, settings, write_folder

from data_tools.check import stats
from data_tools.sharding import index, shard
from data_tools.sharding.values import (
    FOLDER,
    as_counts,
    count_values,
    counted_values,
    is_value,
    total_of,
    value_jobs,
    with_values,
)
from data_tools.sources import Reader, list_source
from pipeline.architecture.pixels import FULL_RANGE, RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.data.dataset.exclusion import write_list
from pipeline.data.dataset.manifest import Dataset, open_dataset, record_pixels
from pipeline.data.loading.decode import decode
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.settings.commands.data import IndexConfig, ShardConfig, StatsConfig
from pipeline.settings.schema import build

Arrays = dict[str, np.ndarray]


def tiff(array: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    layout = {"planarconfig": "contig"} if array.ndim == 3 and array.shape[2] < array.shape[1] else {}
    tifffile.imwrite(file, array, **{"photometric": "minisblack", **layout, **options})
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def arrays(kind: str, channels: int, count: int = 12, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    scale = 4095 if np.dtype(kind).kind == "u" else 1000
    return {
        f"{('cat', 'dog')[i % 2]}/{i:02}": (rng.gamma(2, scale / 20, (18, 22, channels))).astype(kind)
        for i in range(count)
    }


def stored(dataset: Dataset, split: str = "train") -> Arrays:
    """Key -> values of each image of a data set, by its own tars."""
    opened = dataset.split(split)
    reader = ShardReader(opened)
    keys = opened.keys(range(len(opened)))
    return {key: decode(reader.read(row), pixels=dataset.pixels) for row, key in enumerate(keys)}


def check(dataset: Dataset, written: Arrays) -> None:
    found = stored(dataset)
    assert found.keys() == written.keys()
    for key, values in written.items():
        assert found[key].dtype == values.dtype
        assert np.array_equal(found[key], values)


@pytest.mark.parametrize(
    ("kind", "channels"), [("uint16", 1), ("uint16", 4), ("int16", 1), ("float32", 2), ("uint8", 5)]
)
def test_every_value_arrives(kind: str, channels: int, ray_cluster: int, tmp_path: Path) -> None:
    written = arrays(kind, channels)
    array_of = {key: values if channels > 1 else values[..., 0] for key, values in written.items()}
    source = write_folder(
        {f"{key}.tif": tiff(array, compression="zstd") for key, array in array_of.items()}, tmp_path / "raw"
    )
    dataset = shard.run(settings(source, tmp_path / "out"))
    assert (dataset.pixels.type, dataset.pixels.num_channels) == (kind, channels)
    check(dataset, written)
    again = shard.run(settings(source, tmp_path / "out"))
    assert again.info == dataset.info


def test_images_of_several_types_are_read_as_one_that_holds_all(ray_cluster: int, tmp_path: Path) -> None:
    written = arrays("uint16", 1) | {f"bird/{key[4:]}": values - 500 for key, values in arrays("int16", 1).items()}
    source = write_folder({f"{key}.npy": npy(values) for key, values in written.items()}, tmp_path / "raw")
    dataset = shard.run(settings(source, tmp_path / "out"))
    assert dataset.pixels.type == "int32"
    check(dataset, {key: values.astype(np.int32) for key, values in written.items()})
    few = dict(list(written.items())[:15])  # 12 of 15 are uint16, the others negative.
    source = write_folder({f"{key}.npy": npy(values) for key, values in few.items()}, tmp_path / "few")
    dataset = shard.run(settings(source, tmp_path / "most", max_bad_share=0.2))
    assert dataset.pixels.type == "uint16"
    check(dataset, arrays("uint16", 1))


def test_the_range_is_that_of_the_training_split(ray_cluster: int, tmp_path: Path) -> None:
    written = arrays("uint16", 3)
    source = write_folder(
        {f"{key}.png": imagecodecs.png_encode(values) for key, values in written.items()}, tmp_path / "raw"
    )
    dataset = shard.run(settings(source, tmp_path / "out", val_share=0.3, samples_per_shard=4))
    of_training = np.concatenate([values.reshape(-1, 3) for values in stored(dataset).values()])
    assert len(of_training) < len(written) * 18 * 22
    pixels = dataset.pixels
    for channel in range(3):
        values = of_training[:, channel]
        low, high = np.quantile(values, [0.001, 0.999], method="inverted_cdf")
        assert (pixels.low[channel], pixels.high[channel]) == (low, high)
        scaled = (np.clip(values.astype(float), pixels.low[channel], pixels.high[channel]) - pixels.low[channel]) / (
            pixels.high[channel] - pixels.low[channel]
        )
        assert pixels.mean[channel] == pytest.approx(scaled.mean(), abs=1e-9)
        assert pixels.std[channel] == pytest.approx(scaled.std(), abs=1e-9)
    full = stats.run(StatsConfig(data=str(dataset.path), values=["full"], sheet=0))
    reopened = open_dataset(dataset.path)
    assert reopened.pixels.high == (65535.0,) * 3
    assert full["fingerprint"] == reopened.fingerprint != dataset.fingerprint
    stats.run(StatsConfig(data=str(dataset.path), values=["0", "4095"], sheet=0))
    assert open_dataset(dataset.path).pixels.high == (4095.0,) * 3


def test_a_killed_measurement_goes_on_and_gives_the_same_numbers(ray_cluster: int, tmp_path: Path, capfd) -> None:
    written = arrays("uint16", 2, 25)
    source = write_folder({f"{key}.npy": npy(values) for key, values in written.items()}, tmp_path / "raw")
    whole = shard.run(settings(source, tmp_path / "out", samples_per_shard=2, values_images=0))
    out = whole.path
    everything = np.stack(list(written.values())).reshape(-1, 2)
    low, high = np.quantile(everything, [0.001, 0.999], axis=0, method="inverted_cdf")
    assert whole.pixels.low + whole.pixels.high == (*low, *high)
    assert not (out / FOLDER).exists()
    record_pixels(whole, replace(whole.pixels, low=(), high=(), mean=(), std=()))
    (out / FOLDER).mkdir()
    if not (process := os.fork()):
        for job in value_jobs(open_dataset(out), "train", 0, out / FOLDER)[:5]:
            count_values(job)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    parts = sorted((out / FOLDER).glob("*.part"))
    assert len(parts) == 5
    parts[0].write_bytes(parts[0].read_bytes()[:-100])  # As after a failure of the disk.
    capfd.readouterr()
    again = {"data": str(out), "values": ["percentiles"], "values_images": 0, "sheet": 0}
    for num_tasks in (2, 1):
        stats.run(StatsConfig(**again, num_tasks=num_tasks))
        assert open_dataset(out).info == whole.info
        assert not (out / FOLDER).exists()
        assert ("4 shards of 13" in capfd.readouterr().out) == (num_tasks == 2)
    key = whole.table("train").keys([0])
    write_list(whole, "dark", pa.table({"split": ["train"], "row": [0], "key": key, "reason": ["dark"]}))
    stats.run(StatsConfig(**again))
    assert open_dataset(out).fingerprint != whole.fingerprint
    assert open_dataset(out).split("train").excluded_by == {"dark": 1}
    stats.run(StatsConfig(**{**again, "values_images": 7}))
    said = capfd.readouterr().out
    assert "24 of 25 images" in said
    assert "7 of 25 images" in said


def test_values_that_were_not_measured_are_refused_in_training(ray_cluster: int, tmp_path: Path) -> None:
    source = write_folder({f"{key}.npy": npy(values) for key, values in arrays("float32", 1).items()}, tmp_path / "raw")
    for values in (["full"], ["0", "1", "0", "1"]):
        with pytest.raises(UserError, match="values"):
            shard.run(settings(source, tmp_path / "out", values=values))
        assert not (tmp_path / "out/train-000000.tar").exists()
    dataset = shard.run(settings(source, tmp_path / "out"))
    record_pixels(dataset, replace(dataset.pixels, low=(), high=(), mean=(), std=()))
    with pytest.raises(UserError, match=r"stats\.py"):
        open_dataset(tmp_path / "out").split("train")
    stats.run(StatsConfig(data=str(tmp_path / "out"), values=["percentiles"], sheet=0))
    assert len(open_dataset(tmp_path / "out").split("train")) == 12


@pytest.mark.parametrize(
    "kind", ["bool", "int8", "uint16", "int16", "int32", "uint32", "int64", "float16", "float32", "float64"]
)
def test_counts_are_numpys(kind: str) -> None:
    """Exactly where integers are below 2^21 and floats have 16 bits, else of values within 1/8192."""
    rng = np.random.default_rng(0)
    images = [rng.normal(0, 10.0 ** (n % 5), (40, 30)) for n in range(9)]
    images = [(np.abs(image) if kind[0] == "u" else image).astype(kind) for image in images]
    for image in images if np.dtype(kind).kind == "f" else ():
        image[0, :4] = np.finfo(kind).max, np.finfo(kind).min, 0.0, -0.0
    counts = [as_counts(channel, *counted_values(image.ravel())) for channel in (0, 1) for image in images]
    values = np.stack(images).astype(float)
    found, of_each = total_of(counts, 1)
    if kind in ("float32", "float64"):
        spread = np.repeat(found, of_each)
        np.testing.assert_allclose(spread, np.sort(values.ravel()), rtol=1 / 8192)
        assert np.isfinite(found).all()
    else:
        expected = np.unique(values, return_counts=True)
        assert np.array_equal(found, expected[0])
        assert np.array_equal(of_each, expected[1])
        low, high = np.quantile(values, [0.001, 0.999], method="inverted_cdf")
        pixels = with_values(Pixels(("x",), kind, (), (), (), ()), ["percentiles"], [(found, of_each)])
        assert pixels.low + pixels.high == (low, max(high, low + 1))


def test_missing_values_are_counted_and_no_part_of_the_range(ray_cluster: int, tmp_path: Path, capfd) -> None:
    written = arrays("float32", 1)
    for values in written.values():
        values[:3] = np.nan
    infinite = {"cat/inf.npy": npy(np.full((5, 5), np.inf, np.float32))}
    source = write_folder({f"{key}.npy": npy(values) for key, values in written.items()} | infinite, tmp_path / "raw")
    dataset = shard.run(settings(source, tmp_path / "out"))
    assert stored(dataset).keys() == written.keys()  # Without the infinite one, which is a bad image.
    files = {
        f"{key}-{channel}.npy": data
        for key in ("a", "b", "inf")
        for channel in (1, 2)
        for data in [npy(written["cat/00"])]
    }
    source = write_folder(files | {"inf-2.npy": npy(np.full((18, 22), np.inf, np.float32))}, tmp_path / "files")
    joining = {"layout": "images", "channel_pattern": "(?P<sample>.*)-(?P<channel>.)"}
    assert stored(shard.run(settings(source, tmp_path / "joined", **joining))).keys() == {"a", "b"}
    assert f"{12 * 3 * 22:,} missing" in capfd.readouterr().out
    assert np.isfinite([*dataset.pixels.low, *dataset.pixels.high, *dataset.pixels.mean]).all()
    elevation = {
        key: np.where(values > 300, 32767, values).astype(np.int16) for key, values in arrays("float32", 1).items()
    }
    nodata = [(42113, "s", 0, "32767", True)]
    tiffs = {f"{key}.tif": tiff(values[..., 0], extratags=nodata) for key, values in elevation.items()}
    tiffs["cat/bare"] = tiff(elevation["cat/00"][..., 0])  # Not every file says it.
    dataset = shard.run(
        settings(
            write_folder({f"{k.removesuffix('.tif')}.tif": v for k, v in tiffs.items()}, tmp_path / "dem"),
            tmp_path / "dems",
        )
    )
    assert dataset.pixels.nodata == 32767
    assert max(dataset.pixels.high) <= 300


@pytest.mark.parametrize("kind", ["uint16", "float32", "float64"])
def test_the_usual_values_of_missing_pixels_are_settings(kind: str) -> None:
    lowest = float(np.finfo(kind if kind != "uint16" else "float32").min)
    data = {"source": "raw", "out": "out", "nodata": repr(lowest)}
    assert build(ShardConfig, data, "settings").nodata == lowest
    image = np.array([[[55537], [lowest if kind != "uint16" else 0]]], kind)
    gray = Pixels(("gray",), kind, (), (), (), (), lowest)
    assert is_value(image, gray).sum() == (2 if kind == "uint16" else 1)
    assert is_value(image, replace(gray, nodata=-9999.0)).all()  # Which would wrap to 55537 as uint16.


def test_one_file_for_each_channel(ray_cluster: int, tmp_path: Path, capfd) -> None:
    written = arrays("uint16", 3)
    files = {
        f"{key}-ch{channel}.tiff": tiff(values[..., channel]) for key, values in written.items() for channel in range(3)
    }
    source = write_folder(files, tmp_path / "raw")
    assert sum(shard.run(settings(source, tmp_path / "separate")).info["samples"].values()) == 36
    said = capfd.readouterr().out
    pattern = said.partition("channel_pattern='")[2].partition("'")[0]
    assert "12 samples of 3 channels" in said
    dataset = shard.run(settings(source, tmp_path / "out", channel_pattern=pattern))
    assert dataset.pixels.channels == ("0", "1", "2")
    check(dataset, written)
    capfd.readouterr()
    check(
        shard.run(settings(source, tmp_path / "two", channel_pattern=pattern, channels=["2", "0"])),
        {key: values[..., [2, 0]] for key, values in written.items()},
    )
    assert "12 files of other channels" in capfd.readouterr().out
    for name in ("cat/00-ch1.tiff", "cat/02-ch1.tiff"):
        (source / name).unlink()
    with pytest.raises(UserError, match="no file for channel 1"):
        shard.run(settings(source, tmp_path / "budget", channel_pattern=pattern))
    dataset = shard.run(settings(source, tmp_path / "lacking", channel_pattern=pattern, max_bad_share=0.2))
    check(dataset, {key: values for key, values in written.items() if key not in ("cat/00", "cat/02")})
    with pytest.raises(UserError, match="does not match"):
        shard.run(settings(source, tmp_path / "wrong", channel_pattern="(?P<sample>.*)_(?P<channel>.)"))
    for file in (source / "dog").glob("*-ch0.tiff"):  # A plate without this channel.
        file.unlink()
    capfd.readouterr()
    shard.run(settings(source, tmp_path / "plates"))
    assert "12 samples of 3 channels" in capfd.readouterr().out


@pytest.mark.parametrize("kind", [*FULL_RANGE, "float16", "float32", "float64"])
def test_arrays_in_parquet(kind: str, tmp_path: Path) -> None:
    low, high = FULL_RANGE.get(kind, (-1000, 1000))
    values = [low, high, *range(52)] if kind != "bool" else [i % 2 for i in range(54)]
    images = np.array(values, kind).reshape(3, 3, 6, 1).repeat(5, 3)  # Three images of (3, 6, 5).
    if kind.startswith("float"):
        images[0, 0, 0, :2] = np.nan, 1 / 3
    value = pa.from_numpy_dtype(kind)
    columns = {
        "lists": pa.list_(pa.list_(pa.list_(value))),  # As Hugging Face's Array3D.
        "sizes": pa.list_(pa.large_list(pa.list_(value, 5)), 3),
    }
    for name, type_ in columns.items():
        source = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"image": pa.array(images.tolist(), type_)}), source)
        listing = list_source(source, settings(source, tmp_path / "out"), tmp_path / "staging")
        with Reader() as reader:
            for array, image in zip(images, listing.images(np.arange(3)), strict=True):
                found = np.load(io.BytesIO(reader.read(*image.files[0])))
                assert found.dtype == kind
                assert np.array_equal(found, array, equal_nan=found.dtype.kind == "f"), name


def test_a_data_set_of_arrays_in_parquet(ray_cluster: int, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 4096, (12, 9, 8)).astype(np.uint16)
    rows = [*images.tolist(), None, [[1, 2], [3]], [[1, None], [3, 4]]]
    table = pa.table({"image": pa.array(rows, pa.list_(pa.list_(pa.uint16()))), "label": [i % 2 for i in range(15)]})
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(UserError, match="max_bad_share"):
        shard.run(settings(tmp_path / "train.parquet", tmp_path / "out"))
    dataset = shard.run(settings(tmp_path / "train.parquet", tmp_path / "out2", max_bad_share=0.3))
    check(dataset, {f"train/{row:06}": image[..., None] for row, image in enumerate(images)})
    pq.write_table(pa.table({"image": list(images.reshape(12, -1))}), tmp_path / "flat.parquet")
    with pytest.raises(UserError, match="'image'"):
        shard.run(settings(tmp_path / "flat.parquet", tmp_path / "no"))


@pytest.mark.parametrize(
    ("kind", "named"), [("uint16", "012"), ("float32", "012"), ("uint8", ["red", "green", "blue"])]
)
def test_a_missing_channel_is_its_mean_of_the_others(
    kind: str, named: list[str], ray_cluster: int, tmp_path: Path, capfd
) -> None:
    """Seeded. All is known from the files alone: an index of the tars finds the same."""
    written = {key: (values / 20).astype(kind) for key, values in arrays(kind, 3).items()}
    has = {key: np.random.default_rng(number).permutation(3) > number % 3 - 1 for number, key in enumerate(written)}
    files = {
        f"{key}-{name}.tiff": tiff(values[..., place])
        for key, values in written.items()
        for place, name in enumerate(named)
        if has[key][place]
    }
    joining = {"channel_pattern": "(?P<sample>.*)-(?P<channel>.*)", "channels": list(named)}
    source, num_lacking = write_folder(files, tmp_path / "raw"), sum(not any_of.all() for any_of in has.values())
    dataset = shard.run(settings(source, tmp_path / "out", missing_channels="mean", **joining))
    said, found, pixels = capfd.readouterr().out, stored(dataset), dataset.pixels
    assert num_lacking == 8
    assert f"{num_lacking} images with fewer channels" in said
    assert found.keys() == written.keys()
    for place in range(3):
        there = np.concatenate([values[..., place].ravel() for key, values in written.items() if has[key][place]])
        low, high = pixels.low[place], pixels.high[place]
        scaled = (there.clip(low, high).astype(np.float64) - low) / (high - low)
        assert pixels.mean[place] == pytest.approx(scaled.mean(), abs=1e-9 if kind != "float32" else 1e-3)
        assert pixels.std[place] == pytest.approx(scaled.std(), abs=1e-9 if kind != "float32" else 1e-3)
        mean = np.float64(low + pixels.mean[place] * (high - low))
        for key, values in written.items():
            filled = (mean if kind == "float32" else np.rint(mean)).astype(kind)
            assert np.array_equal(
                found[key][..., place], values[..., place] if has[key][place] else np.full((18, 22), filled)
            )
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        for member in (member for member in tar if member.name.endswith("tiff")):
            plain = tifffile.imread(io.BytesIO(tar.extractfile(member).read()))
            key = member.name.removesuffix(".tiff")
            assert np.array_equal(plain, written[key][..., has[key]].squeeze(2 if has[key].sum() == 1 else ()))
    for path in (tmp_path / "out").glob("*.tar"):
        (tmp_path / "tars").mkdir(exist_ok=True)
        (tmp_path / "tars" / path.name).write_bytes(path.read_bytes())
    indexed = index.run(IndexConfig(source=str(tmp_path / "tars")))
    assert f"{num_lacking} images with fewer channels" in capfd.readouterr().out
    assert indexed.pixels == pixels
    complete = shard.run(settings(source, tmp_path / "skipped", max_bad_share=0.9, **joining))
    check(complete, {key: values for key, values in written.items() if has[key].all()})


def test_pages_are_refused_until_a_setting_says_what_they_are(ray_cluster: int, tmp_path: Path, capfd) -> None:
    written = arrays("uint16", 3)
    pages = {f"{key}.tif": tiff(np.moveaxis(values, 2, 0)) for key, values in written.items()}
    source = write_folder(pages, tmp_path / "raw")
    with pytest.raises(UserError, match="pages=channels"):
        shard.run(settings(source, tmp_path / "unsaid"))
    check(shard.run(settings(source, tmp_path / "channels", pages="channels")), written)
    capfd.readouterr()
    first = shard.run(settings(source, tmp_path / "first", pages="first"))
    check(first, {key: values[..., :1] for key, values in written.items()})
    shard.run(settings(source, tmp_path / "reduced", to_rgb8=True))
    assert capfd.readouterr().out.count("12 images with pages") == 2
    (source / "dog" / "rgb.tif").write_bytes(tiff(np.zeros((2, 9, 9, 3), np.uint16), photometric="rgb"))
    each = shard.run(settings(source, tmp_path / "each", pages="samples", val_share=0.4, max_bad_share=0.1))
    assert "with pages" not in capfd.readouterr().out
    both = stored(each) | stored(each, "val")
    expected = {f"{key}@{page}": values[..., page : page + 1] for key, values in written.items() for page in range(3)}
    assert both.keys() == expected.keys()
    assert all(np.array_equal(both[key], values) for key, values in expected.items())
    # A file is a group: all of its pages are in one split.
    assert not {key.partition("@")[0] for key in stored(each)} & {key.partition("@")[0] for key in stored(each, "val")}


def test_a_file_says_that_its_pages_are_channels(ray_cluster: int, tmp_path: Path) -> None:
    written = arrays("uint16", 2)
    ome = {
        f"{key}.ome.tif": tiff(np.moveaxis(values, 2, 0), metadata={"axes": "CYX"}, ome=True)
        for key, values in written.items()
    }
    dataset = shard.run(settings(write_folder(ome, tmp_path / "raw"), tmp_path / "out", channels=["dapi", "actin"]))
    assert dataset.pixels.channels == ("dapi", "actin")
    check(dataset, {f"{key}_ome": values for key, values in written.items()})


def test_to_rgb8_takes_the_channels_that_are_named_red_green_and_blue(ray_cluster: int, tmp_path: Path, capfd) -> None:
    written = arrays("uint16", 4)
    named, rgb = ["blue", "green", "nir", "red"], [3, 1, 0]

    def reduced(values: np.ndarray, places: list[int]) -> np.ndarray:
        return np.rint(values[..., places] / 257).astype(np.uint8)

    bands = write_folder({f"{key}.tif": tiff(values) for key, values in written.items()}, tmp_path / "bands")
    check(
        shard.run(settings(bands, tmp_path / "first", to_rgb8=True)),
        {key: reduced(values, [0, 1, 2]) for key, values in written.items()},
    )
    by_name = shard.run(settings(bands, tmp_path / "named", to_rgb8=True, channels=named))
    check(by_name, {key: reduced(values, rgb) for key, values in written.items()})
    files = write_folder(
        {f"{key}-{name}.tif": tiff(values[..., n]) for key, values in written.items() for n, name in enumerate(named)},
        tmp_path / "files",
    )
    joining = {"channel_pattern": "(?P<sample>.*)-(?P<channel>.*)", "to_rgb8": True}
    joined = shard.run(settings(files, tmp_path / "joined", **joining))
    assert joined.left_out == {"bits": 12}
    check(joined, {key: reduced(values, rgb) for key, values in written.items()})
    one = shard.run(settings(files, tmp_path / "one", **joining, channels=["nir"]))
    check(one, {key: reduced(values, [2, 2, 2]) for key, values in written.items()})
    with pytest.raises(UserError, match="missing_channels"):
        settings(files, tmp_path / "no", missing_channels="mean", **joining)


def test_photographs_stay_8_bit_rgb_and_others_among_them_are_bad(ray_cluster: int, tmp_path: Path, capfd) -> None:
    photographs = {f"cat/{i}.jpg": jpeg(i) for i in range(20)}
    png = imagecodecs.png_encode(np.full((9, 9), 40_000, np.uint16))
    deep = {"dog/deep.png": png, "dog/deep2.png": png, "dog/1.jpg": jpeg(99)}
    source = write_folder({**photographs, **deep}, tmp_path / "raw")
    with pytest.raises(UserError, match="uint16"):
        shard.run(settings(source, tmp_path / "out"))
    dataset = shard.run(settings(source, tmp_path / "out2", max_bad_share=0.1))
    assert dataset.pixels == RGB8
    assert "pixels" not in dataset.info
    assert len(stored(dataset)) == 21
    (source / "cat/gray.jpg").write_bytes(encoded(noise(1, mode="L"), "JPEG"))
    ranged = shard.run(settings(source, tmp_path / "ranged", max_bad_share=0.1, values=["10", "200"]))
    assert (ranged.pixels.low, ranged.pixels.high, ranged.pixels.is_rgb8) == ((10.0,) * 3, (200.0,) * 3, True)
    capfd.readouterr()
    reduced = shard.run(settings(source, tmp_path / "reduced", to_rgb8=True))
    assert reduced.left_out == {"bits": 2}
    assert np.array_equal(stored(reduced)["dog/deep"], np.full((9, 9, 3), round(40_000 / 257), np.uint8))
    half = {f"dog/{i}.tif": tiff(np.zeros((9, 9, 4), np.uint16)) for i in range(15)}
    with pytest.raises(UserError, match="to_rgb8"):
        shard.run(settings(write_folder({**photographs, **half}, tmp_path / "mixed"), tmp_path / "no"))
    alpha = {f"cat/{i}.png": encoded(Image.fromarray(np.full((8, 8, 4), i, np.uint8)), "PNG") for i in range(3)}
    capfd.readouterr()
    flat = shard.run(settings(write_folder(alpha, tmp_path / "alpha"), tmp_path / "flat"))
    report = stats.run(StatsConfig(data=str(flat.path), sheet=0))
    print(*flat.split("train").notes())
    assert capfd.readouterr().out.count("3 images with an alpha channel") == 3
    assert report["left_out"] == open_dataset(flat.path).left_out == {"alpha": 3}


def test_tars_of_others_are_indexed_in_place(ray_cluster: int, tmp_path: Path, capfd) -> None:
    # As many bands as are read, and alpha.
    written = {key.replace("/", "-"): values for key, values in arrays("uint16", 5).items()}
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars/a.tar", "w") as tar:
        for key, values in written.items():
            data = tiff(values, extrasamples=["unspecified"] * 3 + ["unassalpha"])
            member = tarfile.TarInfo(f"{key}.tif")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    config = IndexConfig(source=str(tmp_path / "tars"), channels=["blue", "green", "red", "nir"])
    dataset = index.run(config)
    assert dataset.pixels.channels == ("blue", "green", "red", "nir")
    assert dataset.pixels.is_measured
    assert "12 images with an alpha" in capfd.readouterr().out
    check(dataset, {key: values[..., :4] for key, values in written.items()})
    assert dataset.left_out == {"alpha": 12}


def test_gray_photographs_can_have_one_channel(ray_cluster: int, tmp_path: Path) -> None:
    gray = {f"cat/{i}.png": encoded(Image.fromarray(np.full((8, 9), 10 * i, np.uint8)), "PNG") for i in range(5)}
    dataset = shard.run(settings(write_folder(gray, tmp_path / "raw"), tmp_path / "out", channels=["x-ray"]))
    check(dataset, {f"cat/{i}": np.full((8, 9, 1), 10 * i, np.uint8) for i in range(5)})
    assert dataset.pixels.low == (0.0,)
    assert dataset.pixels.high == (255.0,)
