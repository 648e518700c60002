"""Use of the hosts of a run: processors, memory, disks, network, GPUs. MLflow shows names that begin with `system/` apart."""

import contextlib
import ctypes
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import psutil

from pipeline.process.distributed import Ranks

# With more hosts than this, mean and maximum over the hosts are recorded instead of each host.
_MAX_HOSTS = 16
# NVIDIA's library of GPU readings, which its driver installs; called as nvml.h declares it. Not by the package nvidia-ml-py: where
# that is installed, DeepSpeed 0.19.8 cannot start if CUDA_VISIBLE_DEVICES holds UUIDs, as of MIG (_get_nvml_gpu_id calls int()).
NVML = "libnvidia-ml.so.1"
C = TypeVar("C", bound=ctypes.Structure | ctypes.c_uint)


class _GpuUse(ctypes.Structure):
    """Percent of the time since the last reading."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _GpuMemory(ctypes.Structure):
    """Bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class HostMeter:
    """Reads the use of each host once, by its first rank, for the time since the last reading."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._reads = ranks.local_rank == 0
        self._last = (time.monotonic(), _counters())
        psutil.cpu_percent(None)  # The first call has no time to measure.

    def read_on_all_ranks(self) -> dict[str, float]:
        """Metrics `system/NAME` of one host, `system/HOST/NAME` of several, or mean and maximum of many. Collective."""
        own = (socket.gethostname(), self._read()) if self._reads else None
        return by_host(dict(filter(None, self.ranks.gather(own))))

    def _read(self) -> dict[str, float]:
        then, before = self._last
        now, counters = time.monotonic(), _counters()
        self._last = now, counters
        seconds = max(now - then, 1e-3)
        rates = {name: max(0, count - before.get(name, count)) / seconds / 1e6 for name, count in counters.items()}
        memory = psutil.virtual_memory()
        return {
            "cpu_percent": psutil.cpu_percent(None),
            "memory_percent": memory.percent,
            "memory_gib": (memory.total - memory.available) / 2**30,
            **{f"{name}_mb_per_second": rate for name, rate in rates.items()},
            **_gpus(),
        }


def by_host(readings: dict[str, dict[str, float]]) -> dict[str, float]:
    """Metrics of the readings of each host. readings: host -> name -> value."""
    if len(readings) == 1:
        return {f"system/{name}": value for reading in readings.values() for name, value in reading.items()}
    if len(readings) <= _MAX_HOSTS:
        return {f"system/{host}/{name}": value for host, reading in readings.items() for name, value in reading.items()}
    values: dict[str, list[float]] = defaultdict(list)
    for reading in readings.values():
        for name, value in reading.items():
            values[name].append(value)
    means = {f"system/mean/{name}": sum(found) / len(found) for name, found in values.items()}
    return means | {f"system/max/{name}": max(found) for name, found in values.items()}


def _counters() -> dict[str, int]:
    """Bytes since the host started; a container may hide some of them."""
    counters: dict[str, int] = {}
    with contextlib.suppress(OSError, RuntimeError):
        if disk := psutil.disk_io_counters():
            counters |= {"disk_read": disk.read_bytes, "disk_write": disk.write_bytes}
    with contextlib.suppress(OSError, RuntimeError):
        if network := psutil.net_io_counters():
            counters |= {"network_receive": network.bytes_recv, "network_send": network.bytes_sent}
    return counters


def _gpus() -> dict[str, float]:
    """Means over the host's GPUs (power: their sum), without what a GPU does not tell; empty without a GPU."""
    try:
        nvml = ctypes.CDLL(NVML)
        handles = _handles(nvml)
        busy = _of_each(handles, nvml.nvmlDeviceGetUtilizationRates, _GpuUse)
        memory = _of_each(handles, nvml.nvmlDeviceGetMemoryInfo, _GpuMemory)
        milliwatts = _of_each(handles, nvml.nvmlDeviceGetPowerUsage, ctypes.c_uint)
    except (OSError, AttributeError):  # No driver, or one without these functions.
        return {}
    found = {}
    if busy:
        found["gpu_percent"] = sum(use.gpu for use in busy) / len(busy)
    if memory:
        found["gpu_memory_percent"] = 100 * sum(m.used for m in memory) / sum(m.total for m in memory)
    if milliwatts:
        found["gpu_watts"] = sum(power.value for power in milliwatts) / 1e3
    return found


def _handles(nvml: ctypes.CDLL) -> list[ctypes.c_void_p]:
    """NVML's handle of each GPU; empty if they cannot be read."""
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    handles = [ctypes.c_void_p() for _ in range(count.value)]
    failed = [nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(i), ctypes.byref(h)) for i, h in enumerate(handles)]
    return [] if any(failed) else handles


def _of_each(handles: list[ctypes.c_void_p], read: Callable[..., int], kind: type[C]) -> list[C]:
    """What an NVML function writes for each GPU; empty if it fails for any, as for the use of a GPU with MIG."""
    values = [kind() for _ in handles]
    failed = [read(handle, ctypes.byref(value)) for handle, value in zip(handles, values, strict=True)]
    return [] if any(failed) else values
