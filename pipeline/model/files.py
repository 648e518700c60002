"""Weights files: finding them, opening them without executing code from them, and writing them atomically."""

import contextlib
import hashlib
import importlib
import json
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pipeline.base import json_record
from pipeline.base.errors import UserError, raise_outage
from pipeline.base.files import as_bytes, replacing
from pipeline.base.words import missing, on_one_line
from pipeline.model import published
from pipeline.model.convert.layouts import ConfigFiles
from pipeline.process.committed import CHECKSUMS, GONE, LATEST, Checksum, checkpoints_of, newest_complete
from pipeline.process.start import rank

StrPath = str | os.PathLike[str]
ADVICE = "Use the previous checkpoint, or download the file again."
INDEX = ".index.json"  # Ending of the file that names the shards of weights in several files.
# Names that Hugging Face, timm and open_clip use.
_WHOLE = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")
FILES = (*_WHOLE, *(f"{name}{INDEX}" for name in _WHOLE[:2]))
# Keys under which training scripts save the state dict; target_encoder: I-JEPA and MSN.
_WRAPPERS = ("state_dict", "model", "target_encoder")
_MAX_ERROR = 1000  # Characters of a library's error that are repeated.


def _note(line: str) -> None:
    if rank() == 0:
        print(f"note: {line}", file=sys.stderr, flush=True)


def find_file(path: Path, say: Callable[[str], object] = _note) -> Path:
    """The weights file of a file, a checkpoint folder, a run folder or that of its checkpoints, or a folder of Hugging
    Face or timm.

    The last may also be in the cache of Hugging Face's tools: OWNER/NAME, unless that is a path.
    For weights in several files it is their index. Of a run it is that of the newest checkpoint; say: called with a
    line for each newer one that is damaged. Raises UserError if there is none.
    """
    repository = published.repository_of(path)
    if repository and (snapshot := published.snapshot_of(repository)) and (file := _weights_in(snapshot)):
        return file
    if path.is_file():
        index = path.with_name(re.sub(r"-\d+-of-\d+(\.\w+)$", rf"\1{INDEX}", path.name))
        return index if index.is_file() else path
    if not path.exists():
        raise UserError(missing(repository or path, way_out=published.REMEDY))
    if (file := _weights_in(path)) is not None:
        return file
    folder = path if newest_complete(path) else checkpoints_of(path)
    if isinstance(folder, str):
        raise UserError(
            f"{path}: its checkpoints are in {folder} (checkpoint.folder), and weights are not read from buckets. Copy"
            f" the one that {LATEST} there names to a disk, and name the copy."
        )
    damaged: list[str] = []
    newest = newest_complete(folder, damaged.append)
    for line in damaged:
        say(line)
    if newest is not None and (newest / "model.safetensors").is_file():
        return newest / "model.safetensors"
    if (pointer := folder / LATEST).is_file():
        name = pointer.read_bytes().decode(errors="replace").strip()
        if name and name.isprintable() and (file := _weights_in(folder / name)) is not None:
            if damaged:
                say(f"no checkpoint in {folder} is complete: the weights in {name} are read all the same.")
            return file
    raise UserError(
        f"{path}: contains neither {', '.join(FILES)} nor a checkpoint with weights (in {folder}). Name a checkpoint, a"
        " run, or a file."
    )


def _weights_in(folder: Path) -> Path | None:
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def open_shards(index: Path) -> dict[str, Tensor]:
    """The tensors of weights in several files, named by their index. Raises UserError for a missing shard or tensor."""
    places = json_record.convert(json_record.read(index, dict).get("weight_map"), dict[str, str], str(index))
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        file = index.parent / name
        if Path(name).name != name or not file.is_file():
            raise UserError(f"{index}: its shard {one_line(name)} is missing. Download it again.")
        content = open_safetensors(file)[0] if file.suffix == ".safetensors" else state_dict_in(open_torch(file))
        tensors |= content or {}
    if missing := sorted(places.keys() - tensors.keys()):
        raise UserError(f'{index}: "{one_line(missing[0])}" is in none of its shards ({len(missing)} such). {ADVICE}')
    return tensors


