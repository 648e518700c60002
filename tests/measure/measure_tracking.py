"""What a large sweep and a long run cost MLflow: `python tests/measure/measure_tracking.py [CELLS] [POINTS]`.

Sends a sweep of CELLS cells and a run of POINTS metric points to a fresh SQLite store, opened directly.
"""

import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.monitor.mlflow.sender import SenderTimeouts
from pipeline.monitor.mlflow.state import run_id_of
from pipeline.monitor.run_page import DatasetFacts, RunFacts
from pipeline.monitor.tracking import Tracker
from pipeline.settings.run import TrackConfig
from pipeline.transfer.track.children import ChildSender, NestedRun, Pace
from pipeline.transfer.vtab_tasks import TASKS

NUM_METRICS = 10


def cells(num: int) -> Iterator[NestedRun]:
    now = round(time.time() * 1000)
    for number in range(num):
        task = TASKS[number % len(TASKS)].name
        data = tuple(DatasetFacts(task, f"/data/vtab/{task}", "0123456789abcdef", split, 1000, 10, context)
                     for split, context in (("train800", "training"), ("val200", "evaluation")))  # fmt: skip
        parameters = {"task": task, "stage": "search", "lr": 10.0 ** -(number // 19 % 5), "seed": number // 95}
        name, began = f"{task}-{number}", now - 60_000 * (num - number)
        metrics = {"val_top1": 0.5 + number % 97 / 200, "loss": 1.5, "seconds": 60.0}
        yield NestedRun(name, name, "FINISHED", began, began + 60_000, parameters, metrics, {"task": task}, data)


def send_sweep(uri: str, folder: Path, num: int) -> None:
    facts = RunFacts("large sweep", "vtab", {"method": "finetune"})
    tracker = Tracker(TrackConfig(uri=uri, experiment="vtab"), folder, folder / "sweep", facts)
    while not run_id_of(folder / "sweep"):
        time.sleep(0.1)
    for what in ("sent", "found again, nothing to send"):
        sender = ChildSender(folder / "sweep", uri, {"kind": "cell"}, pace=Pace(poll=0.01))
        sender.add(list(cells(num)))
        begin, cpu = time.perf_counter(), time.process_time()
        sender.begin()
        assert sender.end()
        print(
            f"{num:,} cells {what}: {time.perf_counter() - begin:.1f} s, CPU {time.process_time() - cpu:.1f} s",
            flush=True,
        )
    tracker.finish("FINISHED")
    print(f"peak memory of the driver: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB", flush=True)


def send_run(uri: str, folder: Path, num_points: int) -> None:
    begin, steps = time.perf_counter(), num_points // NUM_METRICS
    facts = RunFacts("long run", "pretrain", steps=steps)
    tracker = Tracker(TrackConfig(uri=uri), folder, folder / "run", facts, timing=SenderTimeouts(finish=3600))
    for step in range(1, steps + 1):
        tracker.log(step, {f"metric{number}": 1 / step + number for number in range(NUM_METRICS)})
    logged = time.perf_counter() - begin
    tracker.finish("FINISHED")
    print(f"{num_points:,} points: logged in {logged:.1f} s, sent in {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    num_cells, num_points = sys.argv[1:] or ("10000", "1000000")
    with tempfile.TemporaryDirectory() as name:
        store = f"sqlite:///{name}/mlflow.db"
        send_sweep(store, Path(name), int(num_cells))
        send_run(store, Path(name), int(num_points))
