"""Reads arrays from `.npz` files that may be damaged: any fault is one line. Needs numpy only."""

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pipeline.base.errors import UserError, raise_outage
from pipeline.base.words import on_one_line, printable


def read_arrays(
    source: Path | bytes,
    where: str,
    names: Iterable[str] | None = None,
    optional: Iterable[str] = (),
) -> dict[str, np.ndarray]:
    """The arrays of a file, or of its content, by name. names: of those to read, which must be there; None reads all.
    optional: read, too, if it is there.

    where: name of the file in errors. Nothing is unpickled. Raises FileNotFoundError, and UserError for anything but
    such a file.
    """
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as raw:
            file = np.load(raw, allow_pickle=False)
            with file:
                wanted = file.files if names is None else [*names, *(name for name in optional if name in file.files)]
                return {name: np.asarray(file[name]) for name in wanted}
    except (UserError, FileNotFoundError):
        raise
    # A damaged zip or header can raise nearly anything: zlib.error, EOFError, NotImplementedError, RuntimeError,
    # struct.error, SyntaxError, MemoryError, ... An array of objects raises ValueError.
    except Exception as error:
        raise_outage(error, where)
        reason = printable(on_one_line(error)[:300]) or type(error).__name__
        raise UserError(f"{where}: not an .npz that is readable without Python objects ({reason}).") from error
