"""Published weights that are not in a given path: the cache of Hugging Face's tools, and commands that download them.

published.toml has the families. Nothing here uses a network.
"""

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

FAMILIES: dict[str, dict] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_HUB = "hf:/"  # hf://OWNER/NAME as a Path, which removes the second slash.
# Endings of files of weights; names of repositories have others, as vit_small_patch16_224.augreg_in21k.
SUFFIXES = (".npz", ".safetensors", ".bin", ".pt", ".pth", ".tar", ".onnx")
_CONFIGS = ("config.json", "open_clip_config.json")


def repository_of(path: Path) -> str | None:
    """OWNER/NAME of the repository on the Hugging Face hub that a path may name: hf://OWNER/NAME, or OWNER/NAME if that
    does not exist here.
    """
    text = str(path)
    if text.startswith(_HUB):
        return text.removeprefix(_HUB).strip("/")
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
    """Whether weights, as a setting names them, are in the cache of Hugging Face's tools or, by hf://, can be nowhere
    else.
    """
    repository = repository_of(Path(weights))
    return repository is not None and (weights.startswith(_HUB) or snapshot_of(repository) is not None)


def remedy(path: Path) -> str:
    """What to do about weights that do not exist."""
    repository = repository_of(path)
    if repository and not path.parent.is_dir():
        return (
            "If it is a run, train it first; if it is a repository of the Hugging Face hub, download it:"
            f" {hub_command(repository)}"
        )
    for pattern, where in (item for family in FAMILIES.values() for item in family.get("urls", {}).items()):
        if match := re.fullmatch(pattern, path.name):
            found = match.expand(where)
            if "://" in found:
                return f"Name other weights (docs/weights.md), or download these: {file_command(path, found)}"
            return f"Name other weights (docs/weights.md), or {found}, after {hub_command(found)}"
    return "Name a run, a checkpoint, a file of weights, or OWNER/NAME on the Hugging Face hub (docs/weights.md)."


def hub_command(repository: str) -> str:
    """The command that downloads a repository of the Hugging Face hub to the cache."""
    installs = "" if importlib.util.find_spec("huggingface_hub") else "pip install huggingface_hub && "
    return f"{installs}hf download {shlex.quote(repository)}"


def file_command(path: Path, url: str) -> str:
    """The command that downloads a file. -f: the server's page about an error is not taken for the file."""
    folder = "" if path.parent.is_dir() else "--create-dirs "
    return f"curl -fL {folder}-o {shlex.quote(str(path))} {url}"
