"""Data sheets of GPUs, by the name that CUDA gives them."""

import re
from dataclasses import dataclass

# From NVIDIA's data sheets, for RTX cards also the white papers of their architectures: dense 16-bit peak with fp32 accumulation
# in TFLOP/s (figures without sparsity), memory in gigabytes, its bandwidth in GB/s, and the bandwidth of the links to all other
# GPUs of a server in GB/s and direction: NVLink with switches, else PCIe x16 (a bridge connects few cards only).
_GPUS = {
    "B300": (2250.0, 288, 8000.0, 900.0),  # HGX B300: 36 PFLOP/s with sparsity of 8
    "GB300": (2500.0, 279, 8000.0, 900.0),  # GB300 NVL72: 360 PFLOP/s with sparsity and 20.1 TB of 72
    "B200": (2250.0, 180, 8000.0, 900.0),
    "GB200": (2500.0, 186, 8000.0, 900.0),  # GB200 NVL72: 360 PFLOP/s with sparsity and 13.4 TB of 72
    "H200": (989.0, 141, 4800.0, 450.0),
    "H200 NVL": (835.5, 141, 4800.0, 64.0),
    "GH200": (989.0, 96, 4000.0, 450.0),
    "H100": (989.0, 80, 3350.0, 450.0),
    "H100 PCIe": (756.0, 80, 2000.0, 64.0),
    "H100 NVL": (835.5, 94, 3900.0, 64.0),
    "H800": (989.0, 80, 3350.0, 200.0),
    "H800 PCIe": (756.0, 80, 2000.0, 64.0),
    "H20": (148.0, 96, 4000.0, 450.0),
    "H20 3e": (148.0, 141, 4800.0, 450.0),
    "A100": (312.0, 40, 1555.0, 300.0),
    "A100 PCIe": (312.0, 40, 1555.0, 32.0),
    "A100X": (318.5, 80, 2039.0, 32.0),
    "A800": (312.0, 80, 2039.0, 200.0),
    "A800 PCIe": (312.0, 80, 1935.0, 32.0),
    "A40": (149.7, 48, 696.0, 32.0),
    "A30": (165.0, 24, 933.0, 32.0),
    "A10": (125.0, 24, 600.0, 32.0),
    "A10G": (70.0, 24, 600.0, 32.0),
    "L40S": (362.0, 48, 864.0, 32.0),
    "L40": (181.0, 48, 864.0, 32.0),
    "L4": (121.0, 24, 300.0, 32.0),
    "T4": (65.0, 16, 320.0, 16.0),
    "V100": (125.0, 16, 900.0, 150.0),
    "V100 PCIe": (112.0, 16, 900.0, 16.0),
    "V100S PCIe": (130.0, 32, 1134.0, 16.0),
    # Of workstation cards 4 times the data sheet's fp32 figure, of GeForce cards 2 times, as in the white papers' tables.
    "RTX PRO 6000 Blackwell Workstation Edition": (503.8, 96, 1792.0, 64.0),
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": (438.9, 96, 1792.0, 64.0),
    "RTX PRO 6000 Blackwell Server Edition": (480.0, 96, 1597.0, 64.0),
    "RTX 6000 Ada Generation": (364.2, 48, 960.0, 32.0),
    "RTX A6000": (154.8, 48, 768.0, 32.0),
    "RTX 5090": (209.5, 32, 1792.0, 64.0),
    "RTX 4090": (165.2, 24, 1008.0, 32.0),
    "RTX 3090": (71.0, 24, 936.0, 32.0),
}
# (kind, gigabytes in the name) -> (gigabytes, GB/s): faster memory of the same chip; of Grace Hopper, 120 and 480 are the CPU's.
_MEMORY = {
    ("A100", 80): (80, 2039.0),
    ("A100 PCIe", 80): (80, 1935.0),
    ("GH200", 120): (96, 4000.0),
    ("GH200", 480): (96, 4000.0),
    ("GH200", 144): (144, 4900.0),
}
# Words of CUDA's names that tell no two GPUs of the table apart.
_NOT_SAID = re.compile("NVIDIA|TESLA|GEFORCE|SXM[2-6]?|HBM[23]E?|AC")
_KINDS = {kind.upper().replace("-", " "): kind for kind in _GPUS}


@dataclass(frozen=True)
class Gpu:
    """A GPU model.

    kind: its key in the table. tflops: dense 16-bit peak. memory: nominal bytes (80 GB is 80e9). bandwidth: of its memory,
    bytes/s. link: to the other GPUs of its server, bytes/s in each direction.
    """

    kind: str
    tflops: float
    memory: int
    bandwidth: float
    link: float


def find_gpu(name: str) -> Gpu | None:
    """The data sheet of a GPU by CUDA's name or a short one: "NVIDIA A100-SXM4-80GB", "A100-80GB".

    None if it is unknown, as a MIG slice is: every word of the name must be known.
    """
    words = re.sub(r"\b(\d+) GB\b", r"\1GB", name.upper().replace("-", " ")).split()
    sizes = [int(size[1]) for word in words if (size := re.fullmatch(r"(\d+)GB?", word))]
    said = [word for word in words if not _NOT_SAID.fullmatch(word) and not re.fullmatch(r"\d+GB?", word)]
    kind = _KINDS.get(" ".join(said))
    if kind is None or len(sizes) > 1:
        return None
    tflops, gigabytes, bandwidth, link = _GPUS[kind]
    if sizes:
        gigabytes, bandwidth = _MEMORY.get((kind, sizes[0]), (sizes[0], bandwidth))
    return Gpu(kind, tflops, gigabytes * 10**9, bandwidth * 1e9, link * 1e9)


def known_gpus() -> str:
    """Names that `find_gpu` knows, for a message."""
    return ", ".join(kind.replace(" ", "-") for kind in _GPUS)
