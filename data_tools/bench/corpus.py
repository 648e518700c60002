"""Images for benchmarks: the JPEGs of a folder or tar, repeated to a given number; also written as a folder of classes."""

import tarfile
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

from pipeline.errors import UserError

_NUM_CLASSES = 10
_ENDINGS = (".jpg", ".jpeg")


def write_raw(source: Path, folder: Path, images: int) -> list[tuple[Path, int]]:
    """Write `images` files folder/<class>/<number>.jpg, repeating those of the source; returns (path, class) of each.

    Raises UserError as `read_raw` does.
    """
    written = []
    for number, data in enumerate(read_raw(source, images)):
        label = number % _NUM_CLASSES
        path = folder / f"class{label}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        written.append((path, label))
    return written


def read_raw(source: Path, images: int) -> list[bytes]:
    """Read `images` JPEG files, repeating those of the source. Raises UserError if it is missing or has none."""
    if not source.exists():
        raise UserError(f"source = {source}: no such file or folder. Give a folder or a tar of JPEGs.")
    files = list(_jpegs(source))
    if not files:
        raise UserError(f"source = {source} holds no .jpg or .jpeg files.")
    return list(islice(cycle(files), images))


def _jpegs(source: Path) -> Iterator[bytes]:
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.suffix.lower() in _ENDINGS:
                yield path.read_bytes()
        return
    try:
        with tarfile.open(source) as tar:
            for member in tar:
                if member.isfile() and member.name.lower().endswith(_ENDINGS):
                    content = tar.extractfile(member)
                    assert content is not None
                    yield content.read()
    except tarfile.TarError:
        raise UserError(f"source = {source} is neither a folder nor a tar.") from None
