"""Decodes image files to pixels (H, W, C): libjpeg-turbo for JPEG, libheif for HEIC, Pillow for other 8-bit
photographs, and `pipeline/data/images` for images of other types and channels.

Sharding and training use the same functions, so training can read every image that sharding accepted.
"""

import contextlib
import ctypes
import io
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import simplejpeg
from PIL import Image, ImageFile

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.words import counted
from pipeline.data.images.profile import has_other_colours
from pipeline.data.images.stored import (
    DESCRIPTION,
    MAX_PIXELS,
    MIRRORED,
    UPSIDE_DOWN,
    DecodeError,
    Page,
    StoredImage,
    described_channels,
    is_dicom,
    open_image,
    reason,
    upright,
)
from pipeline.data.loading import jpeg_region
from pipeline.data.loading.jpeg_region import Region

# Photographs with broken EXIF are common, and Pillow warns about each.
warnings.filterwarnings("ignore", module="PIL")


def _silence_libtiff() -> None:
    """Make the libtiff that Pillow has loaded print nothing: its lines name no file, and Pillow raises an error that
    our caller names.
    """
    with open("/proc/self/maps") as maps:
        path = next((line.split(maxsplit=5)[5].strip() for line in maps if "/libtiff" in line), None)
    if path is not None:
        library = ctypes.CDLL(path)
        library.TIFFSetErrorHandler(None)
        library.TIFFSetWarningHandler(None)


_silence_libtiff()

# Suffixes of files that are treated as images; the format is then determined from the first bytes.
EXTENSIONS = {
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".png",
    ".webp",
    ".gif",
    ".bmp",
    ".tif",
    ".tiff",
    ".heic",
    ".heif",
    ".hif",
    ".avif",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
    ".jp2",
    ".j2k",
    ".jpx",
    ".jxl",
    ".npy",
    ".npz",
    ".dcm",
}
# Suffixes of array files, which are not always images.
ARRAYS = {".npy", ".npz"}
# How a file begins that Git LFS has not fetched yet, as after `git clone` of a data set without git-lfs.
LFS_POINTER = b"version https://git-lfs"
LFS_REASON = "a pointer of Git LFS instead of the file; run git lfs pull"
# Folders that macOS, Synology's NAS, Linux and Windows add: thumbnails and rescued or deleted files, not samples.
SYSTEM_FOLDERS = {"__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information"}
_MAGIC = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"II+\0": "tiff",
    b"MM\0+": "tiff",
    b"P1": "pbm",
    b"P2": "pgm",
    b"P3": "ppm",
    b"P4": "pbm",
    b"P5": "pgm",
    b"P6": "ppm",
    b"\0\0\0\x0cjP  \r\n\x87\n": "jp2",
    b"\xffO\xffQ": "j2k",
    b"\0\0\0\x0cJXL \r\n\x87\n": "jxl",
    b"\xff\x0a": "jxl",
    b"\x93NUMPY": "npy",
    b"PK\3\4": "npz",
}
# Files of boxes (ISO 14496-12) name what reads them: letters with which these brands begin, and brands of images of any
# codec.
_BRANDS, _ANY_IMAGE = {b"hei": "heic", b"hev": "heic", b"avi": "avif"}, (b"mif1", b"msf1")
_EXIF_ORIENTATION = 0x0112
_JPEG, _EXIF, _PROFILE, _START_OF_SCAN = b"\xff\xd8\xff", b"Exif\0\0", b"ICC_PROFILE\0", b"\xda"
# Colour primaries (ISO 23091-2) of sRGB, and unspecified.
_SRGB_PRIMARIES = (1, 2)
# JPEG: end-of-image marker. PNG: name and checksum of the last chunk.
_JPEG_END, _PNG_END = b"\xff\xd9", b"IEND\xaeB`\x82"
# Number of bytes searched for EXIF when the segments of a JPEG are malformed.
_EXIF_SEARCH_BYTES = 65536
_STRIP_PIXELS = 2**20
# Formats that Pillow reads, too, if they have 8 bits; and those that it alone reads, beside 8-bit PNG and PNM.
_ALSO_PILLOWS = ("jp2", "j2k")
_PNG_16_BITS = b"\x10"  # Byte 24 of a PNG.
_PHOTOGRAPHS = ("jpg", "gif", "bmp", "webp", "heic", "avif")
# Photometric interpretation of a TIFF -> samples of a pixel without extra ones: gray, RGB, palette, CMYK, YCbCr, Lab.
_TIFF_COLOURS = {0: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}
# Modes in which Pillow reads a TIFF of print colours or a palette, which pipeline/data/images does not read.
_COLOURS_OF_PILLOW = ("P", "PA", "CMYK", "LAB", "YCbCr")
# libjpeg errors after which pixels are missing. After others (extraneous bytes, unknown markers, CMYK) Pillow decides.
_SPOILT = ("premature end", "bad huffman code")


