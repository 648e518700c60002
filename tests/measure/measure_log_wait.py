"""What tracking costs a run: `python tests/measure/measure_log_wait.py [STEP_SECONDS] [LOG_EVERY] [RECORDS] [DELAY]`.

Sends RECORDS log records, one each LOG_EVERY steps, to a database, to an MLflow server, and to one that answers after DELAY seconds; prints how long
training waits for each, the processor time of the thread that sends, and the share of both in the time of the steps.
"""

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "monitor"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from servers import MlflowServer, Proxy

from pipeline.base.words import aligned
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.settings.run import TrackConfig

# As many as a training run logs on one host.
NUM_METRICS = 30


def measure(uri: str, folder: Path, pause: float, records: int) -> tuple[list[float], float]:
    """(seconds of each call that training waits for, seconds of processor time of the sender for each record)."""
    facts = RunFacts("bench", "pretrain", steps=records, images_per_step=4096, flops_per_image=1e11)
    tracker = Tracker(TrackConfig(uri=uri or default_uri(folder)), folder, folder / "run", facts)
    metrics = {f"time_{number}": float(number) for number in range(NUM_METRICS)}
    waits, begin, first = [], 0.0, records // 5  # The import of MLflow and a fresh store are paid once.
    for step in range(records):
        start = time.perf_counter()
        tracker.log(step, metrics)
        waits.append(time.perf_counter() - start)
        time.sleep(pause)
        if step == first:
            begin = cpu_of_sender()
    used = cpu_of_sender() - begin
    tracker.finish("FINISHED")
    return waits, used / (records - first - 1)


def cpu_of_sender() -> float:
    sender = next(thread for thread in threading.enumerate() if thread.name == "mlflow")
    assert sender.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(sender.ident))


def main(step_seconds: str = "0.01", log_every: str = "50", records: str = "100", delay: str = "2") -> None:
    pause = float(step_seconds) * int(log_every)
    rows = [["store", "training waits, median", "longest", "sender's CPU for a record", "share of a step"]]
    with tempfile.TemporaryDirectory() as out:
        folder = Path(out)
        server = MlflowServer(folder, f"sqlite:///{folder / 'server.db'}").start()
        slow = Proxy(server.url)
        slow.delay = float(delay)
        stores = {"sqlite": "", "server": server.url, f"server, answers after {delay} s": slow.url}
        for number, (name, uri) in enumerate(stores.items()):
            waits, cpu = measure(uri, folder / str(number), pause, int(records))
            median = statistics.median(waits)
            times = [f"{1e6 * median:,.0f} us", f"{1e3 * max(waits):.1f} ms", f"{1e3 * cpu:.1f} ms"]
            rows.append([name, *times, f"{(median + cpu) / pause:.3%}"])
        slow.stop()
        server.stop()
    print("\n".join(aligned(rows, 1)))


if __name__ == "__main__":
    main(*sys.argv[1:])
