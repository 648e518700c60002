"""In a rank: runs, one after another, with a fault planted into each; see test_health_faults.py."""

import os
import time
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import UserError
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.train import loop as training
from pipeline.train.engine import Engine

BAD_STEP = 10  # Counted from 1.


def train(runs: list[tuple[str, list[str]]]) -> None:
    """runs: (fault, overrides). Leaves NAME.RANK.txt, the rows of each step, and NAME.error, what a run ended with."""
    plain_step = Engine.train_step
    training.rehearse = lambda *rest: None  # type: ignore[assignment]  Its step is no step of the run.
    for fault, overrides in runs:
        config = schema.load(RunConfig, None, overrides)
        seen = Path(config.out) / f"{config.name}.{os.environ['RANK']}.txt"
        Engine.train_step = _step_with(fault, plain_step, seen)  # type: ignore[method-assign]
        try:
            training.run(config)
        except UserError as error:
            (Path(config.out) / f"{config.name}.error").write_text(str(error))


def _step_with(fault: str, plain_step: Any, seen: Path) -> Any:
    bad_rows: list[int] = []

    def step_with_fault(self: Engine, step: int, batches: Any, lr: float, loss_of: Any, *rest: Any, **more: Any) -> Any:
        own_loss, rows, handle = loss_of, [int(row) for batch in batches for row in batch.rows], None
        with open(seen, "a") as file:
            print(step, *rows, file=file)
        rank, now = self.ranks.rank, step + 1 == BAD_STEP
        if fault == "nan in a loss" and now and rank == 1:
            loss_of = lambda *a, **k: own_loss(*a, **k) * float("nan")  # noqa: E731
        if fault == "nan in a gradient" and now and rank == 0:
            parameter = next(p for p in self.engine.module.parameters() if p.requires_grad)
            handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
        if fault == "nan in a weight" and now:
            with torch.no_grad():
                next(self.engine.module.parameters()).fill_(float("nan"))
        if fault == "spike":  # Of the data: it comes again with the same samples.
            if now and not bad_rows:
                bad_rows.extend(rows)
            if set(rows) & set(bad_rows[:2]):
                loss_of = lambda *a, **k: own_loss(*a, **k) * 40  # noqa: E731
        if fault == "slow rank" and rank == 1:
            loss_of = lambda *a, **k: (time.sleep(0.3), own_loss(*a, **k))[1]  # noqa: E731
        result = plain_step(self, step, batches, lr, loss_of, *rest, **more)
        if handle:
            handle.remove()
        return result

    return step_with_fault
