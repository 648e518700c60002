"""Speed and memory of a run as in its log line: images/s, MFU, shares of time, peak memory."""

import contextlib
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.benchmark import Timer

from pipeline.monitor.gpus import find_gpu
from pipeline.process.distributed import Ranks
from pipeline.process.launcher import ranks_on_host

# Share of a GPU's memory that training may use: 80 GB of the 85 GB that CUDA reports for an H100-80GB. The CUDA
# context, and the buffers of cuBLAS and NCCL, take the rest.
_USABLE = 0.94
# Sides of the matrices whose product is timed. Smaller ones would measure the time of a launch on a GPU; larger ones
# wait for other processes on a busy CPU.
_SIDES = {"cuda": 8192, "cpu": 512}
_MEASURE_SECONDS = 0.1


def device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU, or of its MIG slice, that training may use: what CUDA reports without `_USABLE`'s rest. None on a
    CPU.
    """
    if device.type != "cuda":
        return None
    return int(_USABLE * torch.cuda.get_device_properties(device).total_memory)


def host_memory() -> int:
    """Bytes of memory and swap for each rank of this host, within the container's limit."""
    total = psutil.virtual_memory().total + psutil.swap_memory().total
    with contextlib.suppress(OSError, ValueError):  # No container, or no limit ("max").
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // ranks_on_host()


def peak_flops(device: torch.device, dtype: torch.dtype, configured_tflops: float) -> tuple[float, str]:
    """Returns (peak FLOP/s of one device, its source: the setting, a data sheet, or a measurement here)."""
    if configured_tflops:
        return configured_tflops * 1e12, "engine.peak_tflops"
    if device.type == "cuda" and dtype != torch.float32:
        gpu = find_gpu(torch.cuda.get_device_name(device))
        if gpu:
            return gpu.tflops * 1e12, f"data sheet of {gpu.kind}"
    side = _SIDES[device.type]
    return 2 * side**3 / _product_seconds(side, device, dtype), "matrix product timed at start"


def _product_seconds(side: int, device: torch.device, dtype: torch.dtype) -> float:
    """The fastest product of two (side, side) matrices, in seconds."""
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    timer = Timer("a @ a", globals={"a": matrix}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=_MEASURE_SECONDS).times)


def peak_memory(device: torch.device) -> float:
    """Peak bytes of this rank on its GPU, or in host memory if it computes on the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # Linux counts in KiB.


class StepClock:
    """Seconds that a rank spends in each part of a step (`PARTS`).

    On a GPU the parts are timed by CUDA events that are read later, so that nothing waits for them; "data" is the time
    that the host waited.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def host(self, part: str) -> Iterator[None]:
        """Add the time of the block on the host."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - begin

    @contextmanager
    def device(self, part: str) -> Iterator[None]:
        """Add the time of the block's work on the device."""
        if not self.on_gpu:
            with self.host(part):
                yield
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((part, begin, end))

    def read(self) -> dict[str, float]:
        """Seconds of each part since the last call. Waits for the GPU."""
        if self._events:
            torch.cuda.synchronize()
        for part, begin, end in self._events:
            self._seconds[part] += begin.elapsed_time(end) / 1e3
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return seconds


PARTS = ("data", "forward", "backward", "optimizer", "checkpoint")


class Meter:
    """Rates between two log lines, without the time of evaluations and checkpoints.

    flops_per_image: of training on an image.
    """

    def __init__(self, ranks: Ranks, clock: StepClock, flops_per_image: float, peak: float) -> None:
        self.ranks, self.clock, self.flops_per_image, self.peak = ranks, clock, flops_per_image, peak
        self.total_images, self.total_seconds = 0, 0.0
        # Seconds of each rank's own work in the last reading: data and forward passes, before it waits for others.
        self.own_seconds: list[float] = [0.0] * ranks.world_size
        self.restart()

    def restart(self) -> None:
        """Leave out what came before: the next reading begins here."""
        self.images, self.paused_seconds = 0, 0.0
        self.begin = time.perf_counter()

    def step(self, images: int) -> None:
        """Count a step of `images` images over all ranks."""
        self.images += images

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the rates. If it raises, its time counts."""
        begin = time.perf_counter()
        yield
        self.paused_seconds += time.perf_counter() - begin

    @property
    def average(self) -> float:
        """Images/s over all readings."""
        return self.total_images / self.total_seconds if self.total_seconds else 0.0

    def read(self) -> dict[str, float]:
        """images_per_second, mfu, peak_memory_gib and shares of time since the last reading. Collective.

        data_wait is the slowest rank's share of training time; time_forward, ... are mean shares of training and
        checkpoints.
        """
        seconds = max(time.perf_counter() - self.begin - self.paused_seconds, 1e-9)
        rate = self.images / seconds
        self.total_images += self.images
        self.total_seconds += seconds
        parts = self.clock.read()
        rank_parts = self.ranks.gather([parts.get(part, 0.0) for part in PARTS])
        self.own_seconds = [data + forward for data, forward, *_ in rank_parts]
        total = seconds + parts.get("checkpoint", 0.0)
        reading = {
            "images_per_second": rate,
            "mfu": rate * self.flops_per_image / (self.ranks.world_size * self.peak),
            "data_wait": max(data for data, *_ in rank_parts) / seconds,
            "peak_memory_gib": self.ranks.max(peak_memory(self.ranks.device)) / 2**30,
        }
        for part, values in list(zip(PARTS, zip(*rank_parts, strict=True), strict=True))[1:]:
            reading[f"time_{part}"] = sum(values) / len(values) / total
        self.restart()
        return reading
