"""Benchmark of training on one GPU within a time budget: the order of measurements, and the choice of settings.

Each measurement (`gpu_step.py`) is a process of its own with a time limit: running out of memory, a crash or a compiler
that takes too long is a row of the result. What is worth most comes first, and every row is written at once.
"""

import json
import math
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from data_tools.bench import gpu_step
from data_tools.bench.apart import Row, rows_apart
from data_tools.bench.gpu_step import DEFAULTS, Case, Setup
from pipeline.base import files
from pipeline.base.errors import UserError
from pipeline.base.page import Block, Paragraph, Table, markdown
from pipeline.base.words import significant
from pipeline.monitor.gpus import find_gpu
from pipeline.settings.commands.bench import GpuBenchConfig

_MODELS = {"cuda": ["ViT-L/16@224", "ViT-H/14@224", "ViT-L/16@384", "ViT-B/16@224"], "cpu": ["ViT-mu/16@32"]}
_MAX_TOKENS = 32_768
# A measurement is not begun with less time left, and that for the report is kept.
_LEAST_SECONDS, _REPORT_SECONDS = 5.0, 3.0
_PART_SECONDS = 90.0
# DINO's prototypes alone take a CPU ten seconds.
_OBJECTIVES = {"cuda": ("dino", "lejepa"), "cpu": ("lejepa",)}


def run(config: GpuBenchConfig) -> None:
    """Measure, print tables and the fastest exact settings. Raises UserError without a GPU, unless device=cpu."""
    if config.device == "cuda":
        # Otherwise the check uses CUDA, and no process could be forked.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        if not torch.cuda.is_available():
            raise UserError("torch sees no GPU here. device=cpu runs the same code on tiny models, as a test of it.")
    else:
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    bench = GpuBench(config)
    try:
        bench.measure()
    finally:  # Also after Ctrl-C.
        bench.report()


