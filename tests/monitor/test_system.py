"""The use of hosts as metrics."""

import subprocess
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from pipeline.monitor import system
from pipeline.monitor.system import HostMeter, by_host
from pipeline.process.distributed import Ranks

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


def test_a_host_is_read_by_its_first_rank_only() -> None:
    second = HostMeter(replace(ALONE, local_rank=1), ["a", "a"]).read()
    meter = HostMeter(ALONE, ["a", "a"])
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        pass
    found = meter.metrics([meter.read(), second])
    assert 0 < found["system/cpu_percent"] <= 100
    assert 0 < found["system/memory_percent"] <= 100
    assert found["system/network_send_mb_per_second"] >= 0
    assert meter.metrics([second, second]) == {}
    assert all(name.count("/") == 1 for name in found)


def test_a_host_whose_network_cannot_be_read_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil gives None without an interface, and the run ended by an AttributeError."""
    read, given = psutil.net_io_counters, [None]
    monkeypatch.setattr(psutil, "net_io_counters", lambda: given.pop() if given else read())
    meter = HostMeter(ALONE, ["a"])
    assert meter.metrics([meter.read()])["system/network_send_mb_per_second"] == 0


def test_several_hosts_have_names_and_many_have_mean_and_maximum() -> None:
    assert by_host({"a": {"cpu": 1.0}, "b": {"cpu": 3.0}}) == {"system/a/cpu": 1.0, "system/b/cpu": 3.0}
    many = {f"host{i}": {"cpu": float(i)} for i in range(20)}
    assert by_host(many) == {"system/mean/cpu": 9.5, "system/max/cpu": 19.0}


# Two GPUs, of nvml.h's types; the second reads its power only if POWER is 0.
FAKE_NVML = """
extern "C" {
struct use { unsigned gpu, memory; };
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, long *gpu) { *gpu = (1L << 40) + index; return 0; }
int nvmlDeviceGetUtilizationRates(long gpu, use *use) { *use = {gpu & 1 ? 90u : 70u, 1}; return 0; }
int nvmlDeviceGetMemoryInfo(long gpu, memory *memory) { *memory = {80ull << 30, 60ull << 30, 20ull << 30}; return 0; }
int nvmlDeviceGetPowerUsage(long gpu, unsigned *power) { *power = 350500; return gpu & 1 ? POWER : 0; }
}
"""


@pytest.mark.parametrize("power", [0, 3], ids=["all", "power not supported"])
def test_gpus_are_read_from_the_drivers_library(power: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were read only where the package nvidia-ml-py was installed, which no image of ours had."""
    library = tmp_path / "nvml.so"
    build = ["g++", "-shared", "-fPIC", f"-DPOWER={power}", "-o", str(library), "-x", "c++", "-"]
    subprocess.run(build, input=FAKE_NVML, text=True, check=True)
    monkeypatch.setattr(system, "NVML", str(library))
    meter = HostMeter(ALONE, ["a"])
    found = meter.metrics([meter.read()])
    of_gpus = {name: value for name, value in found.items() if "gpu" in name}
    expected = {"system/gpu_percent": 80.0, "system/gpu_memory_percent": 25.0}
    assert of_gpus == expected | ({} if power else {"system/gpu_watts": 701.0})
    monkeypatch.setattr(system, "NVML", str(tmp_path / "absent.so"))
    assert not any("gpu" in name for name in meter.metrics([meter.read()]))
