"""Speed and memory of a run as in its log line: images/s, MFU, shares of time, peak memory."""

import contextlib
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch

from pipeline.monitor.gpus import find_gpu
from pipeline.process.distributed import Ranks
from pipeline.process.launcher import ranks_on_host

# Share of a GPU's memory that training may use: 80 GB of the 85 GB that CUDA reports for an H100-80GB. The CUDA
# context, and the buffers of cuBLAS and NCCL, take the rest.
_USABLE = 0.94


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


def peak_flops(device: torch.device, dtype: torch.dtype, configured_tflops: float = 0.0) -> tuple[float | None, str]:
    """Returns (peak FLOP/s of one device, its source: the setting or a data sheet); None if neither says it, as for a
    CPU and for fp32.
    """
    if configured_tflops:
        return configured_tflops * 1e12, "engine.peak_tflops"
    if device.type == "cuda" and dtype != torch.float32 and (gpu := find_gpu(torch.cuda.get_device_name(device))):
        return gpu.tflops * 1e12, f"data sheet of {gpu.kind}"
    return None, ""


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
    """Rates between two records, and between two log lines, without the time of evaluations and checkpoints.

    flops_per_image: of training on an image. peak: of a device; None if it is unknown.
    """

    def __init__(self, ranks: Ranks, clock: StepClock, flops_per_image: float, peak: float | None) -> None:
        self.ranks, self.clock, self.flops_per_image, self.peak = ranks, clock, flops_per_image, peak
        self.total_images, self.total_seconds = 0, 0.0
        self._images, self._paused_seconds, self._parts = 0, 0.0, dict.fromkeys(PARTS, 0.0)
        self.restart()

    def restart(self) -> None:
        """Leave out what came before: the next readings begin here."""
        self._at = dict.fromkeys(("record", "line"), self._now())

    def step(self, images: int) -> None:
        """Count a step of `images` images over all ranks."""
        self._images += images

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the rates. If it raises, its time counts."""
        begin = time.perf_counter()
        yield
        self._paused_seconds += time.perf_counter() - begin

    @property
    def average(self) -> float:
        """Images/s over all readings for records."""
        return self.total_images / self.total_seconds if self.total_seconds else 0.0

    def read(self, since: Literal["record", "line"]) -> list[float]:
        """This rank's numbers since the last record or log line, for `rates`."""
        now = self._now()
        spent, self._at[since] = now - self._at[since], now
        if since == "record":
            self.total_seconds += spent[0]
            self.total_images += int(spent[1])
        return [*spent.tolist(), peak_memory(self.ranks.device)]

    def rates(self, read: Sequence[Sequence[float]]) -> dict[str, float]:
        """images_per_second, mfu (if the peak is known), peak_memory_gib and shares of time. read: by every rank.

        data_wait is the slowest rank's share of training time; time_forward, ... are mean shares of training and
        checkpoints.
        """
        seconds, images, *parts, _ = read[self.ranks.rank]
        seconds = max(seconds, 1e-9)
        _, _, *of_ranks, memory = zip(*read, strict=True)
        by_part = dict(zip(PARTS, of_ranks, strict=True))
        flops = images / seconds * self.flops_per_image / self.ranks.world_size
        total = seconds + parts[PARTS.index("checkpoint")]
        return {
            "images_per_second": images / seconds,
            **({"mfu": flops / self.peak} if self.peak else {}),
            "data_wait": max(by_part.pop("data")) / seconds,
            "peak_memory_gib": max(memory) / 2**30,
            **{f"time_{part}": sum(values) / len(values) / total for part, values in by_part.items()},
        }

    @staticmethod
    def own_seconds(read: Sequence[Sequence[float]]) -> list[float]:
        """Seconds of each rank's own work: data and forward passes, before it waits for others."""
        return [data + forward for _, _, data, forward, *_ in read]

    def _now(self) -> np.ndarray:
        """Seconds without pauses, images over all ranks, and seconds of this rank by `PARTS`, from any time on."""
        for part, seconds in self.clock.read().items():
            self._parts[part] += seconds
        return np.array([time.perf_counter() - self._paused_seconds, self._images, *self._parts.values()])