class GpuBench:
    """The measurements in order. Rows: name (its first word is the part), then what was measured or "failed".

    A step is exact if each of its first losses is within `tolerance` of the plain step's (relative), and its kernels
    are deterministic.
    """

    def __init__(self, config: GpuBenchConfig) -> None:
        self.config = config
        self.deadline = time.monotonic() + config.seconds - _REPORT_SECONDS
        self.cases = [self._case(*name.split("@")) for name in config.models or _MODELS[config.device]]
        self.rows: list[Row] = []
        cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        self.machine: dict[str, Any] = {
            "cpu": cpu[1] if cpu else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "gpu": "none",
            "torch": torch.__version__,
        }
        self.facts: dict[str, Any] = {
            # The command as typed: launch/bench.py takes the benchmark's name out of sys.argv.
            "command": shlex.join(["python", *sys.orig_argv[1:]]),
            "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "machine": self.machine,
        }

    def _case(self, model: str, pixels: str) -> Case:
        case = Case(model, int(pixels), 1, self.config.candidate_seconds, self.config.device)
        most = 2 ** int(math.log2(max(1, _MAX_TOKENS / case.config.num_tokens)))
        return replace(case, batch=self.config.batch or (most if case.device == "cuda" else 4))

    def measure(self) -> None:
        """Everything, in order of worth: what a run has with its defaults first, then what would be faster."""
        first, others = self.cases[0], self.cases[1:]
        compiled = replace(DEFAULTS, compile=True)
        for row in self.apart("product", gpu_step.matrix_product, self.config.device):
            self.machine |= {name: row[name] for name in ("gpu", "clocks") if name in row}
        self.steps(first, Setup(), Setup(deterministic=True), DEFAULTS, compiled)
        for setup in (DEFAULTS, compiled):
            self.apart(f"profile {first.name}, batch {first.batch}, {setup}", gpu_step.profile, first, setup)
        self.apart(f"product of {first.name}", gpu_step.block_products, first)
        for deterministic in (True, False):
            self.apart(f"attention deterministic={deterministic}", gpu_step.attention_kernels, first, deterministic)
        images = replace(first, batch=4 * first.batch)
        self.apart(f"objectives {first.name}, mae", gpu_step.objective, images, "mae")
        for setup in (DEFAULTS, compiled):
            self._same_bits(first, setup)
        for case in others[:1]:
            self.steps(case, DEFAULTS, compiled)
        self._from_shards(first)
        for loss in _OBJECTIVES[first.device]:
            self.apart(f"objectives {first.name}, {loss}", gpu_step.objective, first, loss)
        self.apart(f"fit {first.name}", gpu_step.fits, first)
        self.steps(first, replace(DEFAULTS, fused=False), replace(DEFAULTS, deterministic=False))
        fastest = self.fastest(first.name, first.batch)
        best = Setup(**fastest["setup"]) if fastest else DEFAULTS
        for case in [*others, *(replace(first, batch=factor * first.batch) for factor in (2, 4))]:
            self.steps(case, Setup(), best)
        for case in others:
            self.apart(f"fit {case.name}", gpu_step.fits, case)

    def _same_bits(self, case: Case, setup: Setup) -> None:
        """The same steps in two processes; the second one's row also says whether they gave the same bits."""
        name = f"bits {case.name}, {setup}"
        rows = [row for _ in range(2) for row in self.apart(name, gpu_step.bits, case, setup) if "sha256" in row]
        if len(rows) == 2:
            self.add(name, {"same_bits": str(rows[0]["sha256"] == rows[1]["sha256"]).lower()})

    def steps(self, case: Case, *setups: Setup) -> None:
        for setup in setups:
            if self.found(case.name, case.batch, setup) is None:
                self.apart(f"step {case.name}, batch {case.batch}, {setup}", gpu_step.measure, case, setup)

    def _from_shards(self, case: Case) -> None:
        """The engine on real shards of generated JPEGs, with a checkpoint in each round and few or many log lines."""
        num_images, steps = (1600, 40) if case.device == "cuda" else (8 * case.batch, 4)
        with tempfile.TemporaryDirectory() as folder:
            rows = self.apart("shards made", _make_shards, Path(folder), num_images)
            if not rows or "failed" in rows[-1]:
                return
            for log_every in (steps, 1):
                name = f"shards {case.name}, batch {case.batch}, train.log_every={log_every}"
                self.apart(name, gpu_step.from_shards, case, f"{folder}/shards", steps, log_every, self.config.decoders)

    def apart(self, name: str, work: Callable[..., Iterator[Row]], *arguments: Any) -> list[Row]:
        """Run and record one measurement in a process of its own; returns its rows."""
        if self.config.only and name.split()[0] not in self.config.only:
            return []
        left = self.deadline - time.monotonic()
        if left < _LEAST_SECONDS:
            self.add(name, {"failed": "not measured: no time left"})
            return []
        rows = []
        for row in rows_apart(work, arguments, min(_PART_SECONDS, left)):
            self.add(name, row)
            rows.append(row)
        return rows

    # ---------------------------------------------------------------------- results
    def add(self, name: str, row: Row) -> None:
        """Add a row, that of a step with its largest relative difference to the plain step's losses, and write it."""
        row = {"name": name, **row}
        self.rows.append(row)
        if "losses" in row:
            plain = self.found(row["model"], row["batch"], Setup())
            pairs = zip(row["losses"], plain["losses"], strict=True) if plain else ()
            row["loss_difference"] = max((round(abs(a - b) / abs(b), 6) for a, b in pairs), default=None)
        self.write()
        speed = f"{significant(row['images_per_second'])} images/s" if "images_per_second" in row else "done"
        print(f"{time.strftime('%H:%M:%S')} {name}: {row.get('failed', speed)}", flush=True)

    def write(self) -> None:
        """Replace the JSON file, if one is set."""
        if self.config.json:
            files.write_text(Path(self.config.json), json.dumps({**self.facts, "rows": self.rows}, indent=1))

    def found(self, model: str, batch: int, setup: Setup) -> Row | None:
        return next((row for row in self._steps(model, batch) if row["setup"] == asdict(setup)), None)

    def fastest(self, model: str, batch: int) -> Row | None:
        """The fastest exact step of the engine."""
        exact = [
            row
            for row in self._steps(model, batch)
            if row["setup"]["engine"] and row["setup"]["deterministic"] and row["loss_difference"] is not None
            if row["loss_difference"] <= self.config.tolerance
        ]
        return min(exact, key=lambda row: row["ms"], default=None)

    def _steps(self, model: str, batch: int) -> list[Row]:
        return [row for row in self.rows if "losses" in row and (row["model"], row["batch"]) == (model, batch)]

    def report(self) -> None:
        """Print the tables in Markdown, and the settings to use; both also become part of the file."""
        device = self.machine["cpu"] if self.machine["gpu"] == "none" else self.machine["gpu"]
        product = next((row["tflops"] for row in self.rows if "side" in row), 0.0)
        sheet = gpu.tflops if (gpu := find_gpu(device)) else 0.0
        blocks: list[Block] = [
            Paragraph(
                f"bf16; TFLOP/s of a plain matrix product {product:,.1f} (0: not measured), of the data sheet"
                f" {sheet:,.0f} (0: unknown)."
            )
        ]
        for part in dict.fromkeys(row["name"].split()[0] for row in self.rows):
            rows = [row for row in self.rows if row["name"].split()[0] == part and "made" not in row]
            columns = [*dict.fromkeys(name for row in rows for name in row if isinstance(row[name], int | float | str))]
            if rows:
                blocks.append(Table(columns, [[_shown(row.get(name)) for name in columns] for row in rows]))
        for model, batch in {(row["model"], row["batch"]): None for row in self.rows if "losses" in row}:
            settings = ["none measured"]
            if best := self.fastest(model, batch):
                chosen = (f"engine.{name}={str(on).lower()}" for name, on in best["setup"].items() if name != "engine")
                measured = f"(measured={best['images_per_second']:.0f} of launch/plan.py)"
                settings = [*chosen, f"train.micro_batch={batch}", measured]
            text = f"{model}, batch {batch}: fastest exact step of the engine: {' '.join(settings)}."
            blocks.append(Paragraph(text))
        title = f"{device}, cores: {self.machine['cores']}, torch {self.machine['torch']}, {self.facts['date']}"
        self.facts["report"] = markdown(f"{title}: `{self.facts['command']}`", blocks)
        self.write()
        print("\n" + self.facts["report"], flush=True)


