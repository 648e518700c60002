"""Runs on one GPU, or on a CPU where there is none: exact resume, plain PyTorch's losses, faults, memory."""

import itertools
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import TINY
from forked import ForkedRun
from polling import until
from ranks import STEPS, metrics, settings
from test_train import MASKED, MIXED, assert_same_state, plain_losses

from pipeline import model as models
from pipeline import objectives
from pipeline.cluster.status_files import RESUME
from pipeline.estimate.memory import rank_memory
from pipeline.estimate.plan import make_plan
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

HAS_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.slow] if HAS_GPU else [pytest.mark.slow, pytest.mark.ranks]
# ZeRO stage and precision. On a CPU only the code of the test is of interest: tests/multiprocess has the rest.
EXACT = [
    (stage, precision)
    for precision in ("fp32", "bf16", "fp16")
    for stage in ((0, 1, 2, 3) if precision == "fp32" else (1, 2, 3))
    if HAS_GPU or (stage, precision) == (3, "bf16")
]
# And whether it is compiled, of which tests/multiprocess/test_compile.py has a CPU's part.
EXACT_RUNS = [(*run, False) for run in EXACT] + [(1, "bf16", True)] * HAS_GPU
# Dropout, mixing and an average of the weights, whose random numbers and tensors have to come back as well.
ALL_OF_IT = ("schedule.decay=constant", "model.dropout=0.1", "optimizer.ema_decay=0.8", *MIXED)
LENGTH, STOPPED_AFTER = (40, 24) if HAS_GPU else (20, 13)
LONG = (f"train.length={LENGTH} steps", "checkpoint.every=5 steps", "evaluate.every=100%", *ALL_OF_IT)
PLAIN = ("schedule.decay=constant",)
LOSSES: dict[str, list[str]] = {"plain": []}
if HAS_GPU:
    LOSSES |= {
        "mixed": [*MIXED],
        "other optimizer": ["engine.fused=false"],
        "stage3": ["engine.zero_stage=3"],
        "masked": [*MASKED],
        "recomputed": ["engine.activation_checkpointing=true"],
        "offload": ["engine.offload=true"],
        "fp16": ["engine.precision=fp16"],
        # After runs at stage 3, whose linear layers torch 2.11 would compile wrongly.
        "compiled": ["engine.compile=true"],
        "compiled, stage3": ["engine.compile=true", "engine.zero_stage=3"],
    }
# Files of DeepSpeed and of this project with lines where the host waits in a step (docs/performance.md), by ZeRO stage,
# in fp32.
WAITS = {
    0: {"zero/engine.py"},
    1: {"runtime/utils.py"},
    2: {"runtime/utils.py"},
    3: {"runtime/utils.py", "zero/stage3.py", "cuda/streams.py"},  # The stream on which gradients are reduced.
}


@dataclass
class OwnRun:
    """A rank in a process of its own, with what a ForkedRun has of methods: CUDA cannot be forked."""

    process: subprocess.Popen[bytes]
    output: Path

    def send(self, rank: int, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 550) -> list[int]:
        return [self.process.wait(seconds)]

    def finish(self) -> str:
        assert self.wait() == [0], self.said()[-5000:]
        return self.said()

    def has_left(self, rank: int) -> bool:
        return self.process.poll() is not None

    def said(self, rank: int = 0) -> str:
        return self.output.read_text()


# Starts a rank that calls a function of a file of tests ("module:name") with an argument that JSON can hold.
Start = Callable[[str, Any], OwnRun | ForkedRun]


def start_own(function: str, argument: Any, output: Path) -> OwnRun:
    code = (
        f"import sys; sys.path[:] = {sys.path}; from forked import work; import json; work({function!r},"
        " json.loads(sys.argv[1]))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({} if HAS_GPU else {"DS_ACCELERATOR": "cpu"})}
    with open(output, "wb") as file:
        return OwnRun(
            subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(argument)], env=environment, stdout=file, stderr=file
            ),
            output,
        )


@pytest.fixture(scope="module")
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Start:
    if not HAS_GPU:
        forge = request.getfixturevalue("forge")
        return lambda function, argument: forge.start_work(1, function, argument)
    folder, numbers = tmp_path_factory.mktemp("said"), itertools.count()
    return lambda function, argument: start_own(function, argument, folder / f"{next(numbers)}.txt")


def test_a_rank_of_its_own_is_started(tmp_path: Path) -> None:
    """Where there is no GPU, the other tests fork theirs."""
    assert start_own("builtins:print", ["an argument"], tmp_path / "said.txt").finish() == "['an argument']\n"


