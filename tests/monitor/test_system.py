"""The use of hosts as metrics."""

import socket
import time
from dataclasses import replace

import torch

from pipeline.monitor.system import HostMeter, by_host
from pipeline.process.distributed import Ranks


def test_a_host_is_read_by_its_first_rank_only() -> None:
    ranks = Ranks(0, 0, 1, torch.device("cpu"))
    meter = HostMeter(ranks)
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        pass
    found = meter.read_on_all_ranks()
    assert 0 < found["system/cpu_percent"] <= 100
    assert 0 < found["system/memory_percent"] <= 100
    assert found["system/network_send_mb_per_second"] >= 0
    assert HostMeter(replace(ranks, local_rank=1)).read_on_all_ranks() == {}
    assert not any(socket.gethostname() in name for name in found)


def test_several_hosts_have_names_and_many_have_mean_and_maximum() -> None:
    assert by_host({"a": {"cpu": 1.0}, "b": {"cpu": 3.0}}) == {"system/a/cpu": 1.0, "system/b/cpu": 3.0}
    many = {f"host{i}": {"cpu": float(i)} for i in range(20)}
    assert by_host(many) == {"system/mean/cpu": 9.5, "system/max/cpu": 19.0}
