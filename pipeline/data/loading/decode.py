"""Decodes image files to RGB pixels: libjpeg-turbo for JPEG, libheif for HEIC, Pillow for all other formats.

Sharding and training use the same functions, so training can read every image that sharding accepted.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import simplejpeg
from PIL import Image, ImageFile

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.words import counted
from pipeline.data.loading import jpeg_region
from pipeline.data.loading.jpeg_region import Region

# Photographs with broken EXIF are common, and Pillow warns about each.
warnings.filterwarnings("ignore", module="PIL")

# Suffixes of files that are treated as images; the format is then determined from the first bytes.
EXTENSIONS = {
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".heif", ".hif", ".avif",
    ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".jpx",
}  # fmt: skip
# Suffixes of photographs that are not decoded: they belong to a data set, so each counts as a bad image.
NOT_DECODED = {".jxl"}
NOT_DECODED_REASON = "this format is not read; convert it to JPEG or PNG"
# How a file begins that Git LFS has not fetched yet, as after `git clone` of a data set without git-lfs.
LFS_POINTER = b"version https://git-lfs"
LFS_REASON = "a pointer of Git LFS instead of the file; run git lfs pull"
# Folders that macOS, Synology's NAS, Linux and Windows add to others: thumbnails and rescued or deleted files, which are no samples.
SYSTEM_FOLDERS = {"__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information"}
# How JPEG XL begins: as a box, or without one. Browsers that save it may call such files .jpg.
_NOT_DECODED_MAGIC = (b"\0\0\0\x0cJXL \r\n\x87\n", b"\xff\x0a")
_MAGIC = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"P1": "pbm", b"P2": "pgm", b"P3": "ppm", b"P4": "pbm", b"P5": "pgm", b"P6": "ppm",
    b"\0\0\0\x0cjP  \r\n\x87\n": "jp2",
    b"\xffO\xffQ": "j2k",
}  # fmt: skip
# Files of boxes (ISO 14496-12) name what reads them: letters with which these brands begin, and brands of images of any codec.
_BRANDS, _ANY_IMAGE = {b"hei": "heic", b"hev": "heic", b"avi": "avif"}, (b"mif1", b"msf1")
# How an unfinished download ends whose space was reserved before.
_EMPTY_BLOCK = bytes(4096)
_EXIF_ORIENTATION = 0x0112
# Tags of a TIFF: bits of a sample; how they are to be read, of which 0 is "white is zero".
_BITS, _PHOTOMETRIC = 258, 262
# EXIF orientations whose rows are stored bottom up, and whose columns right to left (5-8: after transposing).
_UPSIDE_DOWN, _MIRRORED = (3, 4, 7, 8), (2, 3, 6, 7)
_EXIF, _START_OF_SCAN = b"Exif\0\0", b"\xda"
# JPEG: end-of-image marker. PNG: name and checksum of the last chunk.
_JPEG_END, _PNG_END = b"\xff\xd9", b"IEND\xaeB`\x82"
# Number of bytes searched for EXIF when the segments of a JPEG are malformed.
_EXIF_SEARCH_BYTES = 65536
# Pillow's limit against decompression bombs, applied to libjpeg-turbo too: a small header can claim 12 GB of pixels.
_MAX_PIXELS = 2 * 89_478_485
_STRIP_PIXELS = 2**20
# libjpeg errors after which pixels are missing. After others (extraneous bytes, unknown markers, CMYK) Pillow decides.
_SPOILT = ("premature end", "bad huffman code")


class DecodeError(ValueError):
    """The bytes are not an image, or the image cannot be decoded completely."""


def decode(
    data: bytes,
    choose: Callable[[int, int], Region] | None = None,
    factor: Callable[[], int] = lambda: 1,
    by_region: bool = True,
    pixels: Pixels = RGB8,
) -> np.ndarray:
    """Decode an image of one of the EXTENSIONS to uint8 (H, W, 3) RGB, turned upright by its EXIF tag (HEIC and AVIF: by irot and imir).

    Grayscale is repeated to three channels, 10-bit to 16-bit are scaled to 8, alpha is dropped, and the first frame of an animation
    or the primary image of a HEIC is used. Raises DecodeError for anything that cannot be decoded to its last row, and for
    floating-point pixels, negative ones and those above 65,535.

    choose: (height, width) of the upright image -> the region to return, (top, left, height, width). Its pixels are those of
    the whole image, but most JPEGs are decoded only there (see `jpeg_region`), so damage below the region may go unnoticed.
    factor: asked after `choose`, by what (1, 2, 4 or 8) to reduce the region of a JPEG (`jpeg_region.reduced`); other formats are not reduced.
    by_region: False always decodes the whole image.
    """
    if not pixels.is_rgb8:
        return _decode_npy(data, choose, pixels)
    is_jpeg = _format(data) == "jpg"
    orientation = exif_orientation(data) if is_jpeg else 1
    if is_jpeg:

        def stored(height: int, width: int) -> Region:
            return _stored_region(choose, height, width, orientation) if choose else (0, 0, height, width)

        part = jpeg_region.decode(data, stored, factor) if choose and by_region else None
        if part is None:
            part = _decode_jpeg(data, stored, factor)
        if part is not None:
            return upright(part, orientation)
    found, orientation = with_pillow(data, _to_rgb)
    found = upright(found, orientation)
    if choose is None:
        return found
    top, left, height, width = choose(*found.shape[:2])
    return found[top : top + height, left : left + width]


def _decode_npy(data: bytes, choose: Callable[[int, int], Region] | None, pixels: Pixels) -> np.ndarray:
    if not data.startswith(b"\x93NUMPY"):
        raise DecodeError(f"no .npy file: begins with {data[:12]!r}")
    try:
        found = np.load(io.BytesIO(data), allow_pickle=False)
    except ValueError as error:
        raise DecodeError(_reason(error)) from None
    found = found[..., None] if found.ndim == 2 else found
    if found.ndim != 3 or found.shape[2] != pixels.num_channels or found.dtype != np.dtype(pixels.type):
        raise DecodeError(
            f"an array {found.shape} of {found.dtype}, not (H, W, {pixels.num_channels}) of {pixels.type}"
        )
    if choose is None:
        return found
    top, left, height, width = choose(*found.shape[:2])
    return found[top : top + height, left : left + width]


def decode_with_orientation(data: bytes) -> tuple[np.ndarray, int]:
    """(what `decode` returns of all of the image, the EXIF orientation by which it was turned: see `upright`). Raises DecodeError."""
    if _format(data) == "jpg":
        return decode(data), exif_orientation(data)
    pixels, orientation = with_pillow(data, _to_rgb)
    return upright(pixels, orientation), orientation


def exif_orientation(jpeg: bytes) -> int:
    """EXIF orientation of a JPEG, 1 to 8. Raises DecodeError."""
    return with_pillow(jpeg, _orientation) if _may_have_exif(jpeg) else 1


def inspect(data: bytes, decode_all: bool) -> tuple[str, int, int]:
    """(file extension by content, width, height) of an image as stored, before EXIF rotation (HEIC: after its own). Raises DecodeError.

    decode_all: decode the whole image, to detect truncated and damaged files; else only the header is read (see `check_end`).
    """
    ext = _format(data)
    size = _jpeg_size(data) if ext == "jpg" else None
    height, width = size or with_pillow(data, lambda image: (image.height, image.width))
    if decode_all:
        decode(data)
    return ext, width, height


def check_end(data: bytes, ext: str) -> None:
    """Detect a truncated file without decoding it: by the end marker of JPEG, PNG and JPEG 2000, or the lengths in WebP, HEIC and AVIF.

    Bytes after the end marker (padding, a second image) are ignored. GIF, BMP, TIFF and PPM are not checked. Raises DecodeError.
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
    """Raise DecodeError for a HEIC or AVIF without its end: libheif leaves those tiles of a photograph green that are missing."""
    at, end = 0, len(data)
    while at + 8 <= end:
        size, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        stop = at + size if size else end
        if name in (b"ftyp", b"meta", b"mdat") and stop > end:
            raise DecodeError(f"cut off: {counted(end, 'byte')}, where its header names {stop:,}")
        if name == b"mdat" and data.endswith(_EMPTY_BLOCK, at, stop):
            raise DecodeError(f"cut off: it ends with {len(_EMPTY_BLOCK):,} zeros")
        if stop < at + 8:
            return  # Phones append what is not in boxes.
        at = stop


