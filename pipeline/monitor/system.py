"""Use of the hosts of a run: processors, memory, disks, network, GPUs. MLflow shows names that begin with `system/`
apart.
"""

import contextlib
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from pipeline.process.distributed import Ranks

# With more hosts than this, mean and maximum over the hosts are recorded instead of each host.
_MAX_HOSTS = 16
_NAMES = (
    "cpu_percent",
    "memory_percent",
    "memory_gib",
    *(f"{kind}_mb_per_second" for kind in ("disk_read", "disk_write", "network_receive", "network_send")),
    "gpu_percent",
    "gpu_memory_percent",
    "gpu_watts",
)
# NVIDIA's library of GPU readings, which its driver installs; called as nvml.h declares it. Not by the package
# nvidia-ml-py: where that is installed, DeepSpeed 0.19.8 cannot start if CUDA_VISIBLE_DEVICES holds UUIDs, as of MIG
# (_get_nvml_gpu_id calls int()).
NVML = "libnvidia-ml.so.1"


class HostMeter:
    """Reads the use of each host once, by its first rank, for the time since the last reading. hosts: of the ranks."""

    def __init__(self, ranks: Ranks, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self._reads = ranks.local_rank == 0
        self._last = (time.monotonic(), _counters())
        psutil.cpu_percent(None)  # The first call has no time to measure.

    def read(self) -> list[float]:
        """This rank's numbers for `metrics`, NaN for those that it does not know: it may not be its host's first."""
        found = self._read() if self._reads else {}
        return [found.get(name, math.nan) for name in _NAMES]

    def metrics(self, read: Sequence[Sequence[float]]) -> dict[str, float]:
        """Metrics `system/NAME` of one host, `system/HOST/NAME` of several, or mean and maximum of many. read: by every
        rank.
        """
        known = (
            (host, {name: value for name, value in zip(_NAMES, row, strict=True) if not math.isnan(value)})
            for host, row in zip(self.hosts, read, strict=True)
        )
        return by_host({host: values for host, values in known if values})

    def _read(self) -> dict[str, float]:
        then, before = self._last
        now, counters = time.monotonic(), _counters()
        self._last = now, counters
        seconds = max(now - then, 1e-3)
        memory = psutil.virtual_memory()
        return {
            "cpu_percent": psutil.cpu_percent(None),
            "memory_percent": memory.percent,
            "memory_gib": (memory.total - memory.available) / 2**30,
            **{
                f"{name}_mb_per_second": max(0, count - before.get(name, count)) / seconds / 1e6
                for name, count in counters.items()
            },
            **_gpus(),
        }


def by_host(readings: dict[str, dict[str, float]]) -> dict[str, float]:
    """Metrics of the readings of each host. readings: host -> name -> value."""
    if len(readings) <= _MAX_HOSTS:
        places = {host: f"system/{host}/" if len(readings) > 1 else "system/" for host in readings}
        return {places[host] + name: value for host, reading in readings.items() for name, value in reading.items()}
    metrics = dict[str, float]()
    for name in dict.fromkeys(name for reading in readings.values() for name in reading):
        values = [reading[name] for reading in readings.values() if name in reading]
        metrics |= {f"system/mean/{name}": statistics.fmean(values), f"system/max/{name}": max(values)}
    return metrics


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
    count = ctypes.c_uint()
    try:
        nvml = ctypes.CDLL(NVML)
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return {}
        # Structures of nvml.h: percent of the time (GPU, memory); bytes (total, free, used); milliwatts.
        busy = _sums(nvml, count.value, nvml.nvmlDeviceGetUtilizationRates, ctypes.c_uint * 2)
        memory = _sums(nvml, count.value, nvml.nvmlDeviceGetMemoryInfo, ctypes.c_ulonglong * 3)
        power = _sums(nvml, count.value, nvml.nvmlDeviceGetPowerUsage, ctypes.c_uint * 1)
    except (OSError, AttributeError):  # No driver, or one without these functions.
        return {}
    found = {}
    if busy:
        found["gpu_percent"] = busy[0] / count.value
    if memory:
        found["gpu_memory_percent"] = 100 * memory[2] / memory[0]
    if power:
        found["gpu_watts"] = power[0] / 1e3
    return found


def _sums(nvml: ctypes.CDLL, count: int, read: Callable[..., int], kind: Callable[[], Any]) -> list[int]:
    """The sum over GPUs of each number that an NVML function writes; empty if it fails for any, as for the use of a GPU
    with MIG.
    """
    values = []
    for index in range(count):
        handle, value = ctypes.c_void_p(), kind()
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        if failed or read(handle, ctypes.byref(value)):
            return []
        values.append(value)
    return [sum(numbers) for numbers in zip(*values, strict=True)]
