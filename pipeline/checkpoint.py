"""Checkpoints on disk: whole or invisible.

    checkpoints/step-00001000/engine/...        every rank's weights and optimizer state
    checkpoints/step-00001000/model.pt          the model alone, fp32 (pipeline.model.load reads it)
    checkpoints/step-00001000/state.json        step, samples seen, plan, fingerprint of the data, the settings
    checkpoints/step-00001000/checksums.json    size and SHA-256 of every file above
    checkpoints/latest                          the name of the newest, replaced atomically

Files are written below a hidden name, then checksummed and flushed, then renamed, then pointed at. What a kill leaves
behind has a hidden name and is removed at the next start.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

_NAME = re.compile(r"step-(\d{8,})")


class Checkpoints:
    """The checkpoints of one run. Only rank 0 begins, commits, prunes and sweeps."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._refused: set[Path] = set()

    def begin(self, step: int) -> Path:
        """An empty hidden folder to write the checkpoint of `step` into."""
        path = self.folder / f".writing-step-{step:08d}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def commit(self, path: Path, state: dict[str, Any]) -> Path:
        """Make the folder that `begin` gave visible, with its state, and point at it; then drop the oldest.

        Damaged ones do not count among those to keep, and go once a newer one is committed.
        """
        write_atomically(path / "state.json", json.dumps(state, indent=1))
        files = sorted(file for file in path.rglob("*") if file.is_file())
        checksums = {str(file.relative_to(path)): checksum(file) for file in files}
        write_atomically(path / "checksums.json", json.dumps(checksums, indent=1))
        for file in files:
            _flush(file)
        for folder in [path, *(file for file in path.rglob("*") if file.is_dir())]:
            _flush(folder)
        final = self.folder / path.name.removeprefix(".writing-")
        if final.exists():  # Of this same step, and damaged, or we would have resumed from it.
            _remove(final)
        os.rename(path, final)
        _flush(self.folder)
        write_atomically(self.folder / "latest", final.name)
        self._refused.discard(final)
        older = [old for old in self.candidates() if _step(old) <= _step(final)]
        kept = [old for old in older if old not in self._refused][: self.keep]
        for old in older:
            if old not in kept:
                _remove(old)
        return final

    def candidates(self) -> list[Path]:
        """Committed checkpoints, newest first. A name that is not hidden was whole when it appeared."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=_step, reverse=True)

    def newest_whole(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that verifies, or None; and a line for each newer one that did not."""
        refused: list[str] = []
        for path in self.candidates():
            problem = verify(path)
            if problem is None:
                return path, refused
            self._refused.add(path)
            refused.append(f"{path} is damaged ({problem}): not used.")
        return None, refused

    def sweep(self) -> None:
        """Remove what an interrupted write left behind."""
        if self.folder.is_dir():
            for path in [*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")]:
                shutil.rmtree(path, ignore_errors=True)


def verify(path: Path) -> str | None:
    """What is wrong with a committed checkpoint, or None when it is made of the files that were committed, to the bit."""
    try:
        expected = json.loads((path / "checksums.json").read_text())
    except (OSError, ValueError):
        expected = None
    if not isinstance(expected, dict):
        return "checksums.json is missing or unreadable"
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {"checksums.json"}
    if unknown := found - expected.keys():
        return f"{min(unknown)} has no checksum"
    for name, checksums in expected.items():
        try:
            if checksum(path / name) != checksums:
                return f"{name} does not match its checksum"
        except OSError:
            return f"{name} is missing"
    return None


def free_bytes(folder: Path) -> int:
    """Space left where `folder` lies, or will lie."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a verified checkpoint."""
    return json.loads((path / "state.json").read_text())


def checksum(file: Path) -> dict[str, Any]:
    """{"bytes": int, "sha256": hex} of a file."""
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file so that a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        # A failed write() does not know its file, and "no space left" is of little use without.
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def _remove(path: Path) -> None:
    # Hidden first: a kill in the middle must not leave half a checkpoint under its name.
    hidden = path.with_name(f".removing-{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)  # What stays is hidden, and swept at the next start.


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
