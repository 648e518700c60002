"""A resumed run says when its loss compares another number of images than before."""

import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from pipeline.architecture.objectives import OBJECTIVES, ObjectiveFacts
from pipeline.objectives.objective import Objective
from pipeline.train.setup import _other_comparison

NOW = {
    "train.loss": "dino",
    "train.global_batch": 128,
    "train.micro_batch": 64,
    "ranks": 1,
    "objective.centring": "sinkhorn",
}


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        (
            {"train.micro_batch": 128},
            {},
            "were 128 .* are 64",
        ),
        ({"train.micro_batch": 128}, {"ranks": 2}, ""),
        (
            {"train.micro_batch": 16},
            {"ranks": 32},
            "were 16 .* are 128",
        ),  # 32 ranks have 32 at least.
        ({"train.micro_batch": 128}, {"objective.centring": "mean"}, ""),
        (
            {"train.micro_batch": 128},
            {"objective.centring": "mean", "objective.koleo_weight": 0.1},
            "koleo_weight = 0.1 compares",
        ),
        ({"train.micro_batch": 100}, {"train.micro_batch": 64}, ""),  # 100 was lowered to 64, which divides 128.
    ],
)
def test_another_number_of_compared_images_is_said(then: dict[str, Any], now: dict[str, Any], expected: str) -> None:
    said = _other_comparison({**NOW, **then}, {**NOW, **now})
    if not expected:
        assert said == []
    else:
        (line,) = said
        assert re.search(expected, line), line


class Contrast(Objective):
    """An objective that the library does not have."""

    @classmethod
    def compares_micro_batch(cls, objective: Mapping[str, Any]) -> str:
        return f"objective.weight = {objective['weight']}" if objective["weight"] else ""


@pytest.mark.parametrize("weight", [0, 2])
def test_any_objective_may_compare_images(monkeypatch: pytest.MonkeyPatch, weight: int) -> None:
    """It was said of dino only."""
    monkeypatch.setitem(OBJECTIVES, "contrast", ObjectiveFacts("contrast:Contrast"))
    monkeypatch.setitem(sys.modules, "pipeline.objectives.contrast", sys.modules[__name__])
    now = {**NOW, "train.loss": "contrast", "objective.weight": weight}
    said = _other_comparison({**now, "train.micro_batch": 128}, now)
    assert [line.partition(" compares")[0] for line in said] == ["objective.weight = 2"] * (weight > 0)
