"""What grows in a long run: `OMP_NUM_THREADS=1 python tests/measure/measure_long_run.py [STEPS] [SHARDS] [FOLDER]`.

Trains a tiny model on SHARDS shards of two images. Every step is logged and sent to a fresh MLflow database, every tenth is saved in a
checkpoint that is kept. The run is stopped by SIGTERM four times and goes on. A line for each tenth of the run shows the memory and the
file descriptors of the rank and of its writer, and the processor time of a step; a line for each start what came before the first step.
"""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import psutil
from ranks import ROOT, settings
from tiny import make_dataset

_STARTS = 5


def main(steps: str = "20000", shards: str = "10000", folder: str = "") -> None:
    with tempfile.TemporaryDirectory() as own:
        base = Path(folder or own)
        data = base / "data"
        if not data.exists():
            make_dataset(data, {"train": 2 * int(shards), "val": 40}, per_shard=2)
        command = [sys.executable, str(ROOT / "launch/pretrain.py"), *settings(
            data, base, "long", "train.global_batch=8", "train.micro_batch=8", f"train.length={steps} steps", "data.window=1024",
            "evaluate.every=100%", "checkpoint.every=10 steps", "checkpoint.keep_every=10 steps", "track.enabled=true",
        )]  # fmt: skip
        for start in range(1, _STARTS + 1):
            one_start(command, base / "long", int(steps), int(steps) * start // _STARTS)


def one_start(command: list[str], run: Path, steps: int, stop_at: int) -> None:
    """Run the command until a step, and print what it takes on the way."""
    log, begin = run / "metrics.jsonl", time.perf_counter()
    first = step_of(log)
    with open(run.parent / "output.txt", "ab") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    while step_of(log) == first and process.poll() is None:
        time.sleep(0.05)
    cpu, at = cpu_seconds(process), step_of(log)
    print(
        f"start at step {first:,}: {time.perf_counter() - begin:.1f} s, {cpu:.1f} s of processor time, until step {at:,}",
        flush=True,
    )
    while process.poll() is None:
        time.sleep(0.2)
        step = step_of(log)
        if step - at >= steps // 10 and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            writers = [
                p
                for p in psutil.process_iter()
                if p.ppid() == 1 and "pipeline.checkpoint.writer" in " ".join(safe_command(p))
            ]
            of_writers = ", ".join(f"writer {use(p)}" for p in writers)
            now = cpu_seconds(process)
            print(
                f"step {step:,}: {use(process)}; {of_writers}; {1e3 * (now - cpu) / (step - at):.1f} ms of processor time a step",
                flush=True,
            )
            cpu, at = now, step
        if stop_at <= step < steps:
            process.send_signal(signal.SIGTERM)
            process.wait()
    print(
        f"ended with {process.returncode} at step {step_of(log):,}, {time.perf_counter() - begin:.0f} s after its start",
        flush=True,
    )


def step_of(log: Path) -> int:
    """The last step in metrics.jsonl."""
    if not log.exists() or not (size := log.stat().st_size):
        return 0
    with open(log, "rb") as file:
        file.seek(max(0, size - 16384))
        lines = [line for line in file.read().split(b"\n") if line.startswith(b'{"step":') and line.endswith(b"}")]
    return int(lines[-1].split(b":")[1].split(b",")[0]) if lines else 0


def use(process: psutil.Process) -> str:
    return f"{process.memory_info().rss / 2**20:.0f} MiB, {process.num_fds()} files, {process.num_threads()} threads"


def cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return float("nan")
    return times.user + times.system


def safe_command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


if __name__ == "__main__":
    main(*sys.argv[1:])
