"""The command line of measurements on JPEGs of a folder or a tar."""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from data_tools.bench.record import BenchRecord
from pipeline.settings.command import mistakes_in_one_line
from pipeline.settings.commands.bench import RecordConfig


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
        record = BenchRecord(what, RecordConfig(json=given.json))
        run(given, record, Path(folder))
        record.finish()
