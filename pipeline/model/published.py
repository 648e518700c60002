"""Weights of the Hugging Face hub in the cache of its tools. Nothing here uses a network."""

import re
from pathlib import Path

# Endings of files of weights; names of repositories have others, as vit_small_patch16_224.augreg_in21k.
SUFFIXES = (".npz", ".safetensors", ".bin", ".pt", ".pth", ".tar", ".onnx")
_CONFIGS = ("config.json", "open_clip_config.json")


def repository_of(path: Path) -> str | None:
    """OWNER/NAME of the repository that a path may name; None if it exists here, or is no such name."""
    text = str(path)
    is_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) and path.suffix not in SUFFIXES
    return text if is_name and not path.exists() else None


def snapshot_of(repository: str) -> Path | None:
    """The folder of a repository in the cache of Hugging Face's tools; None if it is not there with its
    configuration.
    """
    try:
        from huggingface_hub import try_to_load_from_cache  # Optional: only weights of the hub need it.

        found = (try_to_load_from_cache(repository, name) for name in _CONFIGS)
        return next((Path(file).parent for file in found if isinstance(file, str)), None)
    except (ImportError, ValueError):  # Not a name that the hub allows.
        return None


def is_of_hub(weights: str) -> bool:
    """Whether weights, as a setting names them, are in the cache of Hugging Face's tools."""
    repository = repository_of(Path(weights))
    return repository is not None and snapshot_of(repository) is not None


# What to do about weights that do not exist.
REMEDY = (
    "Name a run, a checkpoint, a file of weights, or OWNER/NAME on the Hugging Face hub after hf download OWNER/NAME"
    " (docs/weights.md)."
)
