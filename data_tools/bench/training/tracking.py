"""What tracking costs a run: time that training waits for it, and processor time of the thread that sends to MLflow."""

import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from data_tools.bench.record import BenchRecord, markdown
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.process.launcher import free_port
from pipeline.settings.commands.operate import TrackingBenchConfig
from pipeline.settings.run import TrackConfig

# As many as a training run logs on one host.
_NUM_METRICS = 30
_START_SECONDS = 120.0


def run(config: TrackingBenchConfig, record: BenchRecord, folder: Path) -> None:
    """Measure a database, a server, and a server that answers late; print a table."""
    rows = [_measure("sqlite", "", config, folder / "database")]
    with _server(folder) as url:
        rows.append(_measure("server", url, config, folder / "near"))
        with _delayed(url, config.delay) as slow:
            rows.append(_measure(f"server, answers after {config.delay:g} s", slow, config, folder / "late"))
    lines = []
    for name, waits, cpu in rows:
        per_step = (statistics.median(waits) + cpu) / config.log_every / config.step_seconds
        record.add(
            name, wait_seconds=statistics.median(waits), longest_wait_seconds=max(waits), cpu_seconds=cpu, share=per_step
        )  # fmt: skip
        times = [f"{statistics.median(waits) * 1e6:,.0f} us", f"{max(waits) * 1e3:.1f} ms", f"{cpu * 1e3:.1f} ms"]
        lines.append([name, *times, f"{per_step:.3%}"])
    heads = ["store", "training waits, median", "longest", "sender's CPU for a record", "share of a step"]
    print(markdown(heads, lines))


def _measure(name: str, uri: str, config: TrackingBenchConfig, out: Path) -> tuple[str, list[float], float]:
    """(name, seconds of each call that training waits for, seconds of processor time of the sender for each record)."""
    facts = RunFacts("bench", "pretrain", steps=config.records, images_per_step=4096, flops_per_image=1e11)
    tracker = Tracker(TrackConfig(uri=uri or default_uri(out)), out, out / "run", facts)
    metrics = {f"time_{number}": float(number) for number in range(_NUM_METRICS)}
    waits = []
    begin = None
    for step in range(config.records):
        start = time.perf_counter()
        tracker.log(step, metrics)
        waits.append(time.perf_counter() - start)
        time.sleep(config.log_every * config.step_seconds)
        if step == config.records // 5:  # The import of MLflow and a fresh store are paid once.
            begin = _cpu_of_sender()
    assert begin is not None
    used = _cpu_of_sender() - begin
    tracker.finish("FINISHED")
    return name, waits, used / (config.records - config.records // 5 - 1)


def _cpu_of_sender() -> float:
    sender = next(thread for thread in threading.enumerate() if thread.name == "mlflow")
    assert sender.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(sender.ident))


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    """An MLflow server on loopback."""
    url, store = f"http://127.0.0.1:{(port := free_port())}", f"sqlite:///{folder / 'server.db'}"
    options = [f"--backend-store-uri={store}", f"--port={port}", "--workers=1"]
    command = [sys.executable, "-m", "mlflow", "server", *options]
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(f"{url}/health"):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"mlflow server did not start: {(folder / 'server.log').read_text()[-1000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@contextmanager
def _delayed(url: str, seconds: float) -> Iterator[str]:
    """A proxy before a server that waits before each answer."""

    class Proxy(BaseHTTPRequestHandler):
        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            time.sleep(seconds)
            headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            request = urllib.request.Request(url + self.path, body or None, headers, method=self.command)
            try:
                with urllib.request.urlopen(request) as answer:
                    code, content = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                code, content = error.code, error.read()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = forward  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
