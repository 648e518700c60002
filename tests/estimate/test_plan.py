"""Batch arithmetic and lengths, worked out before anything runs."""

from dataclasses import replace

import pytest

from pipeline.base.errors import UserError
from pipeline.estimate.plan import Plan, make_plan
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

REQUIRED = ["name=try", "model.name=ViT-L/16", "data.path=here", "train.length=90 epochs"]


def plan(*overrides: str, num_samples: int = 14_200_000, world_size: int = 1) -> Plan:
    return make_plan(schema.load(RunConfig, None, [*REQUIRED, *overrides]), num_samples, world_size)


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "world_size", "accumulation", "used_micro_batch"),
    [
        (4096, 64, 1, 64, 64),
        (4096, 64, 8, 8, 64),
        (4096, 64, 128, 1, 32),  # a rank's share is smaller than the micro-batch
        (4096, 4096, 4, 1, 1024),
        (4032, 64, 64, 1, 63),
        (48, 8, 3, 2, 8),
        (4096, 60, 8, 16, 32),  # 60 does not divide a rank's 512
        (208, 6, 16, 13, 1),
    ],
)
def test_accumulation(
    global_batch: int, micro_batch: int, world_size: int, accumulation: int, used_micro_batch: int
) -> None:
    found = plan(f"train.global_batch={global_batch}", f"train.micro_batch={micro_batch}", world_size=world_size)
    assert (found.accumulation, found.micro_batch) == (accumulation, used_micro_batch)
    assert found.accumulation * found.micro_batch * world_size == found.global_batch == global_batch


def test_a_micro_batch_that_does_not_divide_is_lowered_and_said() -> None:
    config = schema.load(RunConfig, None, [*REQUIRED, "train.micro_batch=60"])
    assert make_plan(config, 14_200_000, 8).notes(config) == [
        "train.micro_batch = 60 does not divide a rank's 512 samples (4096 / 8 ranks): 32 is used"
    ]
    assert make_plan(config, 14_200_000, 128).notes(config) == []
    # Pairs are mixed: 30 = 2 x 15 has even micro-batches.
    found = plan("augment.mixup=0.2", "train.global_batch=30", "train.micro_batch=5", "data.streams=5")
    assert (found.accumulation, found.micro_batch) == (15, 2)


def test_lengths() -> None:
    found = plan(
        "schedule.warmup=10000 steps", "evaluate.every=1 epochs", "checkpoint.every=2%", "checkpoint.keep_every=10%"
    )
    assert found.keep_every == 31_201
    assert plan().keep_every == 0
    # An interval that rounds to no step kept nothing, without a word.
    assert plan("train.length=40 steps", "schedule.warmup=1%", "checkpoint.keep_every=1%").keep_every == 1
    assert (found.steps, found.warmup, found.evaluate_every["scores"], found.checkpoint_every) == (
        312_012,
        10_000,
        3467,
        6240,
    )
    assert found.epochs == pytest.approx(90, abs=1e-4)


def test_intervals_are_at_least_a_step() -> None:
    found = plan("train.length=10 steps", "schedule.warmup=0 steps", "evaluate.every=1%", "checkpoint.every=1 samples")
    assert (found.evaluate_every["scores"], found.checkpoint_every) == (1, 1)


def test_all_is_evaluated_when_new_heads_have_learnt() -> None:
    found = plan(
        "model.name=null",
        "init.weights=x",
        "train.length=1000 steps",
        "schedule.warmup=0 steps",
        "train.heads_first=7%",
        "evaluate.every=50%",
        "checkpoint.every=50%",
        "checkpoint.best=val_top1",
    )
    steps = range(1, 1001)
    assert [step for step in steps if found.due(step).evaluations] == [70, 500, 1000]
    found = replace(found, best_from="scores")
    assert [step for step in steps if found.due(step).save] == [70, 500, 1000]


def test_records_do_not_depend_on_the_clock_and_lines_do() -> None:
    def due(length: int, *settings: str) -> tuple[list[int], list[int]]:
        found = plan(f"train.length={length} steps", "schedule.warmup=0 steps", *settings)
        steps = [(step, found.due(step)) for step in range(1, length + 1)]
        return [step for step, now in steps if now.record], [step for step, now in steps if now.line]

    assert due(20) == (list(range(1, 21)), [20])
    assert due(300, "train.log_every=1 s") == ([1, *range(3, 301, 3)], [300])
    assert due(10_000, "train.log_every=600 s") == ([1, *range(50, 10_001, 50)], [10_000])
    by_steps = [1, 8, 16, 20]
    assert due(20, "train.log_every=8") == due(20, "train.log_every=8 steps") == (by_steps, by_steps)


@pytest.mark.parametrize(
    ("overrides", "world_size", "said"),
    [
        ([], 48, "train.global_batch = 4096 is not divisible by 48 ranks"),
        (
            ["train.length=1 epochs"],
            1,
            "schedule.warmup = 10000 steps (10,000 steps)",
        ),
        (
            ["augment.mixup=0.2", "train.micro_batch=1"],
            8,
            "mix a micro-batch in pairs, and 1 = train.global_batch 4096 / (8 ranks x 512) is odd",
        ),
    ],
)
def test_refusals_show_their_arithmetic(overrides: list[str], world_size: int, said: str) -> None:
    with pytest.raises(UserError) as error:
        plan(*overrides, world_size=world_size)
    assert said in str(error.value)


def test_the_advice_works() -> None:
    assert plan("train.micro_batch=32", world_size=8).accumulation == 16
    assert plan("train.global_batch=4128", "train.micro_batch=43", "data.streams=1", world_size=48).accumulation == 2
