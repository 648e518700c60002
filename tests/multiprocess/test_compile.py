"""A compiled model trains as the plain one."""

import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Forge
from ranks import STEPS, metrics, settings
from test_train import plain_losses


def begin_again(run: Path, copy: Path) -> None:
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / f"step-{STEPS:08d}")
    (copy / "metrics.jsonl").unlink()


def without_trials() -> None:
    """In a rank: keep Inductor from starting processes that import torch, one for each core, and from compiling a
    library for each of the processor's instruction sets, to find out whether the compiler and Python can do what the
    kernels then show.

    It tries those of 512 bits in any case, for six CPU seconds: the kernels are of 256.
    """
    from torch._inductor import config

    config.compile_threads, config.cpp.vec_isa_ok, config.cpp.simdlen = 1, True, 256


def train_compiled(overrides: list[str]) -> None:
    """In a rank; says how many graphs were made."""
    from forked import train
    from torch._dynamo.utils import counters
    from torch._inductor import config

    without_trials()
    train([overrides])
    assert not config.triton.mix_order_reduction, "Its kernels lose gradients without a word."
    print("graphs", counters["stats"]["unique_graphs"])


def train_and_say_whose_linear(runs: tuple[list[str], list[str]]) -> None:
    """In a rank: a run that is not compiled, then one whose graphs are made and not compiled."""
    import torch
    from deepspeed import DeepSpeedEngine
    from forked import train

    from pipeline.train import loop

    compile_, step = DeepSpeedEngine.compile, loop.training_step

    def step_and_say(*arguments: Any) -> Any:
        print("linear", torch.nn.functional.linear.__name__)
        return step(*arguments)

    DeepSpeedEngine.compile = lambda self: compile_(self, backend="eager")
    loop.training_step = step_and_say
    train(list(runs))


def train_without_compiler(overrides: list[str]) -> None:
    """In a rank: as on a host without a C++ compiler."""
    from forked import train
    from torch._inductor import config

    without_trials()
    config.cpp.cxx = (None, "/absent/g++")
    train([overrides])


@pytest.mark.slow
def test_a_host_without_a_compiler_is_named_in_one_line(
    forge: Forge, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback of a hundred lines."""
    run = settings(dataset, tmp_path, "compiled", "engine.compile=true", "model.depth=1", "train.micro_batch=24")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    started = forge.start_work(1, "test_compile:train_without_compiler", run)
    assert started.wait() == [2], started.said()
    said = started.said()
    assert "Traceback" not in said, said
    assert (
        f"engine.compile = true needs a C++ compiler (g++, or what CXX names), which {socket.gethostname()} does not"
        " have" in said
    )
    assert "Install it, or use engine.compile=false." in said


@pytest.mark.slow
def test_compiled_graphs_hold_no_layer_of_deepspeed(forge: Forge, dataset: Path, tmp_path: Path) -> None:
    """torch 2.11 loses gradients when it compiles the linear layer that DeepSpeed puts into torch at stage 3, for all
    later runs too.
    """
    plain, compiled = (
        settings(dataset, tmp_path, name, "engine.zero_stage=3", "train.micro_batch=24", "evaluate.every=100%", *more)
        for name, more in (("plain", []), ("compiled", ["engine.compile=true"]))
    )
    said = forge.start_work(1, "test_compile:train_and_say_whose_linear", [plain, compiled]).finish()
    assert [line for line in said.splitlines() if line.startswith("linear")] == (
        ["linear zero3_linear_wrap"] * STEPS + ["linear linear"] * STEPS
    )
    for name in ("loss", "grad_norm"):
        expected, found = metrics(tmp_path / "plain", name), metrics(tmp_path / "compiled", name)
        np.testing.assert_allclose([found[s] for s in expected], list(expected.values()), rtol=2e-5)


@pytest.mark.slow
def test_losses_of_a_compiled_model_equal_plain_pytorch_and_resume_bit_for_bit(
    forge: Forge, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["model.depth=1", "train.micro_batch=24", "evaluate.every=100%"]
    run = settings(dataset, tmp_path, "compiled", "engine.compile=true", *more)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    said = forge.start_work(1, "test_compile:train_compiled", run).finish()
    assert int(said.split("graphs ")[1]) >= 1, "it was compiled"
    found = metrics(tmp_path / "compiled")
    expected = plain_losses(settings(dataset, tmp_path, "plain", "model.depth=1"))
    np.testing.assert_allclose([found[s] for s in sorted(found)], expected, rtol=2e-5)
    # As a kill after step 3 leaves it, begun again by another process.
    begin_again(tmp_path / "compiled", tmp_path / "cut")
    resumed = settings(dataset, tmp_path, "cut", "engine.compile=true", *more)
    assert "resumed from" in forge.start_work(1, "test_compile:train_compiled", resumed).finish()
    assert metrics(tmp_path / "cut") == {step: loss for step, loss in found.items() if step > 3}
    assert metrics(tmp_path / "cut", "val_loss") == metrics(tmp_path / "compiled", "val_loss")
