"""Speed and memory figures, computed on a clock that the test sets."""

import pytest
import torch

from pipeline.monitor import profile
from pipeline.monitor.gpus import find_gpu
from pipeline.monitor.profile import Meter, StepClock, peak_flops
from pipeline.process.distributed import Ranks

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(profile.time, "perf_counter", lambda: now[0])
    return now


def test_rates(clock: list[float]) -> None:
    parts = StepClock(CPU)
    meter = Meter(Ranks(0, 0, 1, CPU), parts, flops_per_image=2e9, peak=1e12)
    for _ in range(5):
        meter.step(images=100)
        for part, seconds in (("data", 0.1), ("forward", 0.2), ("backward", 0.08)):
            with parts.device(part):
                clock[0] += seconds
        clock[0] += 0.02
    with meter.paused():
        with parts.host("checkpoint"):
            clock[0] += 2
        clock[0] += 1  # an evaluation
    own = meter.read("line")
    line, reading = meter.rates([own]), meter.rates([meter.read("record")])
    assert line["images_per_second"] == reading["images_per_second"]
    assert reading["images_per_second"] == pytest.approx(250)
    assert reading["mfu"] == pytest.approx(250 * 2e9 / 1e12)
    # Shares of training and its checkpoints, 2 + 2 s; waiting is told as a share of training alone.
    assert [reading[f"time_{part}"] for part in ("forward", "backward", "checkpoint")] == pytest.approx(
        [0.25, 0.1, 0.5]
    )
    assert reading["time_optimizer"] == 0
    assert meter.own_seconds([own]) == pytest.approx([1.5])
    assert reading["data_wait"] == pytest.approx(0.25)
    assert reading["peak_memory_gib"] > 0.01
    # What was read is forgotten, for records and for lines; the average is over all records.
    meter.step(100)
    clock[0] += 2
    assert meter.rates([meter.read("record")])["images_per_second"] == pytest.approx(50)
    meter.step(300)
    clock[0] += 2
    assert meter.rates([meter.read("line")])["images_per_second"] == pytest.approx(100)
    assert meter.average == pytest.approx(600 / 4)


def test_rates_are_of_all_ranks() -> None:
    meter = Meter(Ranks(0, 0, 4, CPU), StepClock(CPU), flops_per_image=1e9, peak=1e12)
    read = [[2.0, 400.0, 0.1 * rank, 0.5, 0.25 * rank, 0.0, 2.0 * (rank == 0), rank * 2.0**30] for rank in range(4)]
    assert meter.rates(read) == {
        "images_per_second": 200,
        "mfu": pytest.approx(200 * 1e9 / (4 * 1e12)),
        "data_wait": pytest.approx(0.15),
        "peak_memory_gib": 3,
        "time_forward": 0.125,
        "time_backward": 0.375 / 4,
        "time_optimizer": 0,
        "time_checkpoint": 0.125,
    }
    assert meter.own_seconds(read) == pytest.approx([0.5, 0.6, 0.7, 0.8])


def test_a_cpu_has_no_utilisation(clock: list[float]) -> None:
    peak, _ = peak_flops(CPU, torch.float32)
    assert peak is None
    meter = Meter(Ranks(0, 0, 1, CPU), StepClock(CPU), flops_per_image=1e9, peak=peak)
    meter.step(400)
    clock[0] += 1
    reading = meter.rates([meter.read("record")])
    assert reading["images_per_second"] == pytest.approx(400)
    assert "mfu" not in reading


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 NVL", 835.5),
    ],
)
def test_data_sheets(name: str, tflops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found, source = peak_flops(torch.device("cuda", 0), torch.bfloat16)
    assert found == tflops * 1e12
    assert source.startswith("data sheet")


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("NVIDIA H100 80GB HBM3", 80), ("A100-40GB", 40), ("H200", 141), ("NVIDIA GH200 480GB", 96)],
)
def test_memory_of_a_gpu_is_in_its_name_or_on_its_data_sheet(name: str, gigabytes: int) -> None:
    gpu = find_gpu(name)
    assert gpu.memory == gigabytes * 10**9


@pytest.mark.parametrize(
    "name",
    ["TPU v5e", "NVIDIA RTX A1000", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"],
)
def test_a_gpu_of_another_name_is_unknown(name: str) -> None:
    assert find_gpu(name) is None


def test_ranks_share_the_memory_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = profile.host_memory()
    assert 2**28 < alone < 2**50
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert profile.host_memory() == alone // 4
