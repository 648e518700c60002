"""Track a small run: python track_a_run.py URI OUT NAME. Prints the seconds of the slowest call of `Tracker.log`."""

import sys
import time
from pathlib import Path

from pipeline.monitor.mlflow.sender import SenderTimeouts
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker
from pipeline.settings.run import TrackConfig


def main(uri: str, out: Path, name: str) -> None:
    facts = RunFacts(name, "pretrain", {"optimizer.lr": 0.1}, description="A run.", steps=5)
    timing = SenderTimeouts(poll=0.05, retry=(0.2,), finish=120)
    tracker = Tracker(TrackConfig(uri=uri), out, out / name, facts, 0, timing)
    slowest = 0.0
    for step in range(1, 6):
        begin = time.perf_counter()
        tracker.log(step, {"loss": 1 / step})
        slowest = max(slowest, time.perf_counter() - begin)
    tracker.finish("FINISHED")
    print(slowest)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
