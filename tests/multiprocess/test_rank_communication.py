"""The bytes that the plan predicts for collectives, against those of real steps of the engine on 2 ranks, at every ZeRO stage."""

import json
from collections import Counter

import pytest
from forked import Forge
from rank_communication import PERSISTENCE
from test_rank_memory import ALL, NUM_CLASSES, PART, overrides

from pipeline import objectives
from pipeline.estimate import memory, step_time
from pipeline.estimate.plan import make_plan
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

FAR, NEAR = 10**9, 300_000  # stage 3: elements before which a parameter must be used again to be kept
# stage, precision, micro-batches a step, bucket, reuse distance, more settings
CASES: list[tuple[int, str, int, int, int, list[str]]] = [
    (0, "fp32", 2, ALL, FAR, []),
    (1, "fp32", 2, PART, FAR, []),
    (1, "bf16", 2, ALL, FAR, ["optimizer.ema_decay=0.9"]),
    (1, "bf16", 2, ALL, FAR, ["engine.offload=true"]),
    (1, "fp16", 2, ALL, FAR, []),
    (2, "bf16", 1, ALL, FAR, []),
    (2, "bf16", 3, PART, FAR, []),
    (3, "fp32", 1, ALL, FAR, []),
    (3, "bf16", 2, PART, FAR, ["engine.activation_checkpointing=true"]),
    (3, "bf16", 2, PART, NEAR, []),
    (3, "fp16", 1, ALL, FAR, []),
]


@pytest.fixture(scope="module")
def found(forge: Forge) -> list[dict[str, dict[str, int]]]:
    cases = [
        (overrides(stage, precision, count, more), NUM_CLASSES, bucket, reuse)
        for stage, precision, count, bucket, reuse, more in CASES
    ]
    output = forge.start_work(2, "rank_communication:main", cases).finish()
    (line,) = [line for line in output.splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "-".join(map(str, CASES[number][:5])))
def test_prediction_is_what_a_step_sends(
    number: int, found: list[dict[str, dict[str, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, precision, accumulation, bucket, reuse, more = CASES[number]
    monkeypatch.setattr(memory, "REDUCE_BUCKET", bucket)
    monkeypatch.setattr(memory, "PERSISTENCE_THRESHOLD", PERSISTENCE)
    monkeypatch.setattr(step_time, "REUSE_DISTANCE", reuse)
    config = schema.load(RunConfig, None, overrides(stage, precision, accumulation, more))
    plan = make_plan(config, 1000, 2)
    model = objectives.new_backbone(config, NUM_CLASSES)
    predicted: Counter[str] = Counter()
    for collective in step_time.collectives(config, model, plan.accumulation):
        predicted[collective.kind] += collective.bytes
    sent = found[number]["bytes"]
    assert set(sent) <= {"all-reduce", "reduce-scatter", "all-gather"}
    if reuse == NEAR:
        # Gathered again for the backward pass, but fewer than predicted: DeepSpeed keeps what its prefetch has met, too.
        again = [
            c
            for c in step_time.collectives(config, model, plan.accumulation)
            if (c.kind, c.when) == ("all-gather", "backward")
        ]
        once = predicted["all-gather"] - sum(collective.bytes for collective in again)
        assert once * 1.1 < sent["all-gather"] <= predicted["all-gather"]
        predicted["all-gather"] = sent["all-gather"]
    for kind in ("all-reduce", "reduce-scatter", "all-gather"):  # Beyond it, only norms and flags of a few bytes.
        assert sent.get(kind, 0) == pytest.approx(predicted[kind], rel=0, abs=100)