def _format(data: bytes) -> str:
    for magic, ext in _MAGIC.items():
        if data.startswith(magic):
            return ext
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[4:8] == b"ftyp" and (ext := _brand(data)):
        return ext
    if data.startswith(_NOT_DECODED_MAGIC):
        raise DecodeError(NOT_DECODED_REASON)
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
    """Offset of the first scan of a JPEG, or of the first malformed segment; the number of bytes if the file ends before."""
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


def _decode_jpeg(data: bytes, choose: Callable[[int, int], Region], factor: Callable[[], int]) -> np.ndarray | None:
    """Decode the whole JPEG by libjpeg-turbo and return a region as `jpeg_region.decode` does; None if it does not support this kind."""
    size = _jpeg_size(data)
    if size is None:
        return None
    region, by = choose(*size), factor()
    least = [-(-side // by) for side in size]
    try:
        pixels = simplejpeg.decode_jpeg(
            data, colorspace="RGB", min_height=least[0], min_width=least[1], min_factor=by, strict=True
        )
    except ValueError as error:
        if any(words in str(error).lower() for words in _SPOILT):
            raise DecodeError(_reason(error)) from None
        return None
    top, left, height, width = jpeg_region.reduced(region, by)
    return pixels[top : top + height, left : left + width]


def _refuse_bomb(height: int, width: int) -> None:
    if height * width > _MAX_PIXELS:
        raise DecodeError(f"{width} x {height} pixels are more than {_MAX_PIXELS:,}")


def with_pillow(data: bytes, question):  # type: ignore[no-untyped-def]
    """Returns question(opened image). Raises DecodeError for every failure of Pillow."""
    try:
        with _opener(data)(io.BytesIO(data)) as image:
            _refuse_bomb(image.height, image.width)
            return question(image)
    except DecodeError:
        raise
    except Exception as error:  # Pillow's plug-ins raise any type, including struct.error and SyntaxError.
        raise DecodeError(_reason(error)) from None


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
    """Pillow's plug-in for HEIC, by libheif. That of pi_heif reads EXIF and profiles, too, and version 1.4.0 crashes where these are damaged."""

    format = "HEIF"

    def _open(self) -> None:
        import _pi_heif  # When the first HEIC is read.

        assert self.fp is not None
        # No threads of its own; colours to 8 bits, as RGB, rows as libheif aligns them; gray to 8 or 16 bits; any decoder; with limits.
        images = _pi_heif.load_file(self.fp.read(), 0, True, False, False, True, "", False)
        self._found = next((image for image in images if image is not None and image.primary), None)
        if self._found is None:
            raise DecodeError("its primary image cannot be read")
        self._size, self._mode = self._found.size_mode

    def load(self) -> "Image.core.PixelAccess | None":
        if self._found is not None:
            found, self._found = self._found, None
            pixels = found.data
            (width, height), _ = found.size_mode
            if (width, height) != self.size:
                raise DecodeError(f"{width} x {height} pixels, where its header says {self.width} x {self.height}")
            self.load_prepare()
            self.frombytes(pixels, "raw", (self.mode, found.stride))
        return super().load()


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 if it is absent or invalid, since the pixels are usable anyway.

    A HEIC has been turned already. For an AVIF, Pillow sets the tag to what irot and imir say.
    """
    if image.format == "AVIF":
        image.info.pop("xmp", None)  # Pillow would read an orientation there that does not count.
    try:
        found = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # As above.
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _to_rgb(image: Image.Image) -> tuple[np.ndarray, int]:
    """(pixels as stored, EXIF orientation)."""
    # Pillow rotates a TIFF on loading and drops the tag, so read the orientation after loading.
    image.load()
    orientation = _orientation(image)
    if image.mode == "F":
        raise DecodeError("floating-point pixels, whose range is unknown")
    is_wide = image.mode.startswith("I")
    scale = _wide_scale(image) if is_wide else 1
    # Pillow inverts such pixels of 8 bits itself.
    is_negative = is_wide and _tiff_tag(image, _PHOTOMETRIC) == 0

    def convert(strip: Image.Image) -> np.ndarray:
        if not is_wide:
            return np.array(strip.convert("RGB"))  # A copy, because torch warns about read-only arrays.
        values = np.asarray(strip, dtype=np.float64) / scale
        values = np.clip(np.round(values), 0, 255).astype(np.uint8)
        return np.repeat((255 - values if is_negative else values)[..., None], 3, axis=2)

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


def _wide_scale(image: Image.Image) -> float:
    """By what the values of an image of more than 8 bits are divided, so that white is 255. Raises DecodeError for an unknown range."""
    if image.mode.startswith("I;16"):
        # Pillow leaves 12-bit values as they are, in 16 bits.
        return 4095 / 255 if _tiff_tag(image, _BITS) == 12 else 257
    if image.format == "PPM":
        return 257  # Pillow scales these to 16 bits.
    # For 32-bit types only the values show whether they are 8-bit or 16-bit.
    extremes = np.array([strip.getextrema() for _, strip in _strips(image)])
    low, high = int(extremes.min()), int(extremes.max())
    if low < 0 or high > 65535:
        raise DecodeError(f"pixels from {low:,} to {high:,}, whose range is unknown")
    return 257 if high > 255 else 1


def _tiff_tag(image: Image.Image, tag: int) -> int | None:
    """A number of the header of a TIFF, the first of several; None for other formats, and if it is missing."""
    value = getattr(image, "tag_v2", {}).get(tag)
    return value[0] if isinstance(value, tuple) else value


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Apply an EXIF orientation to (H, W, 3) or (H, W): 2-4 mirror or rotate by 180 degrees, 5-8 also transpose."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in _UPSIDE_DOWN:
        pixels = pixels[::-1]
    if orientation in _MIRRORED:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _stored_region(choose: Callable[[int, int], Region], height: int, width: int, orientation: int) -> Region:
    """Map the region chosen in the upright image to the stored image: the inverse of `upright`."""
    _refuse_bomb(height, width)
    is_transposed = orientation >= 5
    if is_transposed:
        height, width = width, height
    top, left, part_height, part_width = choose(height, width)
    if orientation in _MIRRORED:
        left = width - left - part_width
    if orientation in _UPSIDE_DOWN:
        top = height - top - part_height
    return (left, top, part_width, part_height) if is_transposed else (top, left, part_height, part_width)


def _reason(error: Exception) -> str:
    """The error in one line, without memory addresses, which differ between runs."""
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    return re.sub(r" at 0x[0-9a-f]+", "", line)