def decode(
    data: bytes,
    choose: Callable[[int, int], Region] | None = None,
    pixels: Pixels = RGB8,
) -> np.ndarray:
    """Decode an image of one of the EXTENSIONS to (H, W, C) of `pixels.type`, turned upright by its EXIF tag (HEIC and
    AVIF: by irot and imir).

    Values are those of the file. As 8-bit RGB, gray is repeated to three channels; of a photograph, alpha is dropped,
    and the first frame of an animation or the primary image of a HEIC is used. Raises DecodeError for anything that
    cannot be decoded to its last row, and for channels or values that `pixels` cannot hold.

    choose: (height, width) of the upright image -> the region to return, (top, left, height, width). Its pixels are
    those of the whole image, but most JPEGs are decoded only there (see `jpeg_region`), so damage below the region may
    go unnoticed.
    """
    ext = _format(data)
    is_jpeg = ext == "jpg"
    orientation = exif_orientation(data)
    if is_jpeg and pixels.is_rgb8:

        def stored(height: int, width: int) -> Region:
            return _stored_region(choose, height, width, orientation) if choose else (0, 0, height, width)

        part = jpeg_region.decode(data, stored) if choose else None
        if part is None:
            part = _decode_jpeg(data, stored)
        if part is not None:
            return upright(part, orientation)
    values = _whole(data, ext, pixels) if pixels.is_rgb8 else stored_image(data).values(pixels)
    if choose is None:
        return values
    top, left, height, width = choose(*values.shape[:2])
    return values[top : top + height, left : left + width]


def _whole(data: bytes, ext: str, pixels: Pixels) -> np.ndarray:
    """uint8 (H, W, 3), upright, of any 8-bit image. pixels: 8-bit RGB of some mean. Raises DecodeError for others."""
    if ext == "tiff":  # First by Pillow, which reads those of 8 bits in half the time.
        with contextlib.suppress(DecodeError):
            return upright(*with_pillow(data, _tiff_to_rgb))
    stored = _stored(data, ext)
    if stored is None:
        return upright(*with_pillow(data, _to_rgb))
    is_8_bit = stored.type in ("uint8", "bool") and stored.channels in (1, 3)
    if is_8_bit and stored.ext in _ALSO_PILLOWS:
        with contextlib.suppress(DecodeError):
            return upright(*with_pillow(data, _to_rgb))
    if stored.lacking:
        return stored.values(pixels)
    if not is_8_bit:
        raise DecodeError(f"{stored.describe()}, where 8-bit gray or RGB is needed")
    values, _ = stored.page(0)
    values = values * np.uint8(255) if stored.type == "bool" else values
    return np.repeat(values, 3, axis=2) if stored.channels == 1 else values


def _stored(data: bytes, ext: str) -> StoredImage | None:
    """The header of an image of one of the formats in pipeline/data/images; None for others, and TIFFs of colours that
    only Pillow reads.
    """
    if ext in _PHOTOGRAPHS or (ext == "png" and data[24:25] != _PNG_16_BITS):
        return None
    try:
        return open_image(data)
    except DecodeError:
        if ext == "tiff" and with_pillow(data, lambda image: image.mode) in _COLOURS_OF_PILLOW:
            return None
        raise


def stored_image(data: bytes) -> StoredImage:
    """Read the header of an image of any format. Raises DecodeError."""
    ext = _format(data)
    if stored := _stored(data, ext):
        return stored
    header, orientation = with_pillow(data, lambda image: (_header(image, data, ext), _orientation(image)))
    height, width = (header.width, header.height) if orientation >= 5 else (header.height, header.width)

    def read(number: int) -> Page:
        return decode(data)[..., : header.channels], None

    return replace(header, height=height, width=width, read=read)


