"""Predicted bytes of a rank against the live tensors of real steps, at every ZeRO stage. On 2 ranks, in one start."""

import json

import model_parts
import pytest
from fake_gpu import TINY
from forked import Forge

from pipeline import objectives
from pipeline.estimate import memory
from pipeline.estimate.plan import make_plan
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

NUM_CLASSES = 300
ALL, PART = 4_000_000, 250_000  # elements of a bucket that may hold all gradients, and of one that does not
CKPT = "engine.activation_checkpointing=true"
# With a teacher: its copy, and the average of the weights that it is refreshed from.
DINO = [
    "train.loss=dino",
    "model.representation=false",
    "objective.prototypes=512",
    "objective.hidden=128",
    "objective.bottleneck=64",
    "objective.local_views=2",
    "objective.local_size=32",
]
# Most of its tensors are sharded at stage 3, and few of them gathered at a time.
DEEP = ["model.width=320", "model.mlp_width=1280", "model.depth=8"]
# stage, precision, micro-batches a step, bucket, more settings. Of 16-bit ones fewer: this project's CPUs are slow at
# it.
CASES: list[tuple[int, str, int, int, list[str]]] = [
    (0, "fp32", 2, ALL, ["engine.fused=false"]),
    (1, "fp32", 1, ALL, ["model.dropout=0.1"]),
    (2, "fp32", 2, PART, ["optimizer.name=sgd", "optimizer.weight_decay=0"]),
    (3, "fp32", 2, PART, ["engine.fused=false"]),
    (1, "fp32", 2, ALL, ["optimizer.name=muon", "engine.fused=false"]),
    (1, "bf16", 2, ALL, []),
    (2, "bf16", 1, ALL, [CKPT]),
    (3, "bf16", 1, ALL, ["model.dropout=0.1"]),
    (1, "fp16", 2, ALL, []),
    (1, "fp16", 1, ALL, []),
    (2, "fp16", 1, ALL, []),
    (3, "fp16", 2, PART, []),
    (2, "fp32", 2, PART, [CKPT, *model_parts.overrides()]),
    (3, "bf16", 1, ALL, model_parts.overrides()),
    (1, "fp32", 1, ALL, DINO),
    (2, "bf16", 1, ALL, [*DINO, CKPT]),
    (3, "bf16", 1, ALL, DINO),
    (3, "fp32", 1, ALL, DEEP),
    (3, "bf16", 2, ALL, [*DEEP, CKPT]),
    (3, "bf16", 1, ALL, [*DEEP, *DINO]),
]


def overrides(stage: int, precision: str, accumulation: int, more: list[str]) -> list[str]:
    return [
        *TINY,
        "model.image_size=64",
        "model.width=128",
        "model.depth=3",
        "model.mlp_width=512",
        "model.num_heads=4",
        f"train.global_batch={4 * accumulation}",
        f"engine.zero_stage={stage}",
        f"engine.precision={precision}",
        *more,
    ]


@pytest.fixture(scope="module")
def found(forge: Forge) -> list[dict[str, int]]:
    """What rank 0 found in each case."""
    cases = [
        (overrides(stage, precision, count, more), NUM_CLASSES, bucket)
        for stage, precision, count, bucket, more in CASES
    ]
    output = forge.start_work(2, "rank_memory:main", cases).finish()
    (line,) = [line for line in output.splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "-".join(map(str, CASES[number][:4])))
def test_prediction_is_what_a_step_holds(
    number: int, found: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, precision, accumulation, bucket, more = CASES[number]
    monkeypatch.setattr(memory, "REDUCE_BUCKET", bucket)
    monkeypatch.setitem(memory.BATCH_ELEMENTS, "cuda", 0)  # A CPU makes one matrix orthogonal at a time.
    config = schema.load(RunConfig, None, overrides(stage, precision, accumulation, more))
    plan = make_plan(config, 1000, 2)
    model = objectives.new_backbone(config, NUM_CLASSES)
    measured = found[number]
    peak = memory.rank_memory(model, config, plan.micro_batch, plan.accumulation, 2)
    assert peak.total == pytest.approx(measured["peak"], rel=0.10), peak
    P = memory.parameters(config, model).trained
    if stage < 3:  # What stays between two steps: weights, optimizer state, and DeepSpeed's fp32 gradients of bf16.
        kept = peak.weights + peak.optimizer + (4 * P if (stage, precision) == (1, "bf16") else 0)
        assert kept == pytest.approx(measured["between"], rel=0.10)
    state = memory.checkpoint_bytes(model, config) - 4 * memory.num_parameters(model)
    assert state / 2 == pytest.approx(measured["saved"], rel=0.02)
