"""In a rank: runs, one after another, with a fault planted into each; see test_health_faults.py."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from forked import told_to_stop

from pipeline.base.errors import UserError
from pipeline.monitor import profile
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.train import loop, setup
from pipeline.train.evaluators import SplitEvaluator
from pipeline.train.start import run_training
from pipeline.train.zero import engine  # noqa: F401

# isort: split
# After pipeline.train, which imports DeepSpeed without what takes seconds.
from deepspeed.accelerator import get_accelerator

BAD_STEP = 10  # Counted from 1.
EVALUATION_SECONDS = 1e4
_ahead = [0.0]  # Of the clock that speed is measured with: what takes long here takes no time.


def train(runs: list[tuple[str, list[str]]]) -> None:
    """runs: (fault, overrides). Leaves NAME.RANK.txt, the rows of each step, and NAME.error, what a run ended with."""
    plain_step, heard = loop.training_step, told_to_stop()
    profile.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + _ahead[0])  # type: ignore[assignment]
    get_accelerator().is_fp16_supported = lambda: (
        True
    )  # DeepSpeed asks a CPU whether it is fast at fp16; any is able to.
    setup.dry_run_on_all_ranks = lambda *rest: None  # type: ignore[assignment]  Its step is no step of the run.
    for fault, overrides in runs:
        config = schema.load(RunConfig, None, overrides)
        seen = Path(config.out) / f"{config.name}.{os.environ.get('RANK', '0')}.txt"
        loop.training_step = _step_with(fault, plain_step, seen, heard)
        if fault == "slow evaluation":
            _owe_a_slow_evaluation(Path(config.out) / config.name)
        try:
            run_training(config)
        except UserError as error:
            (Path(config.out) / f"{config.name}.error").write_text(str(error))


def _owe_a_slow_evaluation(run: Path) -> None:
    """As a kill during the evaluation leaves a run. The next evaluation takes EVALUATION_SECONDS."""
    (run / "scores.json").unlink(missing_ok=True)
    evaluate = SplitEvaluator.evaluate_on_all_ranks

    def slow(*arguments: Any) -> None:
        SplitEvaluator.evaluate_on_all_ranks = evaluate  # type: ignore[method-assign]
        _pass(EVALUATION_SECONDS)
        evaluate(*arguments)

    SplitEvaluator.evaluate_on_all_ranks = slow  # type: ignore[method-assign]


def _pass(seconds: float) -> None:
    _ahead[0] += seconds


class _Faulty:
    """A trainer whose loss is changed by `change`."""

    def __init__(self, trainer: Any, change: Any) -> None:
        self.trainer, self.change = trainer, change

    def loss(self, inputs: Any) -> Any:
        loss, values = self.trainer.loss(inputs)
        return self.change(loss), values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)


def _step_with(fault: str, plain_step: Any, seen: Path, heard: threading.Event) -> Any:
    bad_rows: list[int] = []

    def step_with_fault(trainer: Any, batches: Any, step: int, *rest: Any) -> Any:
        rows, handle = [int(row) for batch in batches for row in batch.rows], None
        with open(seen, "a") as file:
            print(step, *rows, file=file)
        rank, now, module = trainer.ranks.rank, step + 1 == BAD_STEP, trainer.engine.module
        if fault == "nan in a loss" and now and rank == 1:
            trainer = _Faulty(trainer, lambda loss: loss * float("nan"))
        if fault == "nan in a gradient" and now and rank == 0:
            parameter = next(p for p in module.parameters() if p.requires_grad)
            handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
        if fault == "nan in a weight" and now:
            with torch.no_grad():
                next(module.parameters()).fill_(float("nan"))
        if fault == "spike, then stop" and step == BAD_STEP and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            heard.wait()  # Rank 1 waits in this step's collectives.
        if fault.startswith("spike"):  # Of the data: it comes again with the same samples.
            if now and not bad_rows:
                bad_rows.extend(rows)
            if set(rows) & set(bad_rows[:2]):
                trainer = _Faulty(trainer, lambda loss: loss * 40)
        if fault == "slow rank" and rank == 1:
            trainer = _Faulty(trainer, lambda loss: (_pass(1000), loss)[1])
        result = plain_step(trainer, batches, step, *rest)
        if handle:
            handle.remove()
        return result

    return step_with_fault
