"""What a training step does of tracking, and that no part of it can wait for MLflow."""

import gc
import sys
from types import FrameType
from typing import Any

from pipeline.monitor.tracking import Tracker

_WAITS = {"acquire", "connect", "poll", "recv", "recv_into", "select", "sleep"}  # Functions in C that may take long.


def warnings_in(said: str) -> list[str]:
    """The warnings in what a run said. A machine with other load also says what it waits for."""
    return [line for line in said.splitlines() if line.startswith("warning: ")]


def log_step(tracker: Tracker, step: int, metrics: dict[str, float]) -> None:
    """`tracker.log`, which must run no code that talks to MLflow, and nothing that waits. A clock would also show a
    busy machine.
    """
    seen: list[str] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "/mlflow/" in frame.f_code.co_filename:
            seen.append(f"{frame.f_code.co_filename}: {frame.f_code.co_name}")
        elif event == "c_call" and argument.__name__ in _WAITS:
            seen.append(argument.__name__)

    gc.disable()  # It would end, in this step, generators of MLflow that requests before it left behind.
    sys.setprofile(look)
    try:
        tracker.log(step, metrics)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert not seen, f"a step waits for MLflow: {seen}"
