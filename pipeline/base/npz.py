"""Reads arrays from `.npz` files that may be damaged, or made to do harm: any fault is one line. Needs numpy only."""

import io
import math
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pipeline.base.errors import UserError, raise_outage
from pipeline.base.files import open_regular
from pipeline.base.json_record import quoted
from pipeline.base.words import counted, on_one_line, printable

_MAX_REASON = 300


def read_arrays(
    source: Path | bytes,
    where: str,
    names: Iterable[str] | None = None,
    max_bytes: int | None = None,
    optional: Iterable[str] = (),
) -> dict[str, np.ndarray]:
    """The arrays of a file, or of its content, by name. names: of those to read, which must be there; None reads all. optional: read, too, if it is there.

    where: name of the file in errors. max_bytes: limit of each array. Nothing is unpickled, and no more memory is taken than the
    file's size allows: deflate packs at most 1,032 to 1. Raises FileNotFoundError, and UserError for all that is no such file.
    """
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open_regular(source) as raw:
            file = np.load(raw, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise UserError(f"{where}: holds one array; an .npz of named arrays is needed.")
            with file:
                check_sizes(file.zip)
                wanted = file.files if names is None else [*names, *(name for name in optional if name in file.files)]
                for entry in file.zip.infolist():
                    if entry.filename.removesuffix(".npy") in wanted:
                        if max_bytes is not None and entry.file_size > max_bytes:
                            raise ValueError(f'"{entry.filename}" has {counted(entry.file_size, "byte")}')
                        _check_array(file.zip, entry)
                return {name: np.asarray(file[name]) for name in wanted}
    except (UserError, FileNotFoundError):
        raise
    # A damaged zip or header can raise nearly anything: zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error,
    # SyntaxError, MemoryError, ... An array of objects raises ValueError.
    except Exception as error:
        raise_outage(error, where)
        reason = on_one_line(error)[:_MAX_REASON] or type(error).__name__
        if "allow_pickle" in reason or "pickled" in reason:
            reason = "it holds Python objects, which are never loaded because that can run code"
        raise UserError(f"{where}: not a readable .npz ({printable(reason)}).") from error


def check_sizes(archive: zipfile.ZipFile) -> None:
    """Raise ValueError if an entry's uncompressed size is impossible (deflate compresses at most 1,032 times)."""
    for entry in archive.infolist():
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f'"{entry.filename}" is compressed in a way that no such file is')
        factor = 1 if entry.compress_type == zipfile.ZIP_STORED else 1032
        if entry.file_size > factor * entry.compress_size + 64:
            raise ValueError(
                f'"{entry.filename}" claims {counted(entry.file_size, "byte")}, packed in {entry.compress_size:,}'
            )


def _check_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Raise ValueError if the array's header claims more values than the entry has; numpy would allocate memory for them."""
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if math.prod(shape) * dtype.itemsize > entry.file_size:
            raise ValueError(
                f'"{entry.filename}" claims {quoted(shape)} values, and has {counted(entry.file_size, "byte")}'
            )
