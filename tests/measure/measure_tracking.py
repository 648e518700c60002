"""What tracking costs: `python tests/measure/measure_tracking.py [POINTS]`.

Creates a store by MLflow's public client, and sends a run of POINTS metric points, ten a step, to it; then continues
the run, and repairs its metrics.
"""

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

from pipeline.monitor.export import ExportTiming
from pipeline.monitor.metrics_file import METRICS_FILE, repair
from pipeline.monitor.mlflow.connection import connect
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.settings.run import TrackConfig


def main(num_points: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out, steps = Path(folder), num_points // 10
        begin = time.perf_counter()
        connect("http://127.0.0.1:1")
        imported = time.perf_counter() - begin
        connect(default_uri(out)).search_experiments()
        print(f"import of mlflow {imported:.1f} s, opening the store {time.perf_counter() - begin - imported:.1f} s")
        for what in ("sent", "continued, nothing to send"):
            begin, cpu = time.perf_counter(), time.process_time()
            facts, timing = RunFacts("long run", "pretrain", steps=steps), ExportTiming(finish=3600)
            tracker = Tracker(TrackConfig(), out, out / "run", facts, None, timing)
            for step in range(1, steps + 1) if what == "sent" else ():
                tracker.log(step, {f"metric{number}": step + number / 10 for number in range(10)})
            logged = time.perf_counter() - begin
            tracker.finish("FINISHED")
            print(
                f"{num_points:,} points: logged in {logged:.1f} s, {what} in {time.perf_counter() - begin:.1f} s, CPU"
                f" time {time.process_time() - cpu:.1f} s"
            )
        cpu = time.process_time()
        repair(out / "run" / METRICS_FILE, steps - 1)
        print(f"repaired {steps:,} records in {time.process_time() - cpu:.2f} s of CPU")
        print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
