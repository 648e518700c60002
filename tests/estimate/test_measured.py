"""A plan from what `launch/bench.py gpu` wrote."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from data_tools.bench.gpu_step import Case, Setup
from data_tools.bench.results import BenchResults
from pipeline.base.errors import UserError
from pipeline.estimate.cluster import Cluster
from pipeline.estimate.forecast import make_forecast
from pipeline.estimate.forecast_text import describe
from pipeline.estimate.measured import measured_mfu, read_measured
from pipeline.model import configure, training_flops_per_image
from pipeline.settings import schema
from pipeline.settings.commands.operate import PlanConfig

FILE = Path(__file__).resolve().parents[2] / "configs" / "pretrain" / "vit_l16_imagenet21k.yaml"
GIVEN = ["samples=14.2e6", "classes=21841"]


def plan(*overrides: str) -> PlanConfig:
    return schema.load(PlanConfig, str(FILE), [*GIVEN, *overrides])


def write_bench(file: Path, gpu: str, steps: Sequence[tuple[str, int, Setup, float, float]]) -> str:
    """What the benchmark writes for steps of (model, batch, setup, milliseconds, loss). Returns the setting."""
    results = BenchResults(str(file), 0.01)
    results.machine["gpu"] = gpu
    for model, batch, setup, ms, loss in steps:
        name, pixels = model.split("@")
        results.add(f"step {setup}", {
            "model": model, "batch": batch, "setup": asdict(setup), "ms": ms, "losses": [loss], "images_per_second": 1e3 * batch / ms,
            "gflops": training_flops_per_image(Case(name, int(pixels), batch, 0.0).config) / 1e9, "tflops": 1.0, "peak_memory_gib": 1.0,
        })  # fmt: skip
    results.report()
    return f"bench={file}"


ENGINE = Setup(engine=True, deterministic=True)
FUSED = Setup(engine=True, deterministic=True, fused=True)
STEPS = [
    ("ViT-L/16@224", 128, Setup(), 100.0, 1.0),
    ("ViT-L/16@224", 128, ENGINE, 160.0, 1.0),
    ("ViT-L/16@224", 128, FUSED, 128.0, 1.0),
    ("ViT-L/16@224", 128, Setup(engine=True, deterministic=True, compile=True), 64.0, 2.0),  # another loss
    ("ViT-L/16@224", 128, Setup(engine=True, compile=True), 64.0, 1.0),  # whose bits do not repeat
    ("ViT-H/14@224", 32, Setup(), 100.0, 1.0),
    ("ViT-H/14@224", 32, ENGINE, 100.0, 1.0),
]


@pytest.fixture
def bench(tmp_path: Path) -> str:
    return write_bench(tmp_path / "bench.json", "NVIDIA H100 80GB HBM3", STEPS)


def test_the_fastest_exact_step_of_the_engine_replaces_the_prediction(bench: str) -> None:
    """One GPU, with its own optimizer: the measured speed comes out again."""
    config = plan("cluster=1x1xH100-80GB", "train.micro_batch=128", "train.global_batch=128", bench)
    forecast = make_forecast(config)
    assert forecast.measured
    assert forecast.measured.fastest.images_per_second == 1000
    assert forecast.measured.fastest.settings == [
        "engine.compile=false", "engine.fused=true", "engine.deterministic=true", "train.micro_batch=128",
    ]  # fmt: skip
    assert forecast.step_seconds == pytest.approx(0.128, rel=1e-6)
    assert 500 < forecast.measured.predicted < 2000
    predicted = make_forecast(plan("cluster=1x1xH100-80GB", "train.micro_batch=128", "train.global_batch=128"))
    assert forecast.measured.predicted == pytest.approx(128 / (predicted.step_seconds or 0), rel=1e-6)
    (line,) = [line for line in describe(forecast) if line.startswith("  one GPU")]
    assert "1,000 images/s measured (NVIDIA H100 80GB HBM3, 20" in line
    assert "engine.fused=true" in line
    assert f"; {forecast.measured.predicted:,.0f} predicted" in line


def test_more_ranks_share_the_optimizer(bench: str) -> None:
    one, many = (make_forecast(plan(f"cluster={c}", bench)).time for c in ("1x1xH100-80GB", "8x8xH100-80GB"))
    assert one
    assert many
    assert many.optimizer < one.optimizer
    assert 64 * many.compute == pytest.approx(one.compute, rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["cluster=8x8xA100-80GB"], "was measured on NVIDIA H100 80GB HBM3, and the plan is for A100"),
        (
            ["cluster=8x8xH100-80GB", "model.name=ViT-B/16"],
            r"has ViT-L/16@224 \(3\d\d GFLOP an image\), ViT-H/14.* Measure it",
        ),
        (["cluster=8x8xH100-80GB", "engine.precision=fp16"], "was measured in bf16, and engine.precision is fp16"),
    ],
)
def test_another_gpu_model_or_precision_is_refused(bench: str, overrides: list[str], error: str) -> None:
    with pytest.raises(UserError, match=error):
        make_forecast(plan(bench, *overrides))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "no such file"),
        ("{", "is not valid JSON"),
        ("{}", "machine"),
        ({"machine": {"gpu": "H100"}, "date": "x", "fastest": []}, "has no model"),
        ({"machine": {"gpu": "H100"}, "date": "x", "fastest": [
            {"model": "m", "gflops": 369, "batch": 0, "images_per_second": 1, "settings": []}]}, "is no speed"),
    ],
)  # fmt: skip
def test_damaged_files(tmp_path: Path, content: Any, error: str) -> None:
    file = tmp_path / "bench.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=error) as raised:
        make_forecast(plan("cluster=8x8xH100-80GB", f"bench={file}"))
    assert "\n" not in str(raised.value)


def test_a_measured_speed_is_that_of_the_model_alone(bench: str) -> None:
    """MAE's step is planned with the share of the peak that the model's own step reached; beside it stands the same step as before."""
    config = plan(bench, "cluster=1x8xH100-80GB")
    mae = replace(config, train=replace(config.train, loss="mae"), objective={"decoder_depth": 2})
    model, cluster = configure("ViT-L/16", 224, 0), Cluster.parse(config.cluster)
    of_model, of_mae = (read_measured(each, model, cluster) for each in (config, mae))
    assert of_model == of_mae
    assert measured_mfu(mae, model, cluster, of_mae) == measured_mfu(config, model, cluster, of_model)


def test_one_speed_is_given() -> None:
    with pytest.raises(UserError, match=r"mfu = 0\.5 and bench = x give the speed of a GPU: set one"):
        plan("cluster=8x8xH100-80GB", "mfu=0.5", "bench=x")
    with pytest.raises(UserError, match="give --cluster, too"):
        plan("bench=x")
