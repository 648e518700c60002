"""The record of a benchmark: command, machine and rows of results, as a JSON file."""

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from pipeline.base import files


class BenchRecord:
    """Results of one benchmark. `add` replaces the JSON file, so that what was measured survives a kill. file: empty is none."""

    def __init__(self, what: str, file: str = "") -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {
            "benchmark": what,
            # As it was typed: launch/bench.py takes the benchmark's name out of sys.argv.
            "command": shlex.join(["python", *sys.orig_argv[1:]]),
            "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "machine": machine(),
        }

    def add(self, name: str, **values: Any) -> None:
        """Add one result. values: numbers and texts that JSON can hold."""
        self.rows.append({"name": name, **values})
        self.write()

    def write(self) -> None:
        """Replace the JSON file, if one is set."""
        if self.file:
            files.write_text(Path(self.file), json.dumps({**self.facts, "rows": self.rows}, indent=1))


def machine(gpu: str = "") -> dict[str, Any]:
    """Facts about this machine. gpu: CUDA's name of the GPU that was measured, empty for none."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    facts = {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "gpu": gpu or "none", "torch": torch.__version__}
    return {**facts, "cuda": torch.version.cuda or "none", "python": platform.python_version()}


def markdown(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Returns a Markdown table; an empty text if it has no lines."""
    heads, lines = list(heads), list(lines)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, ["---"] * len(heads), *lines] if lines)
