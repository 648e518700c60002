"""The benchmark on a GPU, on a CPU: its whole path, its time budget, and what survives failures and kills."""

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
from forked import Forge

from data_tools.bench import apart, gpu_step
from data_tools.bench import gpu_bench as gpu
from data_tools.bench.apart import rows_apart
from data_tools.bench.gpu_step import DEFAULTS, Case, Setup
from pipeline.base.errors import UserError
from pipeline.settings import schema
from pipeline.settings.commands.bench import GpuBenchConfig

TINY = Case("ViT-mu/16", 32, 4, 0.05, "cpu")


# ---------------------------------------------------------------------- exactness
def test_configurations_are_judged_by_their_losses_and_kernels() -> None:
    results = gpu.GpuBench(GpuBenchConfig(device="cpu", tolerance=0.01))
    plain = row_of(Setup(), 10.0, [4.0, 2.0])
    wrong = row_of(replace(DEFAULTS, compile=True), 1.0, [4.0, 2.1])
    unsteady = row_of(replace(DEFAULTS, deterministic=False), 5.0, [4.0, 2.001])
    exact = row_of(DEFAULTS, 9.0, [4.0, 2.001])
    for row in (plain, wrong, unsteady, exact):
        assert results.fastest(TINY.name, TINY.batch) is None
        results.add("step", row)
    assert [row["loss_difference"] for row in results.rows] == [0, 0.05, 0.0005, 0.0005]
    found = results.fastest(TINY.name, TINY.batch)
    assert found["setup"] == asdict(DEFAULTS)


def row_of(setup: Setup, ms: float, losses: list[float]) -> dict[str, Any]:
    return {
        "model": TINY.name,
        "batch": TINY.batch,
        "ms": ms,
        "losses": losses,
        "setup": asdict(setup),
        "images_per_second": 4e3 / ms,
        "tflops": 1.0,
        "peak_memory_gib": 1.0,
        "gflops": 1.0,
    }


@pytest.mark.slow
def test_a_plain_step_trains_and_repeats() -> None:
    (row,), (again,) = (gpu_step.measure(TINY, Setup()) for _ in range(2))
    assert row["losses"][0] > row["losses"][-1]
    assert row["losses"] == again["losses"]
    assert row["images_per_second"] == pytest.approx(4e3 / row["ms"])


KERNELS = {
    "products": "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
    "attention": "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>>",
    "norms": "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>",
    "optimizer and gradients": "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>",
    "copies": "Memcpy HtoD (Pinned -> Device)",
    "elementwise and sums": "triton_poi_fused_add_gelu_3",
    "other": "void (anonymous namespace)::elsewhere<float>",
}


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_of_a_gpu_are_told_by_their_names(kind: str) -> None:
    assert gpu_step.kind_of(KERNELS[kind]) == kind


