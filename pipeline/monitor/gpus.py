"""Data sheets of GPUs (gpus.yaml), by the name that CUDA gives them."""

import re
from dataclasses import dataclass

from pipeline.settings.yaml_reader import read_table

# Words of CUDA's names that tell no two GPUs of the table apart.
_NOT_SAID = re.compile("NVIDIA|TESLA|GEFORCE|SXM[2-6]?|HBM[23]E?|AC")


@dataclass(frozen=True)
class _GpuSheets:
    """Content of gpus.yaml, which explains the fields."""

    sheets: dict[str, tuple[float, int]]
    memory: dict[str, int]


_TABLES = read_table(__file__, _GpuSheets)
_KINDS = {re.sub("[- ]", "", kind.upper()): kind for kind in _TABLES.sheets}


@dataclass(frozen=True)
class Gpu:
    """A GPU model.

    kind: its key in the table. tflops: dense 16-bit peak. memory: nominal bytes (80 GB is 80e9).
    """

    kind: str
    tflops: float
    memory: int


def find_gpu(name: str) -> Gpu | None:
    """The data sheet of a GPU by CUDA's name or a short one: "NVIDIA A100-SXM4-80GB", "A100-80GB", "RTX4090".

    None if it is unknown, as a MIG slice is: every word of the name must be known.
    """
    words = re.sub(r"\b(\d+) GB\b", r"\1GB", name.upper().replace("-", " ")).split()
    sizes = [int(size[1]) for word in words if (size := re.fullmatch(r"(\d+)GB?", word))]
    said = [word for word in words if not _NOT_SAID.fullmatch(word) and not re.fullmatch(r"\d+GB?", word)]
    kind = _KINDS.get("".join(said))
    if kind is None or len(sizes) > 1:
        return None
    tflops, gigabytes = _TABLES.sheets[kind]
    if sizes:
        gigabytes = _TABLES.memory.get(f"{kind} {sizes[0]}", sizes[0])
    return Gpu(kind, tflops, gigabytes * 10**9)


def known_gpus() -> str:
    """Names that `find_gpu` knows, for a message."""
    return ", ".join(kind.replace(" ", "-") for kind in _TABLES.sheets)
