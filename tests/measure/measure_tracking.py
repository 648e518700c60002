"""What a large sweep and a long run cost MLflow: `python tests/measure/measure_tracking.py [CELLS] [POINTS] [database|server|read] [FOLDER]`.

Sends a sweep of CELLS cells and a run of POINTS metric points to a fresh SQLite store, opened directly or behind `mlflow server`,
without the bound on requests (read: uses what is in FOLDER); then measures, on a server of that store, what its pages ask for, and when Chromium shows rows.
"""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

from pipeline.monitor.mlflow.sender import SenderTimeouts
from pipeline.monitor.mlflow.state import run_id_of
from pipeline.monitor.run_page import DatasetFacts, RunFacts
from pipeline.monitor.tracking import Tracker
from pipeline.settings.run import TrackConfig
from pipeline.transfer.track.children import ChildSender, NestedRun, Pace
from pipeline.transfer.vtab_tasks import TASKS

METRICS = (
    "loss",
    "lr",
    "grad_norm",
    "epoch",
    "images_per_second",
    "mfu",
    "data_wait",
    "images_seen",
    "exaflops",
    "bad_samples",
)


@contextlib.contextmanager
def serving(database: Path, *options: str) -> Iterator[str]:
    """A server of a database; yields its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [
        Path(sys.executable).parent / "mlflow",
        "server",
        "--backend-store-uri",
        f"sqlite:///{database}",
        "--port",
        str(port),
        *options,
    ]
    log = open(database.with_name("server.log"), "ab")  # noqa: SIM115
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(
        command, stdout=log, stderr=log, start_new_session=True, cwd=database.parent, env=environment
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health").close()
                break
            assert process.poll() is None, "the server has ended"
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def cells(num: int) -> Iterator[NestedRun]:
    now = round(time.time() * 1000)
    for number in range(num):
        task, lr, seed = TASKS[number % len(TASKS)], 10.0 ** -(number // len(TASKS) % 5 + 1), number // 95
        data = [DatasetFacts(task.name, f"/data/vtab/{task.name}", "0123456789abcdef", split, 1000, 10, context)
                for split, context in (("train800", "training"), ("val200", "evaluation"))]  # fmt: skip
        parameters = {"task": task.name, "group": task.group, "stage": "search", "seed": seed, "lr": lr, "weight_decay": 0.0,
                      "length": "2500 steps", "steps": 2500}  # fmt: skip
        metrics = {"val_top1": 0.5 + number % 97 / 200, "loss": 1.5, "seconds": 60.0}
        name = f"{task.name}-search-lr{lr}-seed{seed}"
        began = now - 60_000 * (num - number)
        yield NestedRun(name, name, "FINISHED", began, began + 60_000, parameters, metrics,
                       {"outcome": "finished", "task": task.name, "stage": "search", "device": "cpu"}, tuple(data))  # fmt: skip


def send_sweep(uri: str, folder: Path, num: int) -> None:
    facts = RunFacts("large sweep", "vtab", {"method": "finetune"})
    tracker = Tracker(TrackConfig(uri=uri, experiment="vtab"), folder, folder / "sweep", facts)
    while not run_id_of(folder / "sweep"):
        time.sleep(0.1)
    tags = {
        "kind": "cell",
        "mlflow.user": "someone",
        "mlflow.source.name": "launch/vtab.py",
        "mlflow.source.git.commit": "0" * 40,
    }
    for what in ("sent", "found again, nothing to send"):
        sender = ChildSender(folder / "sweep", uri, tags, pace=Pace(poll=0.01))
        sender.add(list(cells(num)))
        begin, cpu = time.perf_counter(), time.process_time()
        sender.begin()
        assert sender.end()
        seconds = time.perf_counter() - begin
        each = f", {1000 * seconds / num / 4:.1f} ms for each of its four requests" if sender.num_sent else ""
        print(
            f"{num:,} cells {what}: {seconds:.1f} s{each}, CPU time of the driver {time.process_time() - cpu:.1f} s",
            flush=True,
        )
    tracker.finish("FINISHED")
    print(f"peak memory of the driver: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB", flush=True)


def send_run(uri: str, folder: Path, num_points: int) -> None:
    steps = num_points // len(METRICS)
    begin, cpu = time.perf_counter(), time.process_time()
    tracker = Tracker(
        TrackConfig(uri=uri),
        folder,
        folder / "run",
        RunFacts("long run", "pretrain", steps=steps),
        timing=SenderTimeouts(finish=3600),
    )
    for step in range(1, steps + 1):
        tracker.log(step, {name: 1 / step + place for place, name in enumerate(METRICS)})
    logged = time.perf_counter() - begin
    tracker.finish("FINISHED")
    print(
        f"{num_points:,} points: logged in {logged:.1f} s, sent in {time.perf_counter() - begin:.1f} s, CPU time "
        f"{time.process_time() - cpu:.1f} s",
        flush=True,
    )


def request(url: str, path: str, body: dict | None = None) -> tuple[dict, float, int]:
    data = json.dumps(body).encode() if body is not None else None
    ask = urllib.request.Request(f"{url}/ajax-api/2.0/mlflow/{path}", data, {"Content-Type": "application/json"})
    begin = time.perf_counter()
    content = urllib.request.urlopen(ask).read()
    return json.loads(content), time.perf_counter() - begin, len(content)


def read(url: str, folder: Path) -> None:
    """Measure the requests that MLflow's pages make. Each is made twice; the second is shown."""
    vtab, _, _ = request(url, "experiments/get-by-name?experiment_name=vtab")
    vit, _, _ = request(url, "experiments/get-by-name?experiment_name=vit")
    numbers = {name: found["experiment"]["experiment_id"] for name, found in (("vtab", vtab), ("vit", vit))}
    sweep, run = (run_id_of(folder / name) for name in ("sweep", "run"))
    newest = {"order_by": ["attributes.start_time DESC"], "max_results": 100, "run_view_type": "ACTIVE_ONLY"}
    children = f"tags.`mlflow.parentRunId` = '{sweep}'"
    asked: dict[str, tuple[str, dict | None]] = {
        "run list, 100 newest": ("runs/search", {"experiment_ids": [numbers["vtab"]], **newest}),
        "run list, best 100 by accuracy": (
            "runs/search",
            {"experiment_ids": [numbers["vtab"]], **newest, "order_by": ["metrics.`eval/val_top1` DESC"]},
        ),
        "cells of one task and rate": (
            "runs/search",
            {
                "experiment_ids": [numbers["vtab"]],
                **newest,
                "filter": f"{children} AND params.task = 'dtd' AND params.lr = '0.01'",
            },
        ),
        "the sweep alone": (
            "runs/search",
            {"experiment_ids": [numbers["vtab"]], **newest, "filter": "tags.kind = 'vtab'"},
        ),
        "chart of one metric of the long run": (
            "metrics/get-history-bulk-interval?"
            + urllib.parse.urlencode({"run_ids": run, "metric_key": "train/loss", "max_results": 320}),
            None,
        ),
        "page of the long run": (f"runs/get?run_id={run}", None),
        "page of the sweep": (f"runs/get?run_id={sweep}", None),
    }
    for name, (path, body) in asked.items():
        request(url, path, body)
        answer, seconds, size = request(url, path, body)
        rows = len(answer.get("runs", answer.get("metrics", [])))
        print(f"{name}: {seconds:.2f} s, {size / 1e6:.2f} MB, {rows} rows", flush=True)
    pages = {
        "list of the sweep and its cells": (
            f"experiments/{numbers['vtab']}/runs?workflowType=machine_learning",
            "finetune|large sweep",
        ),
        "the sweep's page": (f"experiments/{numbers['vtab']}/runs/{sweep}?workflowType=machine_learning", "Run ID"),
        "charts of the long run": (
            f"experiments/{numbers['vit']}/runs/{run}/model-metrics?workflowType=machine_learning",
            "bad_samples",
        ),
    }
    for name, (path, text) in pages.items():
        picture = folder / f"{name.replace(' ', '_')}.png"
        seconds = asyncio.run(until_shown(f"{url}/#/{path}", text, picture))
        print(f"Chromium, {name}: {seconds:.1f} s until it shows {text!r}; {picture}", flush=True)