def left_out(image: StoredImage, pixels: Pixels | None) -> set[str]:
    """Names of `stored.LEFT_OUT` for what a data set of these pixels drops. pixels: None for those of page 1."""
    of_rgb8 = pixels is not None and pixels.is_rgb8
    uses_pages = pixels is not None and not of_rgb8 and image.channels * image.pages == pixels.num_channels
    facts = {
        "alpha": image.alpha,
        "pages": image.pages > 1 and not uses_pages,
        "bits": of_rgb8 and image.type not in ("uint8", "bool"),
        "bands": of_rgb8 and image.channels > 3,
        "channels": bool(image.lacking),
        "profile": image.profile,
    }
    return {what for what, is_so in facts.items() if is_so}


def _jpeg_profile(data: bytes) -> bytes:
    """The first part of a JPEG's colour profile, up to 64 KB; empty without one."""
    end = _start_of_scan(data)
    begin = data.find(_PROFILE, 0, end) + len(_PROFILE) + 2  # The numbers of the part and of all follow.
    return (
        data[begin : min(begin + int.from_bytes(data[begin : begin + 4], "big"), end)]
        if begin > len(_PROFILE) + 1
        else b""
    )


def _bits_and_colours_of_boxes(data: bytes) -> tuple[int, bool]:
    """(most bits of a value, whether colours are not sRGB's) of a HEIC or AVIF, by the boxes `pixi` and `colr` of its
    items.
    """
    end = data.find(b"mdat")
    boxes = [place.end() for place in re.finditer(b"pixi", data[:end])]
    bits = max((max(data[at + 5 : at + 5 + data[at + 4]], default=8) for at in boxes), default=8)
    if (at := data.find(b"colrprof", 0, end)) >= 0:  # Counts before numbers.
        return bits, has_other_colours(data[at + 8 : end])
    at = data.find(b"colrnclx", 0, end)
    return bits, at >= 0 and int.from_bytes(data[at + 8 : at + 10], "big") not in _SRGB_PRIMARIES


def _header(image: Image.Image, data: bytes, ext: str) -> StoredImage:
    """Header of a photograph that Pillow has opened, with its sides before EXIF rotation."""
    channels = 1 if image.mode in ("1", "L", "LA") else 3
    pages = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    in_boxes = ext in ("heic", "avif")
    bits, profile = (
        _bits_and_colours_of_boxes(data) if in_boxes else (8, has_other_colours(image.info.get("icc_profile")))
    )
    return StoredImage(
        ext,
        image.height,
        image.width,
        channels,
        "uint8" if bits <= 8 else "uint16",
        _unread,
        pages,
        alpha=image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info,
        profile=profile,
    )


def _unread(number: int) -> Page:
    raise AssertionError("only the header was read")


def exif_orientation(data: bytes) -> int:
    """EXIF orientation of a JPEG, 1 to 8; 1 of other formats. Raises DecodeError."""
    return with_pillow(data, _orientation) if data.startswith(_JPEG) and _may_have_exif(data) else 1


def inspect(data: bytes, decode_all: bool, pixels: Pixels = RGB8) -> StoredImage:
    """The header of an image of any kind. Of photographs, its sides are those before EXIF rotation (HEIC: after its
    own). Raises DecodeError.

    decode_all: decode the whole image as well, as `decode` does, to detect truncated and damaged files; else see
    `check_end`.
    """
    if decode_all:
        decode(data, pixels=pixels)
    ext = _format(data)
    if ext == "jpg" and (size := _jpeg_size(data)):
        profile = has_other_colours(_jpeg_profile(data))
        return StoredImage(ext, *size, channels=3, type="uint8", read=_unread, profile=profile)
    return _stored(data, ext) or with_pillow(data, lambda image: _header(image, data, ext))


def check_end(data: bytes, ext: str) -> None:
    """Detect a truncated file without decoding it: by the end marker of JPEG, PNG and JPEG 2000, or the lengths in
    WebP, HEIC and AVIF.

    Bytes after the end marker (padding, a second image) are ignored. GIF, BMP, TIFF and PPM are not checked. Raises
    DecodeError.
    """
    if ext == "jpg":
        # Segments before the scan do not count: EXIF may hold a complete thumbnail.
        is_complete = data.rfind(_JPEG_END, _start_of_scan(data)) >= 0
    elif ext == "png":
        is_complete = data.rfind(_PNG_END) >= 0
    elif ext in ("jp2", "j2k"):
        is_complete = data.rfind(_JPEG_END, data.find(b"\xffO\xffQ")) >= 0
    elif ext in ("heic", "avif"):
        _check_boxes(data)
        is_complete = True
    else:
        is_complete = ext != "webp" or len(data) >= 8 + int.from_bytes(data[4:8], "little")
    if not is_complete:
        raise DecodeError("cut off: it has no end" if ext == "webp" else "cut off: it has no end marker")