# ---------------------------------------------------------------------- failures, budget, kills
def rows_then(end: str) -> Iterator[dict[str, Any]]:
    yield {"value": 1}
    if end == "raise":
        raise ValueError("two\nlines")
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "hang":
        time.sleep(600)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raise", "ValueError: two lines"),
        ("die", "its process died with exit code -9"),
        ("hang", "stopped after 600 s"),
    ],
)
def test_a_failure_is_a_row(end: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]  # The time is over when the first row has come, and not because the process began late.
    monkeypatch.setattr(apart, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rows = rows_apart(rows_then, (end,), 600.0)
    assert next(rows) == {"value": 1}
    now[0] = 600.0 * (end == "hang")
    (last,) = rows
    assert last["failed"] == reason


def fails(end: str) -> Iterator[dict[str, Any]]:
    """Before it has a row."""
    return (row for row in rows_then(end) if "value" not in row)


def measure_after_failures(file: str) -> None:
    """In a rank: nothing was computed in its process, which can be forked for each measurement."""
    config = GpuBenchConfig(device="cpu", json=file, seconds=3600, only=["step"], candidate_seconds=0.05)
    bench = gpu.GpuBench(config)
    bench.apart("step", fails, "raise")
    bench.steps(bench.cases[0], Setup())
    assert json.loads(Path(file).read_text())["rows"] == json.loads(json.dumps(bench.rows)), "written at once"
    bench.deadline = time.monotonic()
    bench.steps(bench.cases[0], DEFAULTS)
    failed = [row.get("failed", "") for row in bench.rows]
    assert failed[0] == "ValueError: two lines"
    assert [bool(text) for text in failed] == [True, False, True]
    assert bench.apart("shards", rows_then, "raise") == [], "not wanted"
    bench.report()


@pytest.mark.slow
def test_the_rest_is_measured_after_failures_and_the_budget_ends_it(forge: Forge, tmp_path: Path) -> None:
    said = forge.start_work(1, "test_gpu_bench:measure_after_failures", str(_file := tmp_path / "found.json")).finish()
    assert "two lines" in said
    assert "no time left" in said


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # As the command does, and undone.
    with pytest.raises(UserError, match="device=cpu"):
        gpu.run(GpuBenchConfig())
    with pytest.raises(UserError, match="models"):
        schema.load(GpuBenchConfig, None, ["models=[ViT-L/16]"])
    with pytest.raises(UserError, match="BiT-R50x1"):
        gpu.GpuBench(GpuBenchConfig(device="cpu", models=["BiT-R50x1@224"]))


# ---------------------------------------------------------------------- the whole way
def run_uncompiled(arguments: list[str]) -> None:
    """In a rank: the command. Its processes find imported what they would import anew; nothing is compiled, which takes
    minutes.
    """
    import torch

    torch.compile = lambda function, **given: function
    gpu_step.device_memory = lambda device: 2
    gpu_step.rank_memory = lambda model, run, batch, *more: SimpleNamespace(total=batch)
    forked.command(arguments)


@pytest.mark.slow
def test_the_whole_benchmark_on_a_cpu(forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts but the single steps, which are tested above."""
    file = tmp_path / "found.json"
    parts = "only=[product,profile,attention,bits,shards,objectives,fit]"
    command = ["launch/bench.py", "gpu", "device=cpu", f"json={file}", parts, "candidate_seconds=0.05", "decoders=2"]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = forge.start_work(1, "test_gpu_bench:run_uncompiled", command).finish()
    rows = json.loads(file.read_text())["rows"]
    worked = {row["name"].split(" ")[0] for row in rows if "failed" not in row}
    assert worked == {"product", "profile", "attention", "bits", "shards", "objectives", "fit"}, said
    assert {row["layer"] for row in rows if "layer" in row} == {"qkv", "out", "up", "down"}
    for row in (row for row in rows if row["name"].startswith("profile")):
        assert sum(value for name, value in row.items() if name.endswith("_share")) == pytest.approx(1)
        assert row["attention_kernels"]
        assert row["optimizer_ms"] > 0
    assert [row["same_bits"] for row in rows if "same_bits" in row] == ["true"] * 2
    measured = {
        (row["tokens"], row["deterministic"]) for row in rows if row["name"].startswith("attention") and "ms" in row
    }
    assert measured == set(itertools.product((197, 257, 256, 37), (True, False)))
    found = {row["name"].split(", ")[1]: row for row in rows if row["name"].startswith("objectives")}
    assert found.keys() == {"mae", "lejepa"}
    assert all(row["first_losses"][-1] < row["first_losses"][0] for row in found.values()), "they train"
    assert [row["batch"] for row in found.values()] == [2] * 2, "what fits, instead of 16 and 4"
    assert [row["fits"] for row in rows if "micro_batch" in row] == [True] * 10, "around what is predicted to fit"
    assert sum("data_wait" in row for row in rows) == 2, "with few and with many log lines"
    assert not list(tmp_path.glob("tmp*")), "runs from shards that were left"
