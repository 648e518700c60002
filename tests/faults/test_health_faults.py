"""What is planted into a batch, a rank's gradient or a weight never reaches the weights; a jump of the loss is answered."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import ROOT, metrics, settings
from tiny import make_dataset

from pipeline.checkpoint import read_state

STEPS = 16
BAD_STEP = 10  # Counted from 1.
# Runs of two ranks, one after another, each with a fault of its own; all of them in one start.
WORKER = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import torch
from pipeline import schema, train
from pipeline.config import RunConfig
from pipeline.engine import Engine
from pipeline.errors import UserError

plain_step, BAD_STEP = Engine.train_step, int(sys.argv[3])
for fault, overrides in json.loads(sys.argv[2]):
    config = schema.load(RunConfig, None, overrides)
    seen = open(f"{config.out}/{config.name}.{os.environ['RANK']}.txt", "a")
    bad_rows = []

    def step_with_fault(self, step, batches, lr, loss_of, *rest):
        own_loss, rows = loss_of, [int(row) for batch in batches for row in batch.rows]
        print(step, *rows, file=seen, flush=True)
        if fault == "nan in a loss" and step + 1 == BAD_STEP and self.ranks.rank == 1:
            loss_of = lambda *a, **k: own_loss(*a, **k) * float("nan")
        if fault == "nan in a gradient" and step + 1 == BAD_STEP and self.ranks.rank == 0:
            parameter = next(p for p in self.engine.module.parameters() if p.requires_grad)
            handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
        if fault == "nan in a weight" and step + 1 == BAD_STEP:
            with torch.no_grad():
                next(self.engine.module.parameters()).fill_(float("nan"))
        if fault == "spike":  # Of the data: it comes again with the same samples.
            if step + 1 == BAD_STEP and not bad_rows:
                bad_rows.extend(rows)
            if set(rows) & set(bad_rows[:2]):
                loss_of = lambda *a, **k: own_loss(*a, **k) * 40
        if fault == "slow rank" and self.ranks.rank == 1:
            loss_of = lambda *a, **k: (time.sleep(0.3), own_loss(*a, **k))[1]
        result = plain_step(self, step, batches, lr, loss_of, *rest)
        if fault == "nan in a gradient" and step + 1 == BAD_STEP and self.ranks.rank == 0:
            handle.remove()
        return result

    Engine.train_step = step_with_fault
    try:
        train.run(config)
    except UserError as error:
        open(f"{config.out}/{config.name}.error", "w").write(str(error))
"""


def run(runs: list[tuple[str, list[str]]]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        arguments = [sys.executable, "-c", WORKER, str(ROOT), json.dumps(runs), str(BAD_STEP)]
        processes.append(
            subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        outputs = [process.communicate(timeout=540)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output


def of(dataset: Path, out: Path, name: str, *more: str) -> list[str]:
    return settings(
        dataset, out, name, f"train.length={STEPS} steps", "evaluate.every=100%", "checkpoint.every=4 steps",
        "checkpoint.keep=9", "health.spike_window=12", "health.straggler_ratio=0", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("health")
    # More samples than the runs take: those that make the loss jump do not come again in a second epoch.
    dataset = make_dataset(folder / "data", {"train": 500, "val": 37})
    run(
        [
            *(
                ("nan in a loss", of(dataset, folder, f"loss{stage}", f"engine.zero_stage={stage}"))
                for stage in range(4)
            ),
            ("nan in a loss", of(dataset, folder, "loss-bf16", "engine.precision=bf16")),
            ("nan in a gradient", of(dataset, folder, "gradient0", "engine.zero_stage=0")),
            ("nan in a gradient", of(dataset, folder, "gradient1", "engine.zero_stage=1")),
            ("nan in a weight", of(dataset, folder, "weight", "engine.zero_stage=0", "train.max_skipped_steps=3")),
            ("spike", of(dataset, folder, "said")),
            ("spike", of(dataset, folder, "skipped", "health.on_spike=skip")),
            ("spike", of(dataset, folder, "rolled", "health.on_spike=rollback")),
            ("spike", of(dataset, folder, "tired", "health.on_spike=rollback", "health.max_rollbacks=0")),
            ("slow rank", of(dataset, folder, "slow", "train.length=4 steps", "health.straggler_ratio=1.5")),
        ]
    )
    return folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / f"step-{STEPS:08d}" / "model.pt", weights_only=True)["state"]


@pytest.mark.parametrize("name", ["loss0", "loss1", "loss2", "loss3", "loss-bf16", "gradient0", "gradient1"])
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


def test_a_broken_weight_ends_the_run_in_one_line(out: Path) -> None:
    error = (out / "weight.error").read_text()
    assert "more than train.max_skipped_steps = 3" in error
    newest = max((out / "weight" / "checkpoints").glob("step-*"))
    assert read_state(newest)["step"] < BAD_STEP, "no checkpoint is made of broken weights"


def log(run: Path) -> str:
    return (run / "log.txt").read_text()


def test_a_spike_is_said(out: Path) -> None:
    assert f"step {BAD_STEP}: a loss of" in log(out / "said")
    assert metrics(out / "said", "loss_spikes")[STEPS] == 1
    assert metrics(out / "said", "skipped_steps")[STEPS] == 0


def test_a_spike_can_be_left_out_of_the_weights(out: Path) -> None:
    assert "(not taken)" in log(out / "skipped")
    assert metrics(out / "skipped", "skipped_steps")[STEPS] == 1
    assert metrics(out / "skipped")[BAD_STEP + 1] < metrics(out / "said")[BAD_STEP + 1] * 1.5


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
    assert state["left_out"] == [[8, 2]]
    assert "back to" in log(out / "rolled")
    assert "jumped 1 times, more than health.max_rollbacks = 0" in (out / "tired.error").read_text()


def test_a_slow_rank_is_named(out: Path) -> None:
    assert "rank 1 on" in log(out / "slow")
    assert "is slow: its data and forward passes take" in log(out / "slow")