async def until_shown(address: str, text: str, picture: Path) -> float:
    """Seconds until a page contains one of the texts (separated by |), in a fresh headless Chromium."""
    import base64

    import aiohttp

    with tempfile.TemporaryDirectory() as profile:
        browser = subprocess.Popen(
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
             f"--user-data-dir={profile}", "--window-size=1500,1200", "about:blank"],
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            while not port_file.exists() or not port_file.read_text().strip():
                await asyncio.sleep(0.1)
            port = port_file.read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    socket_url = next(
                        tab["webSocketDebuggerUrl"] for tab in await answer.json() if tab["type"] == "page"
                    )
                async with session.ws_connect(socket_url, max_msg_size=0) as page:
                    number = 0

                    async def ask(method: str, **parameters: object) -> dict:
                        nonlocal number
                        number += 1
                        await page.send_json({"id": number, "method": method, "params": parameters})
                        while True:
                            message = json.loads((await page.receive()).data)
                            if message.get("id") == number:
                                return message["result"]

                    begin = time.perf_counter()
                    await ask("Page.navigate", url=address)
                    looks = " || ".join(
                        f"document.body.innerText.includes({json.dumps(part)})" for part in text.split("|")
                    )
                    while time.perf_counter() - begin < 120:
                        found = await ask("Runtime.evaluate", expression=f"document.body !== null && ({looks})")
                        if found["result"].get("value"):
                            break
                        await asyncio.sleep(0.1)
                    seconds = time.perf_counter() - begin
                    await asyncio.sleep(8)
                    shot = await ask("Page.captureScreenshot")
                    picture.write_bytes(base64.b64decode(shot["data"]))
                    return seconds
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()


def main(num_cells: str = "10000", num_points: str = "1000000", store: str = "database", out: str = "") -> None:
    folder = Path(out or tempfile.mkdtemp(prefix="measure_tracking_"))
    folder.mkdir(exist_ok=True)
    database = folder / "mlflow.db"
    if store == "database":
        send_sweep(f"sqlite:///{database}", folder, int(num_cells))
        send_run(f"sqlite:///{database}", folder, int(num_points))
    with serving(database) as url:
        if store == "server":
            send_sweep(url, folder, int(num_cells))
            send_run(url, folder, int(num_points))
        print(f"database: {database.stat().st_size / 1e6:.0f} MB", flush=True)
        read(url, folder)
    if not out:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
