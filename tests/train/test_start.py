"""What a rank imports before it trains."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from forked import Forge
from polling import until
from ranks import ROOT, settings
from safetensors.torch import save_file

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.model.weights import safetensors_metadata
from pipeline.monitor.page_folder import PageFolder
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.train import setup, start


@pytest.mark.slow
def test_a_rank_waits_for_nothing_that_nobody_uses() -> None:
    """Neither MLflow nor Inductor, which are both there for whoever asks for them later."""
    code = (
        "import sys, pipeline.train.zero.engine; "
        "print([name for name in ('mlflow', 'torch._inductor.compile_fx') if name in sys.modules]); "
        "import deepspeed.runtime.compiler as compiler, importlib.util; "
        "print(importlib.util.find_spec('mlflow').name, compiler.compile.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "mlflow compile"], done.stdout


def refused(command: str, *runs: list[str], **environment: str) -> list[str]:
    """The error of each of several runs, which end with code 2 in one process without torch and DeepSpeed. On a slow
    machine they also say that they are at work.
    """
    script = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "launch")!r})
sys.modules["torch"] = sys.modules["deepspeed"] = None
for overrides in {list(runs)}:
    sys.argv = ["{command}.py", *overrides]
    try:
        runpy.run_path({str(ROOT / "launch" / command)!r} + ".py", run_name="__main__")
    except SystemExit as end:
        print(end.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert (done.returncode, done.stdout) == (0, len(runs) * "2\n"), done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.endswith(" ...")]
    assert len(errors) == len(runs), done.stderr
    return errors


def test_another_host_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, which speaks for all, has it, and would wait for that host without a reason."""
    for rank, local_rank, said in (
        ("8", "0", f"{socket.gethostname()}: no data"),
        ("9", "1", "no data"),
        ("0", "0", "no data"),
    ):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(UserError) as error, start._said_by_each_host():
            raise UserError("no data")
        assert (str(error.value), error.value.on_one_rank) == (said, said != "no data")


@pytest.mark.parametrize(
    ("loss", "more", "said"),
    [
        ("softmax", ["model.pool_norm=true"], "pool_norm"),
        ("mae", ["model.pool_norm=true"], "pool_norm"),
        ("dino", ["objective.local_size=8", "optimizer.ema_decay=0.9"], "leave out optimizer.ema_decay"),
    ],
    ids=["softmax", "mae", "teacher"],
)
def test_a_model_that_cannot_be_trained_is_refused_before_there_is_a_run_folder(
    dataset: Path, tmp_path: Path, loss: str, more: list[str], said: str
) -> None:
    given = settings(dataset, tmp_path, "run", f"train.loss={loss}", *more)
    with pytest.raises(UserError, match=said):
        start.prepare(schema.load(RunConfig, None, given))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["pretrain", "finetune"])
def test_data_and_plan_are_checked_before_the_long_imports(command: str, dataset: Path, tmp_path: Path) -> None:
    new = "model.name=null" if command == "finetune" else "name=x"
    run = [text for text in settings(dataset, tmp_path, "x") if command == "pretrain" or not text.startswith("model.")]
    run += [new, *(["init.weights=w"] if command == "finetune" else [])]
    mistakes = ("data.path=nowhere", "data.eval_split=test", "train.length=0.01 epochs", "out=/dev/null/x")
    data, split, plan, out = refused(command, *([*run, wrong] for wrong in mistakes))
    assert "nowhere" in data
    assert "data.eval_split = test: " in split
    assert "train.global_batch = 24" in plan
    assert "out = /dev/null/x" in out
    assert not list(tmp_path.iterdir())


def test_weights_are_named_from_within_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`init.weights=step-00000006` ended with a traceback."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000006"
    checkpoint.mkdir(parents=True)
    model = models.create("ViT-mu/8", 16, 4)
    save_file(model.state_dict(), checkpoint / "model.safetensors", safetensors_metadata(model.config, {}))
    for place, name in ((checkpoint.parent, checkpoint.name), (checkpoint.parents[1], "checkpoints/step-00000006")):
        monkeypatch.chdir(place)
        assert models.read_weights(name).config.num_classes == 4


@pytest.mark.ranks
def test_missing_weights_are_said_before_a_run_is_there(forge: Forge, dataset: Path, tmp_path: Path) -> None:
    file = "/nowhere/ViT-B_16.npz"
    run = [text for text in settings(dataset, tmp_path, "x", f"init.weights={file}") if not text.startswith("model.")]
    rank = forge.start(1, run)
    assert rank.wait() == [2], rank.said()
    (error,) = [line for line in rank.said().splitlines() if not line.endswith(" ...")]
    assert error.startswith(f"error: init.weights = {file}: ")
    assert "docs/weights.md" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks
def test_a_model_that_is_too_large_is_not_built(forge: Forge, dataset: Path, tmp_path: Path) -> None:
    """In memory that would not hold a block of it."""
    large = settings(dataset, tmp_path, "x", "model.width=8192", "model.mlp_width=32768", "model.depth=100")
    rank = forge.start_work(1, "forked:train_within_a_limit", [[0], large])
    assert rank.wait() == [2], rank.said()
    assert "and its share of the host has" in rank.said().splitlines()[-1]


def train_on_a_small_host(overrides: list[str]) -> None:
    """In a rank whose share of the host is a kilobyte."""
    setup.host_memory = lambda: 1000
    start.run_training(schema.load(RunConfig, None, overrides))


@pytest.mark.ranks
def test_a_fine_tuning_that_is_too_large_for_the_host_is_refused(forge: Forge, dataset: Path, tmp_path: Path) -> None:
    models.save(models.create("ViT-mu/8", 16, 4), tmp_path / "model.pt")
    tuned = [text for text in settings(dataset, tmp_path, "x") if not text.startswith("model.")]
    more = [f"init.weights={tmp_path / 'model.pt'}", "model.image_size=16"]
    rank = forge.start_work(1, "test_start:train_on_a_small_host", [*tuned, *more])
    assert rank.wait() == [2], rank.said()
    assert "and its share of the host has" in rank.said().splitlines()[-1]


def train_without_temporary_files(overrides: list[str]) -> None:
    """In a rank: a run whose folder for temporary files is gone, which the start of its checkpoint writer finds."""
    tempfile.tempdir = "/nowhere"
    try:
        start.run_training(schema.load(RunConfig, None, overrides))
    except OSError as error:
        until(lambda: "watchdog" not in {thread.name for thread in threading.enumerate()})
        raise SystemExit(3) from error


@pytest.mark.ranks
def test_a_set_up_that_fails_late_ends_what_it_began(forge: Forge, dataset: Path, tmp_path: Path) -> None:
    """The watchdog would end a process that lives on, and MLflow showed a run that goes on for ever."""
    rank = forge.start_work(1, "test_start:train_without_temporary_files", settings(dataset, tmp_path, "x"))
    assert rank.wait() == [3], rank.said()
    end = PageFolder(tmp_path / "x").read_facts().end
    assert (end.status, "refused before training began: " in str(end.tags)) == ("FAILED", True)