def _check_boxes(data: bytes) -> None:
    """Raise DecodeError for a HEIC or AVIF without its end: libheif leaves those tiles of a photograph green that are
    missing.
    """
    at, end = 0, len(data)
    while at + 8 <= end:
        size, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        stop = at + size if size else end
        if name in (b"ftyp", b"meta", b"mdat") and stop > end:
            raise DecodeError(f"cut off: {counted(end, 'byte')}, where its header names {stop:,}")
        if stop < at + 8:
            return  # Phones append what is not in boxes.
        at = stop


def _format(data: bytes) -> str:
    if data.startswith(_JPEG):  # First, and before the table below: most images are.
        return "jpg"
    if is_dicom(data):  # Its preamble may look like a TIFF.
        return "dcm"
    for magic, ext in _MAGIC.items():
        if data.startswith(magic):
            return ext
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[4:8] == b"ftyp" and (ext := _brand(data)):
        return ext
    if data.startswith(LFS_POINTER):
        raise DecodeError(LFS_REASON)
    raise DecodeError(f"no image: begins with {data[:12]!r}" if data else "empty file")


def _brand(data: bytes) -> str:
    """heic or avif: by the first brand of a file of boxes that names a codec. "" for others, such as videos."""
    brands = [data[at : at + 4] for at in (8, *range(16, min(int.from_bytes(data[:4], "big"), 1024), 4))]
    ext = next((_BRANDS[brand[:3]] for brand in brands if brand[:3] in _BRANDS), "")
    return ext or ("heic" if any(brand in _ANY_IMAGE for brand in brands) else "")


def _may_have_exif(data: bytes) -> bool:
    """False only for a JPEG that has no EXIF before its scan, or in its first bytes if its segments are malformed."""
    end = _start_of_scan(data)
    is_well_formed = data[end : end + 2] == b"\xff" + _START_OF_SCAN
    return data.find(_EXIF, 0, end if is_well_formed else _EXIF_SEARCH_BYTES) >= 0


def _start_of_scan(data: bytes) -> int:
    """Offset of the first scan of a JPEG, or of the first malformed segment; the number of bytes if the file ends
    before.
    """
    at = 2
    try:
        # Indices instead of slices: sharding by copy calls this for every image, and slices take twice as long.
        while data[at] == 0xFF and data[at + 1] != _START_OF_SCAN[0]:
            at += 2 + (data[at + 2] << 8 | data[at + 3])
    except IndexError:
        return len(data)
    return at


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) by libjpeg-turbo, in a tenth of Pillow's time; None if it cannot read the header."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    _refuse_bomb(height, width)
    return height, width


def _decode_jpeg(data: bytes, choose: Callable[[int, int], Region]) -> np.ndarray | None:
    """Decode the whole JPEG by libjpeg-turbo and return a region as `jpeg_region.decode` does; None if it does not
    support this kind.
    """
    size = _jpeg_size(data)
    if size is None:
        return None
    top, left, height, width = choose(*size)
    try:
        pixels = simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
    except ValueError as error:
        if any(words in str(error).lower() for words in _SPOILT):
            raise DecodeError(reason(error)) from None
        return None
    return pixels[top : top + height, left : left + width]


