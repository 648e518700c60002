"""The record of a benchmark: command, machine and rows of results, as a JSON file and in MLflow."""

import json
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.base import files
from pipeline.monitor.run_page import RunFacts, hide_passwords
from pipeline.monitor.tracking import send_report
from pipeline.settings.commands.bench import RecordConfig

Row = Mapping[str, Any]
_FILE = "bench.json"


class BenchRecord:
    """Results of one benchmark. `add` replaces the JSON file, so that what was measured survives a kill."""

    def __init__(self, what: str, config: RecordConfig) -> None:
        self.what, self.config = what, config
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {
            "benchmark": what,
            # As it was typed: launch/bench.py takes the benchmark's name out of sys.argv.
            "command": hide_passwords(shlex.join(["python", *sys.orig_argv[1:]])),
            "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "machine": machine(),
        }

    def add(self, name: str, **values: Any) -> None:
        """Add one result. values: numbers and texts that JSON can hold."""
        self.rows.append({"name": name, **values})
        self.write()

    def write(self) -> None:
        """Replace the JSON file, if one is set."""
        if self.config.json:
            files.write_text(Path(self.config.json), self._text())

    def finish(self) -> None:
        """Write the file, and send the record to MLflow if a URI is set."""
        self.write()
        if not self.config.mlflow:
            return
        with tempfile.TemporaryDirectory() as folder:
            (path := Path(folder) / _FILE).write_text(self._text())
            parameters = {name: value for name, value in self.facts.items() if name != "machine"}
            name = f"bench {self.what}"
            facts = RunFacts(name, "benchmark", {**parameters, **self.facts["machine"]}, description=f"**{name}**")
            send_report(self.config.mlflow, path.parent, facts, self._metrics(), [path], self.config.experiment)

    def _text(self) -> str:
        return json.dumps({**self.facts, "rows": self.rows}, indent=1)

    def _metrics(self) -> dict[str, float]:
        """The numbers of all rows as "row/column", in the characters that MLflow allows."""
        numbers = {
            f"{row['name']}/{column}": float(value)
            for row in self.rows
            for column, value in row.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        return {re.sub(r"[^\w\-. /]+", "_", name)[:250]: value for name, value in numbers.items()}


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
