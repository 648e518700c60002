"""Time and memory of the commit of a checkpoint, in pairs with torch.distributed.checkpoint (DCP) on the same disk.

    python tests/measure/measure_checkpoint.py FOLDER [MODEL [RANKS [PAIRS]]]

The state is what Adam has of MODEL (L/16, H/14, ...): weights and two moments, fp32, cut equally among RANKS processes.
Both flush every file to the disk, remove the checkpoint before, and have the priority of writers; only ours computes
checksums and writes the weights a second time, as model.safetensors. The first pair is shown, but not counted. Memory
is the most that a writer has of its own, beside what it shares with its rank; CPU time is of all ranks.
"""

import os
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline import model as models
from pipeline.checkpoint.saver import Saver
from pipeline.checkpoint.sharded_tensors import RankPart
from pipeline.checkpoint.writer import Commit
from pipeline.process.distributed import Ranks

STATES = ("weights", "exp_avg", "exp_avg_sq")


class Writer(psutil.Process):
    """The process that shares a saver's memory."""

    def __init__(self, saver: Saver) -> None:
        super().__init__(
            next(int(path.parent.name) for path in Path("/proc").glob("[0-9]*/fd") if has(path, saver._memory))
        )
        self.peak = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self.is_running():
            found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
            self.peak = max(self.peak, int(found[1]) / 1e3 if found else 0)
            time.sleep(0.02)


def has(files: Path, number: int) -> bool:
    """Whether another process has a file of this one open. files: /proc/PID/fd. number: its descriptor here."""
    try:
        own = os.fstat(number)
        return int(files.parent.name) != os.getpid() and any(
            os.path.samestat(file.stat(), own) for file in files.iterdir()
        )
    except OSError:
        return False


def seconds_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def timed(ranks: Ranks, num_bytes: int, call: Callable[[], object]) -> float:
    """Seconds until the slowest rank has done it, from the moment when all begin.

    Before, memory for num_bytes of page cache is touched and freed: a virtual machine gives free memory back to its
    host, and to get it again takes longer than a save.
    """
    os.sync()
    np.full(num_bytes * 3 // 2, 1, np.uint8)
    ranks.barrier()
    begin = time.perf_counter()
    call()
    return max(ranks.gather(time.perf_counter() - begin))


def save_by_dcp(state: dict[str, torch.Tensor], folder: Path, step: int, is_main: bool) -> None:
    dcp.save(state, checkpoint_id=folder / f"dcp-{step}")
    if is_main:
        shutil.rmtree(folder / f"dcp-{step - 1}", ignore_errors=True)


def rank(number: int, world_size: int, folder: Path, name: str, pairs: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/ranks", rank=number, world_size=world_size)
    ranks = Ranks(number, number, world_size, torch.device("cpu"))
    with torch.device("meta"):
        model = models.build(models.configure(f"ViT-{name}", 224, 1000))
    shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    ranges, at = [], 0
    total = sum(tensor.numel() for tensor in model.state_dict().values())
    for key, tensor in model.state_dict().items():
        low, high = (min(max(total * end // world_size - at, 0), tensor.numel()) for end in (number, number + 1))
        if low < high:
            ranges.append((key, low, high - low))
        at += tensor.numel()
    # The moments are the same memory as the weights, to spare that of this machine; what is written is not.
    own = [torch.randn(length) for _, _, length in ranges]
    num_bytes = 12 * sum(tensor.numel() for tensor in own)
    part = RankPart(ranges, dict.fromkeys(STATES, own))
    commit = Commit({"step": 0}, shapes, {}, 1, [], False) if number == 0 else None
    state = {f"{kind}.{key}": tensor for kind in STATES for (key, *_), tensor in zip(ranges, own, strict=True)}
    if world_size > 1:  # Each rank saves ranges of its own.
        state = {f"{key}.{number}": tensor for key, tensor in state.items()}
    saver = Saver(str(folder / "ours"), ranks, 5)
    saver.reserve(part)
    time.sleep(num_bytes / 2e8)  # Training: until the memory is there.
    writer, this, rows = Writer(saver), psutil.Process(), []
    for step in range(1, pairs + 2):
        before = seconds_of(writer)
        stall = timed(ranks, num_bytes, partial(saver.save, step, part, commit))
        saver.wait()
        ours, ours_cpu = max(ranks.gather(saver.written)), ranks.sum(seconds_of(writer) - before)[0]
        saver.written = 0.0
        os.setpriority(os.PRIO_PROCESS, 0, 10)
        call = partial(save_by_dcp, state, folder, step, number == 0)
        used: list[float] = []
        theirs = timed(
            ranks, num_bytes, lambda call=call, used=used: used.extend([seconds_of(this), call(), seconds_of(this)])
        )
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        rows.append((stall, ours, theirs, ours_cpu, ranks.sum(used[2] - used[0])[0]))
        if number == 0:
            print(
                "stall {:.2f} s, ours {:.2f} s, DCP {:.2f} s, CPU {:.2f} s and {:.2f} s".format(*rows[-1]), flush=True
            )
    peak = max(ranks.gather(writer.peak))
    saver.close()
    if number == 0:
        ratio, cpu_ratio = (statistics.median(row[i] / row[i + 1] for row in rows[1:]) for i in (1, 3))
        stall, ours, theirs, *_ = (statistics.median(column) for column in zip(*rows[1:], strict=True))
        print(
            f"{name}, {12 * total / 1e9:.2f} GB, ranks {world_size}: median of pairs {ratio:.2f} times DCP"
            f" ({ours:.2f} s and {theirs:.2f} s; CPU {cpu_ratio:.2f} times); first stall {rows[0][0]:.2f}"
            f" s, later {stall:.2f} s; a writer's memory {peak:.0f} MB"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, name, world_size, pairs = Path(sys.argv[1]), *(sys.argv[2:] + ["L/16", "1", "5"][len(sys.argv) - 2 :])
    folder.mkdir(parents=True)
    try:
        torch.multiprocessing.spawn(rank, (int(world_size), folder, name, int(pairs)), int(world_size))
    finally:
        shutil.rmtree(folder)
