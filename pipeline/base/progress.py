"""Progress of a long job: durations in words, and progress.json for other programs. Standard library only."""

import json
import threading
import time
from pathlib import Path
from typing import Any

from pipeline.base.files import write_text

PROGRESS_FILE = "progress.json"


def duration(seconds: float) -> str:
    """'0.3 s', '8 s', '4 min', '2.5 h', '3.1 d'"""
    if seconds < 0.95:
        return f"{seconds:.1g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


class ProgressFile:
    """`<folder>/progress.json`, which exists while a job runs. If it no longer changes, the job was killed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / PROGRESS_FILE
        self._lock = threading.Lock()

    def write(self, state: dict[str, Any]) -> None:
        """Replace the file; "updated" is added. Any thread may call this."""
        state = {"updated": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **state}
        with self._lock:
            write_text(self.path, json.dumps(state, indent=1) + "\n", durable=False)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
