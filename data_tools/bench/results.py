"""What `bench.py gpu` found: rows in a JSON file, which configurations are exact, which is the fastest, and the
tables.
"""

import json
import os
import platform
import re
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data_tools.bench.apart import Row
from data_tools.bench.gpu_step import Setup
from pipeline.base import files
from pipeline.monitor.gpus import find_gpu


class BenchResults:
    """Rows of measurements. `add` replaces the JSON file, so that what was measured survives a kill. file: empty is
    none.

    A step is exact if each of its first losses is within `tolerance` of the plain step's (relative), and its kernels
    are deterministic.
    """

    def __init__(self, file: str, tolerance: float) -> None:
        self.file, self.tolerance = file, tolerance
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

    def add(self, name: str, row: Row) -> None:
        """Add a row, if it is of a step with its largest relative difference to the losses of the plain step."""
        row = {"name": name, **row}
        self.rows.append(row)
        if "losses" in row:
            plain = self.step(row["model"], row["batch"], Setup())
            pairs = zip(row["losses"], plain["losses"], strict=True) if plain else ()
            row["loss_difference"] = max((round(abs(a - b) / abs(b), 6) for a, b in pairs), default=None)
        self.write()

    def write(self) -> None:
        """Replace the JSON file, if one is set."""
        if self.file:
            files.write_text(Path(self.file), json.dumps({**self.facts, "rows": self.rows}, indent=1))

    def step(self, model: str, batch: int, setup: Setup) -> Row | None:
        return next((row for row in self._steps(model, batch) if row["setup"] == asdict(setup)), None)

    def fastest(self, model: str, batch: int) -> Row | None:
        """The fastest exact step of the engine."""
        exact = [
            row
            for row in self._steps(model, batch)
            if row["setup"]["engine"] and row["setup"]["deterministic"] and row["loss_difference"] is not None
        ]
        exact = [row for row in exact if row["loss_difference"] <= self.tolerance]
        return min(exact, key=lambda row: row["ms"], default=None)

    def _steps(self, model: str, batch: int) -> list[Row]:
        return [row for row in self.rows if "losses" in row and (row["model"], row["batch"]) == (model, batch)]

    def report(self) -> None:
        """Print the tables in Markdown, and the settings to use; both also become part of the file."""
        device = self.machine["cpu"] if self.machine["gpu"] == "none" else self.machine["gpu"]
        product = next((row["tflops"] for row in self.rows if "side" in row), 0.0)
        sheet = gpu.tflops if (gpu := find_gpu(device)) else 0.0
        about = (
            f"{device}, cores: {self.machine['cores']}, torch {self.machine['torch']}, {self.facts['date']}:"
            f" `{self.facts['command']}`\n\nbf16; TFLOP/s of a plain matrix product {product:,.1f} (0: not measured),"
            f" of the data sheet {sheet:,.0f} (0: unknown)."
        )
        parts = [about, *(self._table(part) for part in ("step", "shards", "objectives", "fit"))]
        for model, batch in {(row["model"], row["batch"]): None for row in self.rows if "losses" in row}:
            settings = ["none measured"]
            if best := self.fastest(model, batch):
                chosen = (f"engine.{name}={str(on).lower()}" for name, on in best["setup"].items() if name != "engine")
                settings = [*chosen, f"train.micro_batch={batch}"]
                settings.append(f"(measured={best['images_per_second']:.0f} of launch/plan.py)")
            parts.append(f"{model}, batch {batch}: fastest exact step of the engine: {' '.join(settings)}.")
        self.facts["report"] = "\n\n".join(part for part in parts if part)
        self.write()
        print("\n" + self.facts["report"], flush=True)

    def _table(self, part: str) -> str:
        """Markdown of the rows of a part; "" without rows."""
        rows = [row for row in self.rows if f"{row['name']} ".startswith(f"{part} ") and "made" not in row]
        shown = [{name: value for name, value in row.items() if isinstance(value, int | float | str)} for row in rows]
        columns = list(dict.fromkeys(name for row in shown for name in row))
        lines = [columns, ["---"] * len(columns), *([row.get(name, "") for name in columns] for row in shown)]
        texts = ([f"{value:,.5g}" if isinstance(value, float) else str(value) for value in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in texts) if rows else ""
