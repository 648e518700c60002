"""Console output of a run: lines, which are also written to log.txt, and a progress bar on a terminal."""

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tqdm import tqdm

from pipeline.base.errors import naming
from pipeline.base.progress import duration
from pipeline.base.words import significant
from pipeline.process.start import silence_broken_output


class LineClock:
    """Says when a line of the log is due: when it is asked first, then every `seconds`; with 0, never again."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds or math.inf
        self._next = 0.0

    def is_due(self) -> bool:
        if (now := time.monotonic()) < self._next:
            return False
        self._next = now + self.seconds
        return True


class Console:
    """Prints lines on rank 0, above the progress bar if there is one, and appends them to a log file."""

    def __init__(self, log: Path, is_main: bool) -> None:
        self.is_main = is_main
        self.bar: tqdm | None = None
        self.log = log
        if is_main:
            log.parent.mkdir(parents=True, exist_ok=True)

    def say(self, *lines: str) -> None:
        for line in lines if self.is_main else ():
            try:
                tqdm.write(line, file=sys.stdout)
                sys.stdout.flush()
            except OSError:
                # The launcher that read the output was killed. The run must not end, as it may be about to commit.
                silence_broken_output()
            with naming(self.log), open(self.log, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def open_bar(self, done: int, total: int) -> None:
        if self.is_main and sys.stderr.isatty():
            self.bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)

    def advance(self) -> None:
        if self.bar:
            self.bar.update()

    def close_bar(self) -> None:
        if self.bar:
            self.bar.close()


def progress_line(
    done: int, total: int, metrics: dict[str, float], global_batch: int, logged: Mapping[str, str] | None = None
) -> str:
    """A line of the training log: step, loss, lr, gradient norm, images/s, MFU, shares of time, memory, skips, time
    left.

    logged: what the objective logs beside its loss: name -> text.
    """
    retries = metrics["storage_retries"]
    own = "".join(f"{name.removeprefix('train_')} {text}  " for name, text in (logged or {}).items())
    mfu = f" MFU {metrics['mfu']:.1%} " if "mfu" in metrics else ""
    left = (total - done) * global_batch / max(metrics["images_per_second"], 1e-9)
    return (
        f"step {done:,}/{total:,}  loss {metrics['loss']:.4f}  {own}lr {metrics['lr']:.2e}  grad"
        f" {metrics['grad_norm']:.3f}  {significant(metrics['images_per_second'])} img/s {mfu} data"
        f" {metrics['data_wait']:.1%} fwd {metrics['time_forward']:.0%} bwd {metrics['time_backward']:.0%} opt"
        f" {metrics['time_optimizer']:.0%} save {metrics['time_checkpoint']:.0%}  mem {metrics['peak_memory_gib']:.2f}"
        f" GiB  skipped {metrics['skipped_steps']:.0f}  bad {metrics['bad_samples']:.0f} "
        f" {f'retries {retries:.0f}  ' if retries else ''}left {duration(left)}"
    )
