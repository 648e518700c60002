"""Benchmark of training on one GPU within a time budget: the order of measurements, the choice of settings, and the tables.

Each measurement (`gpu_step.py`) is a process of its own with a time limit: running out of memory, a crash or a compiler that
takes too long is a row of the result. What is worth most comes first, and every row is written at once.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from data_tools.bench.apart import Row, reason, rows_apart
from data_tools.bench.gpu import gpu_step
from data_tools.bench.gpu.gpu_report import Exactness, write_report
from data_tools.bench.gpu.gpu_step import DEFAULTS, Case, Setup
from data_tools.bench.record import BenchRecord
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.estimate.memory import most_images
from pipeline.settings.commands.bench import GpuBenchConfig
from pipeline.settings.quantities import Length
from pipeline.settings.run import DataConfig, ModelConfig, RunConfig, TrainConfig

_MODELS = {"cuda": ["ViT-L/16@224", "ViT-H/14@224", "ViT-L/16@384", "ViT-B/16@224"], "cpu": ["ViT-mu/16@32"]}
_MAX_TOKENS, _MAX_BATCH = 32_768, 16_384
# A measurement is not begun with less time left, and that for the report is kept.
_LEAST_SECONDS, _REPORT_SECONDS = 5.0, 3.0
# Time limits: of the first part, and of any other.
_FIRST_SECONDS, _PART_SECONDS = 45.0, 120.0
# CUDA was used before the fork, by an import: every process is then started afresh. Also when the first part fails.
_BAD_FORK = ("forked subprocess", "initialization error")
_NUM_IMAGES = 1600
# DINO's prototypes alone take a CPU ten seconds.
_OBJECTIVES = {"cuda": ("mae", "dino", "lejepa"), "cpu": ("mae", "lejepa")}


def run(config: GpuBenchConfig) -> None:
    """Measure, print tables and the fastest exact settings. Raises UserError without a GPU, unless device=cpu."""
    if config.device == "cuda":
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
            "1"  # Otherwise the check uses CUDA, and no process could be forked.
        )
        if not torch.cuda.is_available():
            raise UserError("torch sees no GPU here. device=cpu runs the same code on tiny models, as a test of it.")
    else:
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    record = BenchRecord("gpu", config.json)
    record.write()
    bench = GpuBench(config, record)
    bench.deadline -= time.time() - psutil.Process().create_time()  # The budget is the command's, with its imports.
    try:
        bench.measure()
    finally:  # Also after Ctrl-C.
        write_report(record, bench.exactness)
        record.write()


class GpuBench:
    """The measurements in order. Rows of the record: name (its first word is the part), then what was measured or "failed"."""

    def __init__(self, config: GpuBenchConfig, record: BenchRecord) -> None:
        self.config, self.record = config, record
        self.deadline = time.monotonic() + config.seconds - _REPORT_SECONDS
        self.method = "fork"
        self.device_memory: int | None = None
        self.exactness = Exactness(config.tolerance)
        self.cases = [self._case(*name.split("@")) for name in config.models or _MODELS[config.device]]

    def measure(self) -> None:
        """Everything, in order of worth."""
        first, others = self.cases[0], self.cases[1:]
        side = 8192 if self.config.device == "cuda" else 256
        for row in self._apart("product", gpu_step.matrix_product, (self.config.device, side), _FIRST_SECONDS):
            self.device_memory = row.get("device_memory") or self.device_memory

        # What a run has with its defaults first, then what would be faster.
        compiled = replace(DEFAULTS, compile=True)
        for setup in (Setup(), DEFAULTS, compiled):
            self._step(first, setup)
        self._each(
            *((self._step, case, DEFAULTS) for case in others[:1]),
            (self._from_shards, first),
            *((self._objective, first, loss) for loss in _OBJECTIVES[first.device]),
            (self._largest_batch, first),
        )
        for setup in (replace(DEFAULTS, fused=False), replace(DEFAULTS, deterministic=False)):
            self._step(first, setup)
        best = self.exactness.fastest(self.record.rows, first) or DEFAULTS
        larger = [replace(first, batch=factor * first.batch) for factor in (2, 4)]
        self._each(
            *((self._compare, case, best) for case in [*others[:1], larger[0], *others[1:], larger[1]]),
            (self._step, first, replace(compiled, deterministic=False)),
            *((self._largest_batch, case) for case in others),
        )

    def _each(self, *parts: tuple[Any, ...]) -> None:
        """Call functions with their arguments. A mistake in one must not cost the others."""
        for part, *arguments in parts:
            try:
                part(*arguments)
            except Exception as error:
                self._add(part.__name__.strip("_"), {"failed": reason(error)})

    # ------------------------------------------------------------------ parts
    def _step(self, case: Case, setup: Setup) -> None:
        name = f"step {case.name}, batch {case.batch}, {setup}"
        if not any(row["name"] == name for row in self.record.rows):
            self._apart(name, gpu_step.measure, (case, setup), _PART_SECONDS)

    def _compare(self, case: Case, engine: Setup) -> None:
        for setup in (Setup(), engine):
            self._step(case, setup)

    def _objective(self, case: Case, loss: str) -> None:
        self._apart(f"objectives {case.name}, {loss}", gpu_step.objective, (case, loss), _PART_SECONDS)

    def _from_shards(self, case: Case) -> None:
        """The engine on real shards of generated JPEGs, with a checkpoint in each round and few or many log lines."""
        num_images = _NUM_IMAGES if case.device == "cuda" else 8 * case.batch
        plain = self.exactness.milliseconds(self.record.rows, case, Setup()) or 200.0
        steps = max(2, round(3e3 * case.seconds / plain))
        with tempfile.TemporaryDirectory() as folder:
            rows = self._apart("shards made", _make_shards, (Path(folder), num_images), _PART_SECONDS)
            if any("failed" in row for row in rows) or not rows:
                return
            for log_every in (0, 1):
                name = f"shards {case.name}, batch {case.batch}, a log line every {counted(log_every or steps, 'step')}"
                peak = 0.0 if self.config.device == "cuda" else 0.1
                arguments = (case, f"{folder}/shards", steps, log_every, self.config.decoders, peak)
                self._apart(name, gpu_step.from_shards, arguments, _PART_SECONDS)

    def _largest_batch(self, case: Case) -> None:
        """The largest micro-batch of the engine that fits, from the predicted one on: in steps of a tenth, then of a 40th."""
        name = f"fit {case.name}"
        predicted = self._predicted_batch(case)
        if predicted is None:  # A CPU has no limit that may be tried.
            sizes = [case.batch, 2 * case.batch]
        else:
            sizes = _grown(predicted, (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5))
        rows = self._apart(f"{name}, predicted {predicted or 'none'}", gpu_step.fits, (case, sizes), _PART_SECONDS)
        fitting = max((row["fits"] for row in rows if "fits" in row), default=0)
        too_large = min((row["too_large"] for row in rows if "too_large" in row), default=0)
        if too_large:
            between = range(fitting, too_large, max(1, (too_large - fitting) // 4))[1:]
            if between:
                self._apart(f"{name}, closer", gpu_step.fits, (case, list(between)), _PART_SECONDS)

    def _predicted_batch(self, case: Case) -> int | None:
        """The largest micro-batch that `pipeline/estimate` expects to fit this GPU."""
        if self.device_memory is None:
            return None
        return max(1, most_images(_run_of(case.model), case.config, 1, 1, self.device_memory, _MAX_BATCH))

    # ------------------------------------------------------------------ one process
    def _apart(
        self, name: str, work: Callable[..., Iterator[Row]], arguments: tuple[Any, ...], seconds: float
    ) -> list[Row]:
        """Run and record one measurement; returns its rows."""
        if self.config.only and name.split()[0] not in self.config.only:
            return []
        left = self.deadline - time.monotonic()
        if left < _LEAST_SECONDS:
            self._add(name, {"failed": "not measured: no time left"})
            return []
        rows = []
        for row in rows_apart(work, arguments, min(seconds, left), self.method):
            if "machine" in row:
                self.record.facts["machine"] = row["machine"]
            elif "losses" in row:
                row["loss_difference"] = self.exactness.difference(self.record.rows, row)
            self._add(name, row)
            rows.append(row)
        failed = [row["failed"] for row in rows if "failed" in row]
        if self.method == "fork" and any(name == "product" or text in why for why in failed for text in _BAD_FORK):
            self.method = "spawn"
            return self._apart(name, work, arguments, seconds)
        return rows

    def _add(self, name: str, row: Row) -> None:
        self.record.add(name, **row)
        shown = {"failed": row.get("failed"), "images/s": row.get("images_per_second"), "TFLOP/s": row.get("tflops")}
        told = ", ".join(
            f"{value:,.1f} {key}" if isinstance(value, float) else str(value) for key, value in shown.items() if value
        )
        print(f"{time.strftime('%H:%M:%S')} {name}: {told or 'done'}", flush=True)

    def _case(self, model: str, pixels: str) -> Case:
        case = Case(model, int(pixels), 1, self.config.candidate_seconds, self.config.device)
        most = 2 ** math.floor(math.log2(max(1, _MAX_TOKENS / case.config.num_tokens)))
        return replace(case, batch=self.config.batch or (most if self.config.device == "cuda" else 4))


def _run_of(model: str) -> RunConfig:
    """A run with the defaults, for the memory that is predicted."""
    train = TrainConfig(length=Length.parse("1 steps"))
    return RunConfig(name="bench", model=ModelConfig(name=model), data=DataConfig(path="none"), train=train)


def _grown(size: int, factors: Sequence[float]) -> list[int]:
    """The size times each factor, rounded to multiples of 8 where it is large."""
    unit = 8 if size >= 64 else 1
    return sorted({max(unit, round(size * factor / unit) * unit) for factor in factors})


def _make_shards(folder: Path, images: int) -> Iterator[Row]:
    """Write a data set of generated JPEGs to `folder`/shards, as `launch/shard.py` does, but without Ray."""
    from data_tools.bench.corpus import write_generated
    from data_tools.sharding.holdout import hold_out
    from data_tools.sharding.shard import make_jobs, make_plan, read_rows
    from data_tools.sharding.write_shard import part_path, write_shard
    from data_tools.sources import list_source
    from data_tools.sources.split_files import PARTS
    from pipeline.data.dataset.manifest import write_dataset
    from pipeline.settings.commands.data import ShardConfig

    num_bytes = write_generated(source := folder / "raw", images)
    out = folder / "shards"
    (out / PARTS).mkdir(parents=True)
    settings = ShardConfig(
        source=str(source), out=str(out), holdout_per_class=2, samples_per_shard=256, inspect="header"
    )
    listing = hold_out(list_source(source, settings, folder / "staging"), settings)
    shards = [write_shard(job).shard for job in make_jobs(listing, make_plan(listing, settings), settings, out, {})]
    tables = (read_rows(part_path(out, shard.name)) for shard in shards)
    write_dataset(out, shards, tables, listing.classes, {"made by": "bench.py gpu"}, {})
    yield {"images": images, "mean_bytes": num_bytes / images}