def config_files(path: Path) -> ConfigFiles:
    """The configuration files in the folder of a file of Hugging Face or timm; empty for other files."""
    if path.name not in FILES:
        return ConfigFiles()
    names = ("config.json", "preprocessor_config.json", "open_clip_config.json")
    return ConfigFiles(*(_read_json(path.with_name(name)) for name in names))


def _read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; {} if it does not exist."""
    try:
        return json_record.read(path, dict)
    except FileNotFoundError:
        return {}


def open_torch(path: Path) -> Any:
    """The content of a torch.save file. Raises UserError if it is damaged, of another format, or holds more than plain
    data and tensors.
    """
    try:
        # torch.load does not verify the zip's checksums, so a flipped bit would become a wrong weight. Files of old
        # torch versions are not zips.
        damaged = None
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        content = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # A damaged file can raise nearly anything.
        raise_outage(error, path)
        # PyTorch's own message suggests weights_only=False, which would execute code from the file.
        is_code = isinstance(error, pickle.UnpicklingError)
        why = "it is damaged, or holds more than tensors and plain data" if is_code else one_line(error)
        raise UserError(
            f"{path}: not a readable weights file ({why}). Download it again, or save its state dict as .safetensors"
            " where it comes from."
        ) from error
    if damaged:
        raise UserError(f'{path}: damaged, the checksum of "{one_line(damaged)}" is wrong. {ADVICE}')
    return content


def state_dict_in(content: Any) -> Mapping[str, Tensor] | None:
    """The state dict, perhaps wrapped, in the content of a training script's file; None if there is none."""
    if isinstance(content, Mapping):
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), content)
        if inner and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in inner.items()):
            return inner
    return None


def is_safetensors(path: Path) -> bool:
    """Whether a file is a .safetensors, by name or content: its header is JSON after 8 bytes."""
    if path.suffix == ".safetensors":
        return True
    with open(path, "rb") as file:
        return file.read(9)[8:] == b"{"


def open_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors by name, the file's metadata). Raises UserError for a damaged file."""
    library = optional("safetensors", f"to read {path}")
    try:
        # The format has no checksum, but a checkpoint records one.
        expected = json_record.convert(_read_json(path.with_name(CHECKSUMS)), dict[str, Checksum], CHECKSUMS).get(
            path.name
        )
        if expected is not None:
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                    raise UserError(f"{path}: damaged, its checksum is wrong. {ADVICE}")
        with library.safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118 - no dict
    except UserError:
        raise
    except Exception as error:  # A damaged header can raise nearly anything, KeyError for an unknown dtype among it.
        raise_outage(error, path)
        if not path.exists():  # FileNotFoundError, or SafetensorError where it was removed a moment later.
            raise UserError(f"{path}: {GONE}, or run the same command again.") from None
        raise UserError(f"{path}: not a readable .safetensors ({one_line(error)}). {ADVICE}") from error


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a .safetensors, by default one that transformers and timm can read. The file is replaced atomically.

    metadata: of one key, so that the same tensors and metadata give the same bytes: the order of several changes.
    """
    library = optional("safetensors.torch", f"to write {path}")
    with replacing(path) as file:
        file.write(library.save(dict(tensors), metadata or {"format": "pt"}))


def write_folder(folder: Path, tensors: Mapping[str, Tensor], jsons: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a new folder as Hugging Face and timm have it: model.safetensors and configuration files by name."""
    folder.mkdir(parents=True)
    write_safetensors(tensors, folder / "model.safetensors")
    for name, content in jsons.items():
        (folder / name).write_bytes(as_bytes(json.dumps(content, indent=2, ensure_ascii=False) + "\n"))


def optional(name: str, purpose: str) -> ModuleType:
    """Import a package that `pipeline.model` does not require. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{package} is needed {purpose}: pip install {package}.") from error


@contextlib.contextmanager
def naming(path: StrPath) -> Iterator[None]:
    """Put the path before the message of a UserError of the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {one_line(error)}") from error


def one_line(error: Exception | str) -> str:
    """A message shortened to one printable line: tensor names and libraries' messages may hold any characters."""
    words = on_one_line(error) or type(error).__name__
    text = "".join(letter if letter.isprintable() else "?" for letter in words)
    return text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}..."
