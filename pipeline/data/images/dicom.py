"""Opens DICOM, by pydicom, whose compressed pixels imagecodecs decodes. A page is a frame.

The modality LUT (rescale slope and intercept) is always applied, the window never: values are Hounsfield units and the
like. MONOCHROME1 is inverted, so that larger values are brighter. Palettes become colours. Padding is missing pixels.
"""

import io
import logging
import warnings

import imagecodecs
import numpy as np
import pydicom
from pydicom import pixels, uid
from pydicom.pixels.decoders.base import DecodeRunner

from pipeline.architecture.pixels import FULL_RANGE
from pipeline.data.images.stored import DecodeError, Page, StoredImage

# Its warnings about odd elements would name no file.
logging.getLogger("pydicom").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", module="pydicom")
pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE

_DECODERS = {
    uid.JPEGBaseline8Bit: imagecodecs.jpeg_decode,
    uid.JPEGExtended12Bit: imagecodecs.jpeg_decode,
    uid.JPEGLossless: imagecodecs.ljpeg_decode,
    uid.JPEGLosslessSV1: imagecodecs.ljpeg_decode,
    uid.JPEGLSLossless: imagecodecs.jpegls_decode,
    uid.JPEGLSNearLossless: imagecodecs.jpegls_decode,
    uid.JPEG2000Lossless: imagecodecs.jpeg2k_decode,
    uid.JPEG2000: imagecodecs.jpeg2k_decode,
}
DECODER_DEPENDENCIES = dict.fromkeys(_DECODERS, ("imagecodecs",))  # pydicom asks for it.
_PLUGIN = "imagecodecs"
_ADOBE = b"\xff\xee\0\x0eAdobe"  # A marker of JPEG, of its full length.
# Types of values after rescaling, in the order of preference.
_INTEGERS = ("uint8", "uint16", "int16", "uint32", "int32")


def is_available(syntax: str) -> bool:
    """pydicom asks a plug-in for it."""
    return syntax in _DECODERS


def decode_frame(data: bytes, runner: DecodeRunner) -> bytes:
    """pydicom's plug-in: the values of a compressed frame, in the order row, column, sample."""
    syntax = runner.transfer_syntax
    if syntax in (uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit) and runner.samples_per_pixel == 3:
        # As they are stored: pydicom converts them, by the header. With Adobe's marker, libjpeg knows which colours
        # these are.
        as_stored = {} if _ADOBE in data[:1024] else {"colorspace": "YCBCR", "outcolorspace": "YCBCR"}
        values = imagecodecs.jpeg_decode(data, **as_stored)
        if not as_stored:
            runner.set_option("photometric_interpretation", "RGB")
    else:
        values = _DECODERS[syntax](data)
        if runner.photometric_interpretation in ("YBR_ICT", "YBR_RCT"):
            runner.set_option("photometric_interpretation", "RGB")
    runner.set_option("bits_allocated", 8 * values.itemsize)
    runner.set_option("planar_configuration", 0)
    return values.tobytes()


for _syntax in _DECODERS:
    _decoder = pixels.get_decoder(_syntax)
    if _PLUGIN not in _decoder.available_plugins:
        _decoder.add_plugin(_PLUGIN, (__name__, "decode_frame"))


def open_image(data: bytes, ext: str) -> StoredImage:
    """Raises DecodeError for a DICOM without an image."""
    dataset = pydicom.dcmread(io.BytesIO(data), force=True)
    if "Rows" not in dataset or "PixelData" not in dataset:
        raise DecodeError(f"a DICOM without an image (modality {dataset.get('Modality', 'unknown')})")
    if "TransferSyntaxUID" not in dataset.file_meta:
        dataset.file_meta.TransferSyntaxUID = uid.ExplicitVRBigEndian if data[0] == 0 else uid.ExplicitVRLittleEndian
    plugin = _PLUGIN if dataset.file_meta.TransferSyntaxUID in _DECODERS else ""
    is_palette = dataset.PhotometricInterpretation == "PALETTE COLOR"
    channels = 3 if is_palette else int(dataset.SamplesPerPixel)
    kind, low, high = _values_after_rescaling(dataset)
    padding = _padding(dataset)

    def read(number: int) -> Page:
        stored = pixels.pixel_array(dataset, index=number, decoding_plugin=plugin)
        stored = stored.reshape(dataset.Rows, dataset.Columns, -1)
        missing = ((stored >= padding[0]) & (stored <= padding[1])).all(axis=2) if padding else None
        if is_palette:
            return pixels.apply_color_lut(stored[..., 0], dataset), missing
        values = pixels.apply_modality_lut(stored, dataset) if channels == 1 else stored
        if dataset.PhotometricInterpretation == "MONOCHROME1":
            values = low + high - values
        values = values if missing is None else np.where(missing[..., None], 0, values)
        typed = values.astype(kind)
        if kind != "float32" and not np.array_equal(typed, values):
            raise DecodeError(f"values from {values.min():g} to {values.max():g}, which {kind} does not hold")
        return typed, missing

    frames = int(dataset.get("NumberOfFrames") or 1)
    return StoredImage("dcm", int(dataset.Rows), int(dataset.Columns), channels, kind, read, pages=frames)


def _values_after_rescaling(dataset: pydicom.Dataset) -> tuple[str, float, float]:
    """(type, lowest and highest value) after the modality LUT: an integer type that holds them, or float32."""
    signed, bits = bool(dataset.get("PixelRepresentation")), int(dataset.BitsStored)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        bits = int(dataset.RedPaletteColorLookupTableDescriptor[2])
        return f"uint{bits}", 0, 2**bits - 1
    if "ModalityLUTSequence" in dataset:
        bits = int(dataset.ModalityLUTSequence[0].LUTDescriptor[2])
        return "uint16" if bits > 8 else "uint8", 0, 2**bits - 1
    if "RescaleSlope" not in dataset or int(dataset.SamplesPerPixel) > 1:
        return f"{'' if signed else 'u'}int{max(int(dataset.BitsAllocated), 8)}", low, high
    slope, intercept = float(dataset.RescaleSlope), float(dataset.get("RescaleIntercept") or 0)
    low, high = sorted(value * slope + intercept for value in (low, high))
    if not (slope.is_integer() and intercept.is_integer()):
        return "float32", low, high
    if abs(slope) == 1 and bits <= 16:
        # CT stores 16 bits and uses 13: of Hounsfield units, int16 holds all that occur.
        return "int16" if low < 0 else "uint16", low, high
    fits = [name for name in _INTEGERS if FULL_RANGE[name][0] <= low and high <= FULL_RANGE[name][1]]
    return fits[0] if fits else "float32", low, high


def _padding(dataset: pydicom.Dataset) -> tuple[float, float] | None:
    """The lowest and highest stored value that marks a missing pixel; None without any."""
    values = [dataset.get(name) for name in ("PixelPaddingValue", "PixelPaddingRangeLimit")]
    given = [float(value) for value in values if isinstance(value, int | float)]
    return (min(given), max(given)) if given else None
