"""Use of the hosts of a run: processors, memory, disks, network, GPUs. MLflow shows names that begin with `system/` apart."""

import contextlib
import socket
import time
from collections import defaultdict

import psutil

from pipeline.process.distributed import Ranks

# With more hosts than this, mean and maximum over the hosts are recorded instead of each host.
_MAX_HOSTS = 16


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
        rates = {name: max(0, counters[name] - before[name]) / seconds / 1e6 for name in counters}
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
        network = psutil.net_io_counters()
        counters |= {"network_receive": network.bytes_recv, "network_send": network.bytes_sent}
    return counters


def _gpus() -> dict[str, float]:
    """Means over the host's GPUs by NVML; empty without a GPU, and without the package nvidia-ml-py."""
    try:
        import pynvml  # Late: optional.

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        busy = [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles]
        memory = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        watts = [pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3 for handle in handles]
    except Exception:  # No package, no driver, no permission: other metrics do not depend on it.
        return {}
    if not handles:
        return {}
    return {
        "gpu_percent": sum(busy) / len(busy),
        "gpu_memory_percent": 100 * sum(m.used for m in memory) / sum(m.total for m in memory),
        "gpu_watts": sum(watts),
    }