def _refuse_bomb(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise DecodeError(f"{width} x {height} pixels are more than {MAX_PIXELS:,}")


def with_pillow(data: bytes, question):  # type: ignore[no-untyped-def]
    """Returns question(opened image). Raises DecodeError for every failure of Pillow."""
    try:
        with _opener(data)(io.BytesIO(data)) as image:
            _refuse_bomb(image.height, image.width)
            return question(image)
    except DecodeError:
        raise
    except Exception as error:  # Pillow's plug-ins raise any type, including struct.error and SyntaxError.
        raise DecodeError(reason(error)) from None


def _opener(data: bytes) -> Callable[[io.BytesIO], Image.Image]:
    """Pillow's, or that of one of its plug-ins. Raises DecodeError for a cut HEIC or AVIF."""
    ext = _brand(data) if data[4:8] == b"ftyp" else ""
    if not ext:
        return Image.open
    _check_boxes(data)
    if ext == "avif":
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # Images are decoded beside each other already.
        return AvifImagePlugin.AvifImageFile
    return _HeicFile


class _HeicFile(ImageFile.ImageFile):
    """Pillow's plug-in for HEIC, by libheif. That of pi_heif reads EXIF and profiles, too, and version 1.4.0 crashes
    where these are damaged.
    """

    format = "HEIF"

    def _open(self) -> None:
        import _pi_heif  # When the first HEIC is read.

        assert self.fp is not None
        # No threads of its own; colours to 8 bits, as RGB, rows as libheif aligns them; gray to 8 or 16 bits; any
        # decoder; with limits.
        images = _pi_heif.load_file(self.fp.read(), 0, True, False, False, True, "", False)
        self._found = next((image for image in images if image is not None and image.primary), None)
        if self._found is None:
            raise DecodeError("its primary image cannot be read")
        self._size, self._mode = self._found.size_mode

    def load(self) -> "Image.core.PixelAccess | None":
        if self._found is not None:
            photograph, self._found = self._found, None
            pixels = photograph.data
            (width, height), _ = photograph.size_mode
            if (width, height) != self.size:
                raise DecodeError(f"{width} x {height} pixels, where its header says {self.width} x {self.height}")
            self.load_prepare()
            self.frombytes(pixels, "raw", (self.mode, photograph.stride))
        return super().load()


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 if it is absent or invalid, since the pixels are usable anyway.

    A HEIC has been turned already. For an AVIF, Pillow sets the tag to what irot and imir say.
    """
    if image.format == "AVIF":
        image.info.pop("xmp", None)  # Pillow would read an orientation there that does not count.
    try:
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # As above.
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _tiff_to_rgb(image: Image.Image) -> tuple[np.ndarray, int]:
    """`_to_rgb` of a TIFF that is an 8-bit photograph by its tags. Raises DecodeError for others, of which Pillow would
    drop bits or bands.
    """
    bits, formats, extra = (_tiff_tag(image, tag, default) for tag, default in ((258, 1), (339, 1), (338, ())))
    names, _ = described_channels(image.tag_v2.get(DESCRIPTION))  # type: ignore[attr-defined]
    (samples,), (photometric,) = _tiff_tag(image, 277, 1), _tiff_tag(image, 262, -1)
    if (
        names
        or max(bits) > 8
        or {*formats} != {1}
        or 0 in extra
        or samples - len(extra) != _TIFF_COLOURS.get(photometric)
    ):
        raise DecodeError("a TIFF that is not an 8-bit photograph")
    return _to_rgb(image)


def _tiff_tag(image: Image.Image, tag: int, default: int | tuple[()]) -> tuple[int, ...]:
    value = image.tag_v2.get(tag, default)  # type: ignore[attr-defined]
    return value if isinstance(value, tuple) else (value,)


def _to_rgb(image: Image.Image) -> tuple[np.ndarray, int]:
    """(pixels as stored, EXIF orientation)."""
    # Pillow rotates a TIFF on loading and drops the tag, so read the orientation after loading.
    image.load()
    orientation = _orientation(image)
    if image.format == "HEIF" and image.mode.startswith("I"):
        # Gray of more bits; of colours, libheif gives 8.
        gray = np.round(np.asarray(image, np.float64) / 257).astype(np.uint8)
        return np.repeat(gray[..., None], 3, axis=2), orientation
    if image.mode == "F" or image.mode.startswith("I"):
        raise DecodeError(f"{image.format} with more than 8 bits a value, where 8-bit gray or RGB is needed")

    def convert(strip: Image.Image) -> np.ndarray:
        return np.array(strip.convert("RGB"))  # A copy, because torch warns about read-only arrays.

    if image.width * image.height <= _STRIP_PIXELS:
        return convert(image), orientation
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top, strip in _strips(image):
        pixels[top : top + strip.height] = convert(strip)
    return pixels, orientation


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yield (first row, strip) over the image; converting it at once would take up to 26 bytes per pixel."""
    height = max(_STRIP_PIXELS // image.width, 1)
    for top in range(0, image.height, height):
        yield top, image.crop((0, top, image.width, min(top + height, image.height)))


def _stored_region(choose: Callable[[int, int], Region], height: int, width: int, orientation: int) -> Region:
    """Map the region chosen in the upright image to the stored image: the inverse of `upright`."""
    _refuse_bomb(height, width)
    is_transposed = orientation >= 5
    if is_transposed:
        height, width = width, height
    top, left, part_height, part_width = choose(height, width)
    if orientation in MIRRORED:
        left = width - left - part_width
    if orientation in UPSIDE_DOWN:
        top = height - top - part_height
    return (left, top, part_width, part_height) if is_transposed else (top, left, part_height, part_width)
