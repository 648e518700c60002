"""Starts real ranks of `pipeline.train.run` as processes, without a launcher's start-up time."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
WORKER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pipeline import schema
from pipeline.command import mistakes_in_one_line
from pipeline.config import RunConfig
from pipeline.train import run
with mistakes_in_one_line():
    for overrides in json.loads(sys.argv[2]):
        run(schema.load(RunConfig, None, overrides))
"""


def settings(dataset: Path, out: Path, name: str, *more: str) -> list[str]:
    """A run of a tiny model, a few steps long, that logs each of them."""
    return [
        f"name={name}", f"out={out}", f"data.path={dataset}", "data.streams=4", "data.window=16", "model.name=ViT-Ti/8",
        "model.image_size=16", "model.width=32", "model.depth=2", "model.mlp_width=64", "model.num_heads=2",
        "train.global_batch=24", "train.micro_batch=6", f"train.length={STEPS} steps", "train.log_every=1",
        "train.loss=softmax", "optimizer.lr=0.01", "schedule.warmup=2 steps", "evaluate.every=3 steps",
        "checkpoint.every=3 steps", "engine.precision=fp32", "track.enabled=false", *more,
    ]  # fmt: skip


def start(world_size: int, runs: list, worker: str = WORKER) -> list[subprocess.Popen]:
    """One process per rank; each goes through `runs` (overrides of a RunConfig) one after another, or does as `worker`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(world_size):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
            "LOCAL_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        arguments = [sys.executable, "-c", worker, str(ROOT), json.dumps(runs)]
        processes.append(
            subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return processes


def finish(processes: list[subprocess.Popen], timeout: float = 540) -> list[str]:
    """Wait for all ranks; their outputs. Fails when one of them failed."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def kill_after(processes: list[subprocess.Popen], file: Path, timeout: float = 540) -> None:
    """SIGKILL all ranks as soon as `file` exists."""
    deadline = time.monotonic() + timeout
    while not file.exists():
        assert all(process.poll() is None for process in processes), [
            p.communicate()[0] for p in processes if p.poll() is not None
        ]
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.005)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()


def metrics(run: Path, name: str = "loss") -> dict[int, float]:
    """The last value of a metric at each step, from metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["metrics"][name] for record in records if name in record["metrics"]}
