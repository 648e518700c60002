"""Track a small run: python track_a_run.py URI OUT NAME."""

import sys
from pathlib import Path

from tracked_steps import log_step

from pipeline.monitor.mlflow.sender import SenderTimeouts
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker
from pipeline.settings.run import TrackConfig


def main(uri: str, out: Path, name: str) -> None:
    facts = RunFacts(name, "pretrain", {"optimizer.lr": 0.1}, description="A run.", steps=5)
    timing = SenderTimeouts(poll=0.05, retry=(0.2,), finish=300)
    tracker = Tracker(TrackConfig(uri=uri), out, out / name, facts, 0, timing)
    for step in range(1, 6):
        log_step(tracker, step, {"loss": 1 / step})
    tracker.finish("FINISHED")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
