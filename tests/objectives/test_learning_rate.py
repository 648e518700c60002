"""The learning rate against protocol.md B1 (big_vision, utils.create_learning_rate_schedule)."""

import math

import pytest

from pipeline.objectives.parameters.optimizers import learning_rate, peak_rate
from pipeline.settings.run import OptimizerConfig, ScheduleConfig

PEAK, TOTAL, WARMUP = 1e-3, 312_012, 10_000


def reference(decay: str, step: int, total: int, warmup: int, end: float) -> float:
    progress = min(max((step - warmup) / (total - warmup), 0), 1)
    if decay == "linear":
        lr = end + (PEAK - end) * (1 - progress)
    elif decay == "cosine":
        lr = end + (PEAK - end) * 0.5 * (1 + math.cos(math.pi * progress))
    else:
        lr = PEAK
    return lr * (min(1.0, step / warmup) if warmup else 1.0)


@pytest.mark.parametrize("decay", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, WARMUP])
@pytest.mark.parametrize("final", [0.0, 0.01])
def test_schedule_is_the_formula(decay: str, warmup: int, final: float) -> None:
    config = ScheduleConfig(decay=decay, final=final)
    for step in [0, 1, 2, 4_999, 5_000, 9_999, 10_000, 10_001, 161_006, 200_000, 312_010, 312_011]:
        expected = reference(decay, step, TOTAL, warmup, final * PEAK)
        assert learning_rate(config, PEAK, step, TOTAL, warmup) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_a_constant_rate_cools_down_at_the_end() -> None:
    constant = ScheduleConfig(decay="constant")
    assert [
        learning_rate(constant, 1.0, step, 100, 10, 20) for step in (5, 10, 79, 80, 81, 90, 99, 100, 101)
    ] == pytest.approx([0.5, 1, 1, 1, 0.95, 0.5, 0.05, 0, 0])
    assert learning_rate(constant, 1.0, 99, 100, 10) == 1


def test_drops_are_bits() -> None:
    """A tenth at 30, 60 and 90 % of all steps, warm-up included (big_transfer, bit_hyperrule.py)."""
    config = ScheduleConfig(decay="drops", drops=[0.3, 0.6, 0.9])
    found = [learning_rate(config, 1.0, step, 20_000, 500) for step in (250, 500, 5_999, 6_000, 12_000, 18_000, 19_999)]
    assert found == pytest.approx([0.5, 1, 1, 0.1, 0.01, 0.001, 0.001])


def test_the_rate_grows_with_the_batch() -> None:
    assert peak_rate(OptimizerConfig(lr=5e-4, lr_batch=512), 1024) == pytest.approx(1e-3)
    assert peak_rate(OptimizerConfig(lr=0.03, lr_batch=256), 4096) == pytest.approx(0.48)
    assert peak_rate(OptimizerConfig(lr=0.01), 4096) == 0.01
