"""Speed and memory of a run, as its log line shows them: images/s, MFU, share of time waiting for data, peak memory."""

import re
import resource
import sys
import time
from dataclasses import dataclass

import torch

from pipeline.distributed import Ranks

# Dense 16-bit peak in TFLOP/s and gigabytes of memory by the name CUDA gives; the data sheets' figures without sparsity.
_GPUS = {
    "B200": (2250.0, 180),
    "H200": (989.0, 141),
    "H100 PCIe": (756.0, 80),
    "H100": (989.0, 80),
    "A100": (312.0, 40),
    "L40S": (362.0, 48),
    "L40": (181.0, 48),
    "L4": (121.0, 24),
    "V100": (125.0, 16),
}
_MEASURE_SIDE = 512
_MEASURE_SECONDS = 0.3


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU. kind: its row in the table. tflops: dense 16-bit peak. memory: nominal bytes (80 GB is 80e9)."""

    kind: str
    tflops: float
    memory: int


def find_gpu(name: str) -> Gpu | None:
    """The data sheet of a GPU by CUDA's name for it or a short one, as "NVIDIA A100-SXM4-80GB" or "A100-80GB"."""
    name = name.replace("-", " ")
    gigabytes = re.search(r"(\d+) ?GB\b", name)
    for kind, (tflops, memory) in _GPUS.items():
        if kind in name:
            return Gpu(kind, tflops, int(gigabytes[1] if gigabytes else memory) * 10**9)
    return None


def known_gpus() -> str:
    """The kinds that `find_gpu` knows, for a message."""
    return ", ".join(kind.replace(" ", "-") for kind in _GPUS)


def device_memory(device: torch.device) -> int | None:
    """Bytes that training may count on: nominal, which leaves the CUDA context its room; None on a CPU."""
    if device.type != "cuda":
        return None
    there = torch.cuda.get_device_properties(device).total_memory
    gpu = find_gpu(torch.cuda.get_device_name(device))
    return min(there, gpu.memory) if gpu else there


def peak_flops(device: torch.device, dtype: torch.dtype, configured_tflops: float) -> tuple[float, str]:
    """FLOP/s of one device at best, and where the figure is from: the config, a data sheet, or a measurement here."""
    if configured_tflops:
        return configured_tflops * 1e12, "engine.peak_tflops"
    if device.type == "cuda" and dtype != torch.float32:
        gpu = find_gpu(torch.cuda.get_device_name(device))
        if gpu:
            return gpu.tflops * 1e12, f"data sheet of {gpu.kind}"
    return _measured_flops(device, dtype), "matrix product timed at start"


def _measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    a = torch.ones(_MEASURE_SIDE, _MEASURE_SIDE, dtype=dtype, device=device)
    fastest = float("inf")
    begin = time.perf_counter()
    while time.perf_counter() - begin < _MEASURE_SECONDS:
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * _MEASURE_SIDE**3 / fastest


def peak_memory(device: torch.device) -> float:
    """Bytes: the most this rank has held on its GPU, or in host memory when it computes on the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


class Meter:
    """Rates between two log lines, without the time that evaluation and checkpoints took."""

    def __init__(self, ranks: Ranks, flops_per_image: float, peak: float) -> None:
        self.ranks, self.flops_per_image, self.peak = ranks, flops_per_image, peak
        self.total_images, self.total_seconds = 0, 0.0
        self._restart()

    def _restart(self) -> None:
        self.images, self.waited, self.away = 0, 0.0, 0.0
        self.begin = time.perf_counter()

    def step(self, images: int, waited: float) -> None:
        """Count one step of `images` over all ranks; this rank waited `waited` seconds for its data."""
        self.images += images
        self.waited += waited

    def exclude(self, seconds: float) -> None:
        """Time that was not training."""
        self.away += seconds

    @property
    def average(self) -> float:
        """Images/s over all readings."""
        return self.total_images / self.total_seconds if self.total_seconds else 0.0

    def read(self) -> dict[str, float]:
        """images_per_second, mfu, data_wait (of the slowest rank), peak_memory_gib since the last one. Collective."""
        seconds = max(time.perf_counter() - self.begin - self.away, 1e-9)
        rate = self.images / seconds
        self.total_images += self.images
        self.total_seconds += seconds
        reading = {
            "images_per_second": rate,
            "mfu": self.flops_per_image * rate / (self.ranks.world_size * self.peak),
            "data_wait": self.ranks.max(self.waited / seconds),
            "peak_memory_gib": self.ranks.max(peak_memory(self.ranks.device)) / 2**30,
        }
        self._restart()
        return reading
