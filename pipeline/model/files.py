"""Weights files: where they lie, opened without running anything in them, and written whole or not at all."""

import hashlib
import importlib
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pipeline import json_record
from pipeline.committed import CHECKSUMS, LATEST, Checksum, mend_pointer, newest_whole
from pipeline.errors import UserError
from pipeline.files import replacing
from pipeline.model.convert.state_dicts import Beside

WAY_OUT = "Use the checkpoint before it, or fetch the file again."
# As Hugging Face and timm call them; config.json beside them is theirs.
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")
_FILES = (*_HUB_FILES, "model.pt")  # Of a folder. The last one was ours in checkpoints of earlier versions.
# Where training scripts put the state dict in what they save.
_WRAPPERS = ("state_dict", "model")
_MOST_OF_AN_ERROR = 1000  # Characters that are repeated.
_MOST_JSON = 1 << 26  # Bytes of a configuration file; those of 21,843 classes have 2 MB.


def find_file(path: Path) -> Path:
    """The weights file of a file, a checkpoint folder, a run folder, or a folder of Hugging Face or timm."""
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(f"{path}: no such file or folder.")
    for name in _FILES:
        if (path / name).is_file():
            return path / name
    folder = path / "checkpoints"
    if (newest := newest_whole(folder)) is not None and (newest / "model.safetensors").is_file():
        mend_pointer(folder, newest.name)
        return newest / "model.safetensors"
    pointer = folder / LATEST
    if not pointer.is_file():
        raise UserError(
            f"{path}: holds none of checkpoints/latest, {', '.join(_FILES)} (in one file). Name a checkpoint, a run, or a file."
        )
    name = pointer.read_text(errors="replace").strip()
    found = [folder / name / file for file in _FILES if name.isprintable() and name]
    for file in found:
        if file.is_file():
            return file
    raise UserError(f'{pointer}: names "{name[:200]}", but no weights are there. Name another checkpoint folder.')


def beside(path: Path) -> Beside:
    """The configuration files beside a file that Hugging Face or timm named."""
    if path.name not in _HUB_FILES:
        return Beside()
    return Beside(*(_read_json(path.with_name(name), dict) for name in ("config.json", "preprocessor_config.json")))


def open_torch(path: Path) -> Any:
    """What torch.save wrote, plain data and tensors only. Raises UserError for a damaged file, or one with more in it."""
    try:
        # torch.load does not compare checksums: a flipped bit would become a wrong weight. Old files are no zips.
        damaged = None
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                check_sizes(archive)
                damaged = archive.testzip()
        content = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # PyTorch's own text advises weights_only=False, which would run whatever the file says.
        raise UserError(
            f"{path}: not a readable weights file (it is damaged, or holds more than tensors and plain data, which is never "
            "loaded because that can run code). Fetch it again; or, in the environment that it comes from and only if you "
            "trust its source, save the state dict as .safetensors."
        ) from error
    except Exception as error:  # Whatever a damaged file makes of its reader.
        raise UserError(f"{path}: not a readable weights file ({one_line(error)}). {WAY_OUT}") from error
    if damaged:
        raise UserError(f'{path}: damaged, the checksum of "{one_line(damaged)}" is wrong. {WAY_OUT}')
    return content


def check_sizes(archive: zipfile.ZipFile) -> None:
    """Raise ValueError for a zip that claims to unpack to more than its bytes can hold (deflate: 1,032 times)."""
    for entry in archive.infolist():
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f'"{entry.filename}" is compressed in a way that no weights file is')
        factor = 1 if entry.compress_type == zipfile.ZIP_STORED else 1032
        if entry.file_size > factor * entry.compress_size + 64:
            raise ValueError(f'"{entry.filename}" claims {entry.file_size:,} bytes, packed in {entry.compress_size:,}')


def state_dict_in(content: Any) -> Mapping[str, Tensor] | None:
    """The tensors by name in what a training script saved, or None."""
    if isinstance(content, Mapping):
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), content)
        if inner and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in inner.items()):
            return inner
    return None


def open_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors by name, the file's own metadata)."""
    library = optional("safetensors", f"to read {path}")
    # The file itself has no checksum; a checkpoint's says what it was.
    expected = _checksum_of(path)
    if expected is not None:
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                raise UserError(f"{path}: damaged, its checksum is wrong. {WAY_OUT}")
    try:
        with library.safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118 - no dict
    except Exception as error:  # Whatever a damaged header makes of the library: also KeyError, for a new dtype.
        raise UserError(f"{path}: not a readable .safetensors ({one_line(error)}). {WAY_OUT}") from error


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """As transformers and timm read them; whole or not at all."""
    library = optional("safetensors.torch", f"to write {path}")
    content = library.save(dict(tensors), {"format": "pt", **(metadata or {})})
    with replacing(path) as file:
        file.write(content)


def optional(name: str, purpose: str) -> ModuleType:
    """Import a package that is not everyone's. Raises UserError when it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{package} is needed {purpose}: pip install {package}.") from error


def _read_json(path: Path, kind: Any) -> Any:
    """The content of a JSON file that may be missing: {} then."""
    try:
        return json_record.read(path, kind, _MOST_JSON)
    except FileNotFoundError:
        return {}


def one_line(error: Exception | str) -> str:
    """A text as part of a line: names of tensors, and what a library says, may hold any characters."""
    words = " ".join(str(error).split()) or type(error).__name__
    text = "".join(letter if letter.isprintable() else "?" for letter in words)
    return text if len(text) <= _MOST_OF_AN_ERROR else f"{text[:_MOST_OF_AN_ERROR]}..."


def _checksum_of(path: Path) -> Checksum | None:
    """What the checkpoint that a file belongs to says of it; None for a file of others. Raises UserError for a damaged one."""
    try:
        return json_record.read(path.with_name(CHECKSUMS), dict[str, Checksum]).get(path.name)
    except FileNotFoundError:
        return None
