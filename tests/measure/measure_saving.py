"""What a save costs training, and the writer beside it: `OMP_NUM_THREADS=1 python tests/measure/measure_saving.py [MODEL] [SAVES]`.

Seconds by the clock and of CPU time: on a machine that is busy with other things, only the second mean something.
"""

import os
import sys
import tempfile
import time

os.environ["MEASURE_SAVING"] = "1"  # The writer is nobody's child: it is found by its environment.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import psutil
import torch

from pipeline import model as models
from pipeline.checkpoint.saver import Saver
from pipeline.checkpoint.sharded_tensors import RankPart
from pipeline.checkpoint.writer import Commit, Retention
from pipeline.process.distributed import Ranks


def writer() -> psutil.Process:
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("MEASURE_SAVING"):
                return process
        except psutil.Error:
            pass
    raise AssertionError("there is no writer")


def main(name: str = "ViT-S/16", saves: str = "6") -> None:
    model = models.create(name, 224, 1000)
    named = {n: p.detach().reshape(-1) for n, p in model.named_parameters()}
    shapes = {n: list(p.shape) for n, p in model.named_parameters()}
    part = RankPart(
        [(n, 0, len(p)) for n, p in named.items()],
        {s: [p.clone() for p in named.values()] for s in ("weights", "exp_avg", "exp_avg_sq")},
    )
    commit = Commit({}, shapes, models.safetensors_metadata(model.config, {}), Retention(1, [], False))
    print(f"{name}: {12e-6 * sum(map(len, named.values())):.0f} MB, one rank, Adam")
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(folder, Ranks(0, 0, 1, torch.device("cpu")), 60)
        time.sleep(1)  # It imports numpy, once.
        process = writer()
        for step in range(1, int(saves) + 1):
            before, clock, cpu = process.cpu_times(), time.perf_counter(), time.process_time()
            saver.save(step, part, commit)
            clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
            saver.wait()
            after = process.cpu_times()
            print(f"save {step}: training waits {clock:.3f} s (CPU {cpu:.3f} s), the writer works {saver.written:.2f} s "
                  f"(CPU {after.user + after.system - before.user - before.system:.2f} s)", flush=True)  # fmt: skip
            saver.written = 0.0
        saver.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
