"""Counts the collective calls of a run, in a rank."""

import json
import os
from collections import defaultdict
from functools import wraps
from pathlib import Path
from typing import Any

from forked import train
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """names: of torch's collective operations that were called, such as "allreduce_", oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def train_and_count(argument: tuple[str, list[str]]) -> None:
    """In a rank: a run whose rank 0 writes the collective operations of each step, and of each line, to a JSON file."""
    from pipeline.train import loop
    from pipeline.train.bookkeeping import TrainingRun

    path, overrides = argument
    found = defaultdict[str, list[list[str]]](list)

    def counting(holder: Any, name: str) -> None:
        function = getattr(holder, name)

        @wraps(function)
        def counted(*given: Any, **named: Any) -> Any:
            with Collectives() as collectives:
                result = function(*given, **named)
            found[name].append(collectives.names)
            return result

        setattr(holder, name, counted)

    counting(loop, "training_step")
    counting(TrainingRun, "rolled_back_after_spikes_on_all_ranks")
    counting(TrainingRun, "log_on_all_ranks")
    train([overrides])
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps(found))
