"""Track small runs that begin together: python track_a_run.py URI OUT NAMES."""

import os
import sys
from pathlib import Path

from tracked_steps import log_step

from pipeline.monitor.export import ExportTiming
from pipeline.monitor.mlflow.connection import connect
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker
from pipeline.settings.run import TrackConfig


def main(uri: str, out: Path, names: list[str]) -> int:
    """A process for each run, forked from one that has imported MLflow as a run does. Returns 1 if one failed, else
    0.
    """
    connect("http://127.0.0.1:1")  # Asks nobody, and imports MLflow.
    pids = []
    for name in names:
        if not (pid := os.fork()):
            track(uri, out, name)
            sys.stdout.flush()
            os._exit(0)
        pids.append(pid)
    return max(os.waitpid(pid, 0)[1] > 0 for pid in pids)


def track(uri: str, out: Path, name: str) -> None:
    facts = RunFacts(name, "pretrain", {"optimizer.lr": 0.1}, description="A run.", steps=5)
    timing = ExportTiming(poll=0.05, retry=(0.2,), finish=300)
    tracker = Tracker(TrackConfig(uri=uri), out, out / name, facts, 0, timing)
    for step in range(1, 6):
        log_step(tracker, step, {"loss": 1 / step})
    tracker.finish("FINISHED")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
