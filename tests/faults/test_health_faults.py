"""What is planted into a batch, a rank's gradient or a weight never reaches the weights; a jump of the loss is
answered.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forge
from planted import BAD_STEP, EVALUATION_SECONDS
from ranks import metrics, settings
from tiny import make_dataset

from pipeline import model as models
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.checkpoint.store import read_state
from pipeline.cluster.status_files import RESUME, read_status
from pipeline.review import samples
from pipeline.settings import schema
from pipeline.settings.commands.operate import SamplesConfig

STEPS = 16
DECAY = 0.8
EMA = [f"optimizer.ema_decay={DECAY}", "checkpoint.every=2 steps"]


def of(dataset: Path, out: Path, name: str, *more: str) -> list[str]:
    return settings(
        dataset,
        out,
        name,
        f"train.length={STEPS} steps",
        "evaluate.every=100%",
        "checkpoint.every=4 steps",
        "checkpoint.keep=9",
        "health.spike_window=12",
        "health.straggler_ratio=0",
        *more,
    )


def mix_of(dataset: Path, *weights: tuple[int, int]) -> str:
    """A mixture with the split "more". weights: (step from which on, its weight)."""
    entries = (f"{{path: {dataset}, split: more, weight: {weight}, from_step: {step}}}" for step, weight in weights)
    return f"data.mix=[{', '.join(entries)}]"


@pytest.fixture(scope="module")
def out(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("health")
    # More samples than the runs take: those that make the loss jump do not come again in a second epoch.
    dataset = make_dataset(folder / "data", {"train": 500, "val": 37, "more": 400})
    mixed = [*of(dataset, folder, "mixed", "health.on_spike=rollback"), mix_of(dataset, (0, 1), (9, 3))]
    runs = [
        *(
            ("nan in a loss", of(dataset, folder, f"loss{stage}", f"engine.zero_stage={stage}", *EMA))
            for stage in range(4)
        ),
        ("nan in a loss", of(dataset, folder, "loss-bf16", "engine.precision=bf16", *EMA)),
        *(
            (
                "nan in a loss",
                of(dataset, folder, f"loss{stage}-fp16", f"engine.zero_stage={stage}", "engine.precision=fp16", *EMA),
            )
            for stage in (1, 3)
        ),
        ("nan in a gradient", of(dataset, folder, "gradient0", "engine.zero_stage=0")),
        ("nan in a gradient", of(dataset, folder, "gradient1", "engine.zero_stage=1")),
        ("nan in a weight", of(dataset, folder, "weight", "engine.zero_stage=0", "train.max_skipped_steps=3")),
        ("spike", of(dataset, folder, "said")),
        ("", of(dataset, folder, "said", f"train.length={STEPS + 1} steps")),  # A second start.
        ("spike", of(dataset, folder, "rolled", "health.on_spike=rollback")),
        ("spike", mixed),
        ("", [*mixed, mix_of(dataset, (0, 1), (9, 3), (17, 2)), "train.length=17 steps"]),
        ("", [*mixed, mix_of(dataset, (0, 1), (9, 3), (18, 0)), "train.length=17 steps"]),
        ("spike", of(dataset, folder, "tired", "health.on_spike=rollback", "health.max_rollbacks=0")),
        ("slow rank", of(dataset, folder, "slow", "train.length=4 steps", "health.straggler_ratio=1.5")),
        ("", of(dataset, folder, "missing", "train.length=4 steps", "evaluate.every=4 steps")),
        ("slow evaluation", of(dataset, folder, "missing", "train.length=6 steps", "evaluate.every=4 steps")),
    ]
    forge.start_work(2, "planted:train", runs).finish()
    return folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    return models.read_weights(run / "checkpoints" / f"step-{STEPS:08d}")[1]


LOSSES = ["loss0", "loss1", "loss2", "loss3", "loss-bf16", "loss1-fp16", "loss3-fp16"]


@pytest.mark.parametrize("name", [*LOSSES, "gradient0", "gradient1"])
def test_what_is_no_number_never_reaches_the_weights(out: Path, name: str) -> None:
    skipped = metrics(out / name, "skipped_steps")
    assert [skipped[step] for step in (BAD_STEP - 1, BAD_STEP, STEPS)] == [0, 1, 1], "that step alone, on every rank"
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(out / name).values())
    losses = metrics(out / name)
    assert all(np.isfinite(loss) for step, loss in losses.items() if step != BAD_STEP)
    assert len(losses) == STEPS


def test_stages_agree_on_what_follows(out: Path) -> None:
    """A skipped step leaves weights, moments and the count of steps as they were, whatever the stage."""
    expected = metrics(out / "loss1")
    for name in ("loss0", "loss2", "loss3"):
        found = metrics(out / name)
        for step in range(BAD_STEP + 1, STEPS + 1):
            assert found[step] == pytest.approx(expected[step], rel=2e-5), (name, step)


@pytest.mark.parametrize("name", LOSSES)
def test_a_skipped_step_leaves_the_mean_of_the_weights_as_it_was(out: Path, name: str) -> None:
    """Step 10 is skipped: the mean after it is that after step 9, and the weights of step 9 are still those."""
    two_before, after = (
        ShardedTensors.open(out / name / "checkpoints" / f"step-{step:08d}") for step in (BAD_STEP - 2, BAD_STEP)
    )
    means, weights, found = two_before.full_tensors("ema"), after.full_tensors("weights"), after.full_tensors("ema")
    for tensor, mean in means.items():
        expected = torch.lerp(torch.from_numpy(mean), torch.from_numpy(weights[tensor]), 1 - DECAY).numpy()
        assert np.array_equal(found[tensor], expected), tensor
        assert not np.array_equal(expected, weights[tensor]), "it would move"


def test_a_broken_weight_ends_the_run_in_one_line(out: Path) -> None:
    error = (out / "weight.error").read_text()
    assert "more than train.max_skipped_steps = 3" in error
    newest = max((out / "weight" / "checkpoints").glob("step-*"))
    assert read_state(newest).step < BAD_STEP, "no checkpoint is made of broken weights"


def log(run: Path) -> str:
    return (run / "log.txt").read_text()


def test_a_spike_is_said(out: Path) -> None:
    assert f"step {BAD_STEP}: a loss of" in log(out / "said")
    assert metrics(out / "said", "loss_spikes")[STEPS] == 1
    assert metrics(out / "said", "skipped_steps")[STEPS] == 0
    # What was counted is in the checkpoint: a second start counts on.
    assert metrics(out / "said", "loss_spikes")[STEPS + 1] == 1


def rows_of_steps(out: Path, name: str) -> list[tuple[int, list[int]]]:
    """(step from 0, rows of rank 0) in the order in which they were trained."""
    lines = (out / f"{name}.0.txt").read_text().splitlines()
    return [(int(step), list(map(int, rows))) for step, *rows in (line.split() for line in lines)]


def test_a_run_can_go_back_and_leave_out_the_data_that_did_it(out: Path) -> None:
    trained = rows_of_steps(out, "rolled")
    undisturbed = dict(rows_of_steps(out, "said"))
    # To step 10, where it jumps; back to the checkpoint of step 8; and on with what step 11 would have taken.
    assert [step for step, _ in trained] == [*range(BAD_STEP), *range(8, STEPS)]
    again = trained[BAD_STEP:]
    for step, rows in again[: STEPS - BAD_STEP]:
        assert rows == undisturbed[step + 2]
    state = read_state(out / "rolled" / "checkpoints" / f"step-{STEPS:08d}")
    assert state.left_out == [(8, 2)]
    assert "back to" in log(out / "rolled")
    # One record a step: those of the batches that were left out are gone.
    steps = [json.loads(line)["step"] for line in (out / "rolled" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, STEPS + 1), STEPS]
    assert "after step 8, from which the run continues" in log(out / "rolled")
    assert "jumped 1 time, more than health.max_rollbacks = 0" in (out / "tired.error").read_text()
    for name in ("weight", "tired"):
        status = read_status(out / name)
        assert (status.status, status.code) == ("diverged", 2)


def test_a_mixture_goes_on_after_a_rollback_where_it_was(out: Path) -> None:
    """Batches are skipped, in one of which the shares change: the steps after them have the batches and shares of an
    undisturbed run.
    """
    trained = rows_of_steps(out, "mixed")
    assert [step for step, _ in trained] == [*range(BAD_STEP), *range(8, STEPS), STEPS]
    run = out / "mixed"
    assert read_state(run / "checkpoints" / f"step-{STEPS:08d}").left_out == [(8, 2)]
    for step, rows in trained[BAD_STEP:]:
        table = samples.run(schema.load(SamplesConfig, None, [f"run={run}", f"step={step + 1}"]))
        assert [row["row"] + 500 * (row["set"] == "data:more") for row in table[: len(rows)]] == rows
        batch = step + 2  # Half of each until batch 9, then three of four until batch 18.
        assert sum(row >= 500 for row in rows) == (0 if batch == 18 else 9)
    refused = (out / "mixed.error").read_text()
    assert "data.path and data.mix of its 18 batches, of which 2 skipped in a rollback, were set 0: " in refused
    assert "split more, 1/2, then 3/4 from step 9, then 2/3 from step 17. Set them back" in refused
    assert "with from_step=18 or later" in refused


def test_an_evaluation_that_is_made_up_is_no_time_of_training(out: Path) -> None:
    assert sorted(metrics(out / "missing", "val_loss")) == [4, 6]
    assert metrics(out / "missing", "images_per_second")[5] > 24 / EVALUATION_SECONDS


def test_a_slow_rank_is_named(out: Path) -> None:
    assert "rank 1 on" in log(out / "slow")
    assert "slow: rank" in log(out / "slow")


def test_a_stop_between_a_spike_and_its_discovery_changes_nothing(forge: Forge, tmp_path: Path) -> None:
    """Spikes are looked for when something is logged or saved; a run that stops before that is resumed before the
    spike.
    """
    dataset = make_dataset(tmp_path / "data", {"train": 500, "val": 37})

    def run(name: str) -> list[str]:
        return of(
            dataset, tmp_path, name, "health.on_spike=rollback", "train.log_every=100", "checkpoint.every=8 steps"
        )

    forge.start_work(2, "planted:train", [("spike", run("whole"))]).finish()
    stopped = forge.start_work(2, "planted:train", [("spike, then stop", run("cut"))])
    assert stopped.wait() == [RESUME, RESUME], stopped.said()
    assert "is not saved: the resumed run trains from step 8" in log(tmp_path / "cut")
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").glob("step-*")] == ["step-00000008"]
    forge.start_work(2, "planted:train", [("spike", run("cut"))]).finish()
    for run_folder in ("whole", "cut"):
        assert "back to" in log(tmp_path / run_folder)
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