def _shown(value: float | str | None) -> str:
    return f"{value:,.5g}" if isinstance(value, float) else "" if value is None else str(value)


def _make_shards(folder: Path, num_images: int) -> Iterator[Row]:
    """Write a data set of generated JPEGs to `folder`/shards, as `launch/shard.py` does, but without Ray.

    They repeat a few distinct JPEGs of blurred noise, each with as many pixels as ImageNet's, and about as many bytes.
    """
    import cv2
    import numpy as np
    import simplejpeg

    from data_tools.sharding import shard
    from data_tools.sharding.selection import hold_out
    from data_tools.sharding.write_shard import part_path, read_rows, write_planned
    from data_tools.sources import list_source
    from data_tools.sources.split_files import PARTS
    from pipeline.data.dataset.manifest import write_dataset
    from pipeline.settings.commands.data import ShardConfig

    source, out = folder / "raw", folder / "shards"
    (out / PARTS).mkdir(parents=True)
    jpegs = []
    for number in range(64):
        coarse = np.random.default_rng(number).integers(0, 256, (62, 83, 3), np.uint8)
        jpegs.append(simplejpeg.encode_jpeg(cv2.resize(coarse, (500, 375), interpolation=cv2.INTER_CUBIC), quality=90))
    for number in range(num_images):
        path = source / f"class{number % 10}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpegs[number % len(jpegs)])
    config = ShardConfig(source=str(source), out=str(out), holdout_per_class=2, samples_per_shard=256, inspect="header")
    listing = hold_out(list_source(source, config, folder / "staging"), config)
    jobs = shard.make_jobs(listing, shard.make_plan(listing, config, out), config, out, {})
    shards = [write_planned(job).shard for job in jobs]
    tables = (read_rows(part_path(out, one.name)) for one in shards)
    write_dataset(out, shards, tables, listing.classes, {"made by": "bench.py gpu"}, {})
    yield {"made": len(shards)}