def steps_of(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and norm of the gradient by step, in order."""
    norms = metrics(run, "grad_norm")
    return {step: (loss, norms[step]) for step, loss in sorted(metrics(run).items())}


def train_until_told(argument: tuple[int, list[str]]) -> None:
    """In a rank: a run that stands still after a step until it hears that it is to stop: otherwise it may have ended by
    then.
    """
    from forked import told_to_stop, train

    from pipeline.train import loop

    step_of, heard = loop.training_step, told_to_stop()

    def halt_before(*arguments: Any) -> Any:
        if arguments[2] == argument[0]:
            heard.wait()
        return step_of(*arguments)

    loop.training_step = halt_before
    train([argument[1]])


def little_memory(arguments: tuple[list[str], float]) -> None:
    """In a rank: a run on a GPU of which it may use this share."""
    from forked import train

    torch.cuda.set_per_process_memory_fraction(arguments[1])
    train([arguments[0]])


def waits_in_steps(stages: list[int]) -> None:
    """In a rank: prints the files with lines where the host waits for the GPU in a step that logs nothing, for each
    ZeRO stage.
    """
    from rank_memory import make_engine, noise

    from pipeline.process.distributed import from_environment
    from pipeline.train.loop import training_step
    from pipeline.train.zero.engine import start_ranks

    ranks = from_environment()
    start_ranks(ranks)
    for stage in stages:
        given = [*TINY, f"engine.zero_stage={stage}", "engine.precision=fp32"]
        engine, plan = make_engine(schema.load(RunConfig, None, given), 4, ranks, fused=HAS_GPU)
        batch = noise(plan.micro_batch, (16, 16), 4, 0)
        if HAS_GPU:
            batch = replace(
                batch,
                views=(batch.views[0].pin_memory(),),
                labels=batch.labels.pin_memory(),
                valid=batch.valid.pin_memory(),
            )
        for _ in range(3):  # The optimizer makes its state, and stage 3 traces the order of its parameters.
            training_step(engine, [batch] * plan.accumulation, 0, 1e-3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if HAS_GPU:
                torch.cuda.set_sync_debug_mode("warn")
            training_step(engine, [batch] * plan.accumulation, 0, 1e-3)
            if HAS_GPU:
                torch.cuda.set_sync_debug_mode("default")
        files = {"/".join(Path(w.filename).parts[-2:]) for w in caught if "called a synchronizing" in str(w.message)}
        print("waits", json.dumps([stage, sorted(files)]), flush=True)


@pytest.fixture(scope="module")
def out(start: Start, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All short runs that need no kill, in one process."""
    folder = tmp_path_factory.mktemp("gpu")
    runs = []
    for stage, precision, compiled in EXACT_RUNS:
        for name, lives in (("whole", [STEPS]), ("cut", [3, STEPS])):
            of_stage = [
                f"engine.zero_stage={stage}",
                f"engine.precision={precision}",
                f"engine.compile={compiled}".lower(),
            ]
            run = settings(dataset, folder, f"{name}-{stage}-{precision}-{compiled}", *of_stage, *ALL_OF_IT)
            runs += [[*run, f"train.length={steps} steps"] for steps in lives]
    runs += [settings(dataset, folder, name, *PLAIN, *more) for name, more in LOSSES.items()]
    if not HAS_GPU:
        runs.append(settings(dataset, folder, "unbroken", *LONG))
    start("test_train:train_with_fp16", runs).finish()
    return folder


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_are_those_of_plain_pytorch_on_a_cpu(dataset: Path, out: Path, name: str) -> None:
    more = [setting for setting in LOSSES[name] if not setting.startswith(("engine.", "evaluate."))]
    expected = plain_losses(settings(dataset, out, "plain", *PLAIN, *more))
    found = metrics(out / name)
    np.testing.assert_allclose(
        [found[s] for s in sorted(found)], expected, rtol=3e-3 if name.startswith(("compiled", "fp16")) else 5e-4
    )
    assert expected[-1] != pytest.approx(expected[0], rel=0.01), "it learns, so the comparison means something"


@pytest.mark.parametrize(("stage", "precision", "compiled"), EXACT_RUNS)
def test_a_resumed_run_is_the_whole_one_to_the_bit(out: Path, stage: int, precision: str, compiled: bool) -> None:
    whole, cut = (out / f"{name}-{stage}-{precision}-{compiled}" for name in ("whole", "cut"))
    assert metrics(whole) == metrics(cut)
    assert metrics(whole, "grad_norm") == metrics(cut, "grad_norm")
    assert_same_state(whole, cut, ranks=1)
    assert "resumed from" in (cut / "log.txt").read_text()


def test_evaluation_on_the_device_is_that_on_a_cpu(dataset: Path, out: Path, tmp_path: Path) -> None:
    from pipeline.evaluate import score_report
    from pipeline.settings.commands.weights import ScoreConfig

    found = {}
    for device in ("auto", "cpu"):  # The same where there is no GPU.
        given = [
            f"weights={out / 'plain'}",
            f"data={dataset}",
            "split=val",
            f"device={device}",
            "shots=[2]",
            "neighbours=5",
            f"out={tmp_path / device}",
        ]
        found[device] = score_report.run(schema.load(ScoreConfig, None, given))
    assert found["auto"]["top1"] == found["cpu"]["top1"]
    assert found["auto"]["loss"] == pytest.approx(found["cpu"]["loss"], rel=1e-4)
    assert found["auto"]["fewshot"][0]["top1"] == pytest.approx(found["cpu"]["fewshot"][0]["top1"], abs=0.03)
    assert found["auto"]["loss"] == pytest.approx(metrics(out / "plain", "val_loss")[STEPS], rel=1e-3)


def test_a_run_that_is_killed_and_stopped_is_the_whole_one(start: Start, out: Path, dataset: Path) -> None:
    """SIGKILL after the first checkpoint, then SIGTERM, then to the end. On a GPU the whole run is in a process of its
    own, as every life is.
    """
    unbroken = start("forked:train", [settings(dataset, out, "unbroken", *LONG)]) if HAS_GPU else None
    broken = settings(dataset, out, "broken", *LONG)
    latest = out / "broken" / "checkpoints" / "latest"
    first = start("test_gpu_runs:train_until_told", [8, broken])
    until(lambda: latest.exists() or first.has_left(0))
    first.send(0, signal.SIGKILL)
    assert first.wait() == [-signal.SIGKILL], first.said()[-3000:]
    reached = latest.read_text()
    second = start("test_gpu_runs:train_until_told", [STOPPED_AFTER, broken])
    until(lambda: latest.read_text() != reached or second.has_left(0))
    second.send(0, signal.SIGTERM)
    assert second.wait() == [RESUME], second.said()[-3000:]
    third = start("forked:train", [broken]).finish()
    if unbroken:
        unbroken.finish()
    values = steps_of(out / "unbroken")
    assert list(values) == list(range(1, LENGTH + 1))
    assert steps_of(out / "broken") == values, first.said()[-2000:] + second.said()[-2000:] + third[-2000:]
    a, b = (models.read_weights(out / name).state for name in ("broken", "unbroken"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_host_waits_only_where_it_is_documented(start: Start) -> None:
    """As CUDA itself reports it. (tests/train/test_fake_gpu.py looks at torch's operators, in all precisions.)"""
    stages = list(WAITS) if HAS_GPU else [3]
    said = start("test_gpu_runs:waits_in_steps", stages).finish()
    found = dict(json.loads(line.removeprefix("waits ")) for line in said.splitlines() if line.startswith("waits "))
    assert found == {stage: sorted(WAITS[stage]) if HAS_GPU else [] for stage in stages}


@pytest.mark.parametrize("more", [[], ["engine.activation_checkpointing=true"], ["engine.zero_stage=3"]], ids=str)
def test_predicted_memory_is_what_a_step_takes(
    gpu: torch.device, start: Start, dataset: Path, tmp_path: Path, more: list[str]
) -> None:
    overrides = [
        "name=x",
        f"out={tmp_path}",
        f"data.path={dataset}",
        "model.name=ViT-B/16",
        "train.global_batch=64",
        "train.micro_batch=64",
        "train.length=3 steps",
        "train.log_every=1",
        "train.loss=softmax",
        "schedule.warmup=0 steps",
        "evaluate.every=100%",
        "evaluate.batch=8",
        "checkpoint.every=100%",
        "track.enabled=false",
        "track.figures=false",
        *more,
    ]
    start("forked:train", [overrides]).finish()
    config = schema.load(RunConfig, None, overrides)
    plan = make_plan(config, 150, 1)
    model = objectives.new_backbone(config, 4)
    predicted = rank_memory(model, config, plan.micro_batch, plan.accumulation, 1)
    measured = max(metrics(tmp_path / "x", "peak_memory_gib").values()) * 2**30
    assert predicted.total == pytest.approx(measured, rel=0.10), predicted


def test_out_of_memory_in_the_dry_run_is_one_line(
    gpu: torch.device, start: Start, dataset: Path, tmp_path: Path
) -> None:
    run = settings(
        dataset,
        tmp_path,
        "large",
        "model.name=ViT-L/16",
        "model.image_size=224",
        "train.global_batch=256",
        "train.micro_batch=256",
        "engine.precision=bf16",
        "model.width=null",
        "model.depth=null",
        "model.mlp_width=null",
        "model.num_heads=null",
        "data.streams=1",
        "data.window=16",
    )
    process = start("test_gpu_runs:little_memory", (run, 0.2))
    assert process.wait() == [2]
    errors = [line for line in process.said().splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "ran out of memory before the first step" in errors[0]
    assert "train.micro_batch=" in errors[0]
