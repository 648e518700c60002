"""Images of every type, number of channels, layout, byte order and codec: each value that is read is the one that was
written.
"""

import ast
import io
import random
import struct
from dataclasses import replace
from itertools import product
from pathlib import Path

import imagecodecs
import numpy as np
import pydicom
import pytest
import tifffile
from PIL import Image
from pydicom import uid
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence

from pipeline.architecture.pixels import Pixels
from pipeline.data.images.formats import open_image
from pipeline.data.images.stored import DecodeError, describe_channels
from pipeline.data.loading.decode import decode

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "float32", "float64")


def values_of(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random values over the whole range of a type."""
    rng = np.random.default_rng(seed)
    if kind in FLOATS:
        return rng.normal(0, 1000, shape).astype(kind)
    limits = np.iinfo(kind)
    return rng.integers(limits.min, limits.max, shape, kind, endpoint=True)


def pixels_of(array: np.ndarray) -> Pixels:
    """A data set of such images."""
    count = array.shape[2]
    ones = (1.0,) * count
    return Pixels(tuple(f"c{n}" for n in range(count)), array.dtype.name, (0.0,) * count, ones, ones, ones)


def read(data: bytes, like: np.ndarray) -> np.ndarray:
    return decode(data, pixels=pixels_of(like))


def check(data: bytes, written: np.ndarray) -> None:
    found = read(data, written)
    assert found.dtype == written.dtype.newbyteorder("=")
    assert np.array_equal(found, written)


def tiff(array: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, array, **options)
    return file.getvalue()


CODECS = [None, "zlib", "zstd", "lzw", "packbits"]


@pytest.mark.parametrize("kind", [*INTEGERS, *FLOATS])
def test_tiff(kind: str) -> None:
    """Seeded: each type with every codec and a random choice of everything else."""
    draw = random.Random(kind)
    for number, (codec, channels) in enumerate(product(CODECS, (1, 2, 3, 4, 5, 13))):
        written = values_of(kind, (37, 21, channels), number)
        planar = channels > 1 and draw.random() < 0.4
        options = {
            "compression": codec,
            "predictor": codec in ("zlib", "zstd", "lzw") and kind[-2:] != "64" and draw.random() < 0.5,
            "byteorder": draw.choice("<>"),
            "bigtiff": draw.random() < 0.3,
            "photometric": "minisblack",
            "planarconfig": ("separate" if planar else "contig") if channels > 1 else None,
            **draw.choice([{}, {"tile": (16, 16)}, {"rowsperstrip": 5}]),
        }
        data = np.moveaxis(written, 2, 0) if planar else written if channels > 1 else written[..., 0]
        check(tiff(data, **options), written)


LOSSLESS_INSIDE = [
    ("jpeg2000", {"level": 0}, ("uint8", "uint16"), 3),
    ("jpegxl", {"lossless": True}, ("uint8", "uint16"), 3),
    ("lerc", {}, ("uint16", "int32", "float32", "float64"), 5),
]


@pytest.mark.parametrize(("codec", "options", "kinds", "most"), LOSSLESS_INSIDE)
def test_tiff_with_images_of_other_formats_inside(codec: str, options: dict, kinds: tuple[str, ...], most: int) -> None:
    for kind, channels in product(kinds, (1, most)):
        written = values_of(kind, (48, 64, channels))
        array, layout = (written, "contig") if channels > 1 else (written[..., 0], None)
        data = tiff(
            array,
            compression=codec,
            compressionargs=options,
            tile=(16, 32),
            photometric="minisblack",
            planarconfig=layout,
        )
        check(data, written)


@pytest.mark.parametrize("subsampling", [None, (1, 1), (2, 2)])
def test_tiff_with_jpeg_inside_is_what_libtiff_reads(subsampling: tuple[int, int] | None) -> None:
    written = np.add.outer(np.arange(48), np.arange(64)).astype(np.uint8)
    colours = {"photometric": "rgb", "subsampling": subsampling} if subsampling else {"photometric": "minisblack"}
    if subsampling:
        written = np.stack([written, 2 * written, 220 - written], axis=2)
    data = tiff(written, compression="jpeg", tile=(16, 16), **colours)
    found = open_image(data).page(0)[0].astype(int)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB" if subsampling else "L"))
    assert np.abs(found - expected.reshape(found.shape)).max() <= 1
    assert np.abs(found - written.reshape(found.shape)).mean() < 1


def test_tiff_of_12_bits_and_of_white_as_zero() -> None:
    written = values_of("uint16", (9, 16, 1)) >> 4
    number = int("".join(f"{value:012b}" for value in written.flat), 2)
    data = number.to_bytes(written.size * 12 // 8, "big")
    tags = {256: 16, 257: 9, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 9, 279: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    check(
        b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4), written
    )
    written = values_of("uint16", (9, 16, 1))
    check(tiff(65535 - written[..., 0], photometric="miniswhite"), written)
    check(tiff(written[..., 0] > 99, photometric="minisblack"), written > 99)  # Of one bit.


def test_pages_are_channels_only_where_there_are_as_many() -> None:
    written = values_of("uint16", (20, 30, 3))
    planes = np.moveaxis(written, 2, 0)
    for data in (
        tiff(planes, photometric="minisblack", metadata={"axes": "CYX"}, ome=True),
        tiff(planes, imagej=True),
        tiff(planes, photometric="minisblack"),
    ):
        assert open_image(data).pages == 3
        check(data, written)
        assert np.array_equal(read(data, written[..., :1]), written[..., :1])
        with pytest.raises(DecodeError, match="3 pages"):
            read(data, written[..., :2])
    assert open_image(tiff(planes, photometric="minisblack", metadata={"axes": "CYX"}, ome=True)).axes == "C"


def test_pages_in_rows_and_columns() -> None:
    written = values_of("uint16", (2, 3, 20, 30))
    stored = open_image(tiff(written, photometric="minisblack"))
    assert stored.pages == 6
    assert all(np.array_equal(stored.page(n)[0][..., 0], written.reshape(6, 20, 30)[n]) for n in range(6))


def test_a_pyramid_is_its_largest_level() -> None:
    written = values_of("uint16", (64, 96, 1))
    file = io.BytesIO()
    with tifffile.TiffWriter(file, bigtiff=True) as writer:
        writer.write(written[..., 0], subifds=2, tile=(32, 32), metadata=None)
        for step in (2, 4):
            writer.write(written[::step, ::step, 0], subfiletype=1, tile=(32, 32), metadata=None)
    check(file.getvalue(), written)
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        for step in (1, 2, 4):
            writer.write(written[::step, ::step, 0], subfiletype=int(step > 1), metadata=None)
    check(file.getvalue(), written)


def test_alpha_is_left_out_and_said_and_other_bands_are_not() -> None:
    for samples, extra in ((2, ["unassalpha"]), (4, ["assocalpha"]), (4, ["unspecified"])):
        written = values_of("uint16", (10, 12, samples))
        data = tiff(written, photometric="rgb" if samples == 4 else "minisblack", extrasamples=extra)
        stored = open_image(data)
        assert stored.alpha == (extra != ["unspecified"])
        check(data, written[..., : samples - stored.alpha])
    rgba = values_of("uint16", (10, 12, 4))
    stored = open_image(imagecodecs.png_encode(rgba))
    assert (stored.alpha, stored.channels) == (True, 3)
    check(imagecodecs.png_encode(rgba), rgba[..., :3].copy())


def test_a_channel_that_is_filled_is_not_missing() -> None:
    for nodata, mean, expected in ((None, 0.5, 0), (0.0, 0.5, 1), (127.0, 1.0, 126)):
        pixels = Pixels(("a",), "int8", (-127.0,), (127.0,), (mean,), (0.2,), nodata)
        assert pixels.fill(0) == expected


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_a_channel_that_an_image_lacks_is_the_mean_of_its_data_set(kind: str) -> None:
    names = ("red", "green", "blue")
    written, pixels = values_of(kind, (9, 7, 2)), replace(Pixels.full_range(names, kind), mean=(0.5, 0.2, 0.5))
    found = decode(
        tiff(written, photometric="minisblack", planarconfig="contig", description=describe_channels(names, [1])),
        pixels=pixels,
    )
    assert np.array_equal(found[..., [0, 2]], written)
    assert (found[..., 1] == round(0.2 * np.iinfo(kind).max)).all()


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_png_jpeg2000_and_jpeg_xl(channels: int) -> None:
    for kind in ("uint8", "uint16", "int16"):
        written = values_of(kind, (18, 25, channels), channels)
        array = written if channels > 1 else written[..., 0]
        check(imagecodecs.jpeg2k_encode(array, level=0), written)
        check(imagecodecs.jpeg2k_encode(array, level=0, codecformat="j2k"), written)
        if kind != "int16":
            without = written if channels not in (2, 4) else written[..., :-1].copy()
            check(imagecodecs.jpegxl_encode(array, lossless=True), without)
    if channels in (1, 3):
        written = values_of("uint16", (18, 25, channels))
        check(imagecodecs.png_encode(written if channels > 1 else written[..., 0]), written)
        check(
            f"P{5 if channels == 1 else 6} # a comment\n25 18 65535\n".encode() + written.astype(">u2").tobytes(),
            written,
        )


@pytest.mark.parametrize("kind", [*INTEGERS, *FLOATS, "bool"])
def test_arrays(kind: str) -> None:
    for channels in (1, 2, 7):
        written = (
            values_of("uint8", (11, 9, channels), channels) > 99
            if kind == "bool"
            else values_of(kind, (11, 9, channels))
        )
        for order in "<>":
            for array in (written, np.moveaxis(written, 2, 0)) if channels > 1 else (written, written[..., 0]):
                array = array.astype(array.dtype.newbyteorder(order))
                file, packed = io.BytesIO(), io.BytesIO()
                np.save(file, array if channels < 7 else np.asfortranarray(array))
                np.savez_compressed(packed, image=array)
                check(file.getvalue(), written)
                check(packed.getvalue(), written)


def test_threads_do_not_share_pythons_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails now and then in threads of Python 3.11 (python/cpython#106905), and an image became a bad one."""
    np.save(file := io.BytesIO(), written := np.arange(20, dtype=">u2").reshape(4, 5))
    monkeypatch.delattr(ast, "literal_eval")
    stored = open_image(file.getvalue())
    assert np.array_equal(stored.page(0)[0][..., 0], written)
    with pytest.raises(DecodeError):
        open_image(file.getvalue()[:-1]).page(0)


def test_several_arrays_and_objects_are_refused() -> None:
    file = io.BytesIO()
    np.savez(file, image=np.zeros((4, 4)), mask=np.ones((4, 4)))
    with pytest.raises(DecodeError, match="2 arrays"):
        open_image(file.getvalue())
    file = io.BytesIO()
    np.save(file, np.array([[{}]], object))
    with pytest.raises(DecodeError, match="object"):
        open_image(file.getvalue())


def dicom(
    values: np.ndarray, bits: int | None = None, syntax: str = uid.ExplicitVRLittleEndian, **elements: object
) -> bytes:
    """values: (frames, H, W) or (H, W, 3)."""
    found = FileDataset(None, {}, file_meta=FileMetaDataset(), preamble=bytes(128))
    found.file_meta.TransferSyntaxUID = syntax
    found.file_meta.MediaStorageSOPClassUID = found.SOPClassUID = uid.SecondaryCaptureImageStorage
    found.file_meta.MediaStorageSOPInstanceUID = found.SOPInstanceUID = uid.generate_uid(entropy_srcs=["x"])
    is_colour = values.shape[-1] == 3
    frames = 1 if is_colour else len(values)
    found.Rows, found.Columns = values.shape[:2] if is_colour else values.shape[1:]
    found.SamplesPerPixel = 3 if is_colour else 1
    found.PhotometricInterpretation = "RGB" if is_colour else "MONOCHROME2"
    if is_colour:
        found.PlanarConfiguration = 0
    if frames > 1:
        found.NumberOfFrames = frames
    found.BitsAllocated = 8 * values.itemsize
    found.BitsStored = bits or found.BitsAllocated
    found.HighBit = found.BitsStored - 1
    found.PixelRepresentation = int(values.dtype.kind == "i")
    for name, value in elements.items():
        setattr(found, name, value)
    order = ">" if syntax == uid.ExplicitVRBigEndian else "<"
    found.PixelData = values.astype(values.dtype.newbyteorder(order)).tobytes()
    if syntax == uid.ExplicitVRBigEndian:
        found.set_original_encoding(is_implicit_vr=False, is_little_endian=False)
    found["PixelData"].VR = "OB" if values.itemsize == 1 else "OW"
    if syntax == uid.RLELossless:
        found.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
        found.compress(uid.RLELossless, generate_instance_uid=False)
    file = io.BytesIO()
    found.save_as(file, enforce_file_format=True)
    return file.getvalue()


@pytest.mark.parametrize(
    "syntax", [uid.ExplicitVRLittleEndian, uid.ImplicitVRLittleEndian, uid.ExplicitVRBigEndian, uid.RLELossless]
)
def test_dicom(syntax: str) -> None:
    for kind in ("uint8", "uint16", "int16", "uint32")[: 3 if syntax == uid.RLELossless else 4]:
        written = values_of(kind, (1, 14, 18))
        check(dicom(written, syntax=syntax), written[0][..., None])
    colour = values_of("uint8", (14, 18, 3))
    check(dicom(colour, syntax=syntax), colour)


def test_dicom_values_after_rescaling() -> None:
    stored = values_of("uint16", (1, 14, 18)) >> 4
    ct = dicom(stored, bits=12, RescaleSlope="1", RescaleIntercept="-1024")
    check(ct, (stored[0][..., None].astype(np.int16) - 1024))
    pet = dicom(stored, bits=12, RescaleSlope="0.25", RescaleIntercept="3")
    check(pet, (stored[0][..., None] * 0.25 + 3).astype(np.float32))
    table, lut = Dataset(), values_of("uint16", (4096,))
    table.LUTDescriptor, table.ModalityLUTType = [4096, 0, 16], "US"
    for kind, content in (("US", lut.tolist()), ("OW", lut.tobytes())):
        table.add_new("LUTData", kind, content)
        check(dicom(stored, bits=12, ModalityLUTSequence=Sequence([table])), lut[stored[0][..., None]])
    bright_is_low = dicom(stored, bits=12, PhotometricInterpretation="MONOCHROME1")
    check(bright_is_low, 4095 - stored[0][..., None])
    padded = dicom(
        stored.astype(np.int16), RescaleSlope="1", RescaleIntercept="-1000", PixelPaddingValue=int(stored[0, 0, 0])
    )
    expected = stored[0][..., None].astype(np.int16) - 1000
    expected[stored[0] == stored[0, 0, 0]] = -77
    pixels = Pixels(("ct",), "int16", (-77.0,), (3000.0,), (0.5,), (0.5,))
    assert np.array_equal(decode(padded, pixels=pixels), expected)


def test_frames_of_a_dicom() -> None:
    written = values_of("uint16", (4, 10, 12))
    for syntax in (uid.ExplicitVRLittleEndian, uid.RLELossless):
        stored = open_image(dicom(written, syntax=syntax))
        assert stored.pages == 4
        for number in range(4):
            assert np.array_equal(stored.page(number)[0][..., 0], written[number])


def test_another_type_is_read_where_it_holds_every_value() -> None:
    small = np.array([[0, 4095]], np.uint16)[..., None]
    assert np.array_equal(read(tiff(small[..., 0]), small.astype(np.int16)), small.astype(np.int16))
    assert np.array_equal(read(tiff(small[..., 0]), small.astype(np.float32)), small.astype(np.float32))
    for values, wanted in (
        ([0, 40000], np.int16),
        ([-1, 5], np.uint16),
        ([0.5, 2], np.uint8),
        ([0, 2**24 + 1], np.float32),
    ):
        array = np.array([values])
        data = io.BytesIO()
        np.save(data, array)
        with pytest.raises(DecodeError, match=np.dtype(wanted).name):
            read(data.getvalue(), np.zeros((1, 2, 1), wanted))


def test_damage_and_images_of_several_sizes_are_named() -> None:
    written = values_of("uint16", (64, 64))
    whole = tiff(written, compression="zlib", rowsperstrip=8)
    with tifffile.TiffFile(io.BytesIO(whole)) as file:
        strip = file.pages[0].dataoffsets[4]
    broken = bytearray(whole)
    broken[strip : strip + 40] = bytes(40)
    for data, named in (
        (bytes(broken), "TIFF, 64 x 64, 1 channel uint16"),
        (tiff(written)[:-100], "TIFF"),
        (imagecodecs.png_encode(written)[:2000], "PNG, 64 x 64, 1 channel uint16"),
    ):
        with pytest.raises(DecodeError, match=named):
            read(data, written[..., None])
    for other in (written[:32], written.astype(np.uint8)):
        file = io.BytesIO()
        with tifffile.TiffWriter(file) as writer:
            writer.write(written)
            writer.write(other)
        with pytest.raises(DecodeError, match=f"2 images.*uint16.*{other.dtype}"):
            open_image(file.getvalue())


def test_every_damaged_byte_is_an_image_or_refused() -> None:
    """Seeded mutations of each format: an array of the expected shape, or DecodeError."""
    written = values_of("uint16", (16, 16))
    files = [
        tiff(written, compression="zstd"),
        imagecodecs.png_encode(written),
        imagecodecs.jpeg2k_encode(written, level=0),
        imagecodecs.jpegxl_encode(written, lossless=True),
        dicom(written[None]),
    ]
    array = io.BytesIO()
    np.save(array, written)
    rng = np.random.default_rng(0)
    num_refused = 0
    for data in [*files, array.getvalue()]:
        for _ in range(60):
            mutated = bytearray(data)
            for place in rng.integers(min(len(data), 600), size=2):
                mutated[place] = rng.integers(256)
            try:
                found = decode(bytes(mutated), pixels=pixels_of(written[..., None]))
            except DecodeError:
                num_refused += 1
            else:
                assert found.ndim == 3
    assert num_refused > 50


def test_compressed_dicom_has_the_values_of_the_uncompressed_file() -> None:
    folder = Path(pydicom.__file__).parent / "data" / "test_files"
    expected = pydicom.dcmread(folder / "MR_small.dcm").pixel_array[..., None]
    for name in ("RLE", "jp2klossless", "jpeg_ls_lossless", "bigendian", "implicit", "padded"):
        assert np.array_equal(open_image((folder / f"MR_small_{name}.dcm").read_bytes()).page(0)[0], expected)


def test_real_dicom_files_have_pydicoms_values() -> None:
    """Files that pydicom brings: every one that pydicom itself reads without a plug-in."""
    folder = Path(pydicom.__file__).parent / "data" / "test_files"
    num_equal = 0
    for path in sorted(folder.glob("*.dcm")):
        data = path.read_bytes()
        try:
            expected = pydicom.dcmread(path).pixel_array
        except Exception:
            continue
        stored, header = open_image(data), pydicom.dcmread(path)
        if stored.pages > 1 or stored.channels == 3:
            continue
        expected = expected * float(header.get("RescaleSlope", 1)) + float(header.get("RescaleIntercept", 0))
        values, missing = stored.page(0)
        is_there = np.ones(expected.shape, bool) if missing is None else ~missing
        assert np.array_equal(values[..., 0][is_there], expected[is_there]), path.name
        num_equal += 1
    assert num_equal > 5
