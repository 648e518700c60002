"""Measurements on the JPEGs of a folder or a tar, repeated to a given number: their command line, and their images."""

import argparse
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

from data_tools.bench.record import BenchRecord
from pipeline.base.errors import UserError
from pipeline.settings.command import mistakes_in_one_line

_NUM_CLASSES = 10
_ENDINGS = (".jpg", ".jpeg")


def main(about: str | None, what: str, run: Callable[[argparse.Namespace, BenchRecord, Path], None]) -> None:
    """Call `run` with the arguments, the record, and a folder for images that is removed at the end."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder or tar of JPEGs")
    parser.add_argument("--images", type=int, default=4000, help="number of images; those of source are repeated")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="", help="file for the results")
    given = parser.parse_args()
    with mistakes_in_one_line(), tempfile.TemporaryDirectory() as folder:
        record = BenchRecord(what, given.json)
        run(given, record, Path(folder))
        record.write()


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
    files = list(islice(_jpegs(source), images))
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
    except (tarfile.TarError, EOFError):  # The second: of a compressed tar that is cut short.
        raise UserError(f"source = {source} is neither a folder nor an intact tar.") from None
