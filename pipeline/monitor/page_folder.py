"""The folder `page/` of a run: what its MLflow page shows beside the metrics, as files.

    facts.json         `RunFacts` and the experiment; written at each start
    starts.jsonl       one `Start` a line
    end.json           `End`: how the last start ended; missing while the run goes on, and after a kill
    environment.txt    versions of the system, of GPUs and of all installed packages
    plan.txt           steps, batches and predicted memory
    predictions.npz    what the last evaluation predicted for each image
    figures/*.png      drawn at evaluations

The run folder is the truth and MLflow a copy: these files are uploaded under the same names, so that a run's downloaded artifacts are
a run folder, and launch/track_sync.py can make the whole MLflow run from the folder, also in another store.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.base import json_record
from pipeline.base.errors import UserError, naming
from pipeline.base.files import write_text
from pipeline.base.words import counted
from pipeline.monitor.metrics_file import open_to_append
from pipeline.monitor.run_page import RunFacts

PAGE = "page"
# Folder of the figures that MLflow shows, in a run folder or that of a sweep, grid or study.
FIGURES = f"{PAGE}/figures"
_FACTS, _STARTS, _END = "facts.json", "starts.jsonl", "end.json"
_MAX_STARTS_SHOWN = 20
LOG = "drawing.log"  # Not uploaded.


@dataclass(frozen=True)
class Start:
    """One start of a run. time: seconds since 1970. step: from which it continued. before: how the start before ended.

    changed: settings that were others until then, as "optimizer.lr was 0.005, is 0.002".
    """

    time: float
    step: int
    hosts: list[str]
    before: str = ""
    changed: str = ""


@dataclass(frozen=True)
class End:
    """How a start ended. status: FINISHED, FAILED or KILLED (MLflow's names). tags: to set on the MLflow run."""

    status: str
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedFacts:
    """Content of facts.json. experiment: name of the MLflow experiment."""

    experiment: str
    facts: RunFacts


class PageFolder:
    """The files in `page/` of one run folder. Only rank 0 of a run writes them."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder, self.path = run_folder, run_folder / PAGE

    def begin(self, experiment: str, facts: RunFacts, start: Start) -> None:
        """Write the facts, and record the start of a run; a report has no starts."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / _END).unlink(missing_ok=True)
        write_text(self.path / _FACTS, json.dumps(asdict(SavedFacts(experiment, facts)), indent=1))
        if facts.steps:
            path = self.path / _STARTS
            with naming(path), open_to_append(path) as file:
                file.write(json.dumps(asdict(start)).encode() + b"\n")

    def write_text(self, name: str, lines: list[str]) -> None:
        """Write a text file, such as plan.txt."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / name, "\n".join(lines) + "\n")

    def end(self, end: End) -> None:
        """Write how the start ended."""
        write_text(self.path / _END, json.dumps(asdict(end), indent=1))

    def read_facts(self) -> SavedFacts:
        """Raises UserError for a run folder without facts.json: of a run that never started, or of an earlier version."""
        try:
            return json_record.read(self.path / _FACTS, SavedFacts)
        except FileNotFoundError:
            raise UserError(
                f"{self.path / _FACTS} is missing: {self.run_folder} is not the folder of a run, or an earlier version wrote it. "
                "Starting the run's command again writes the file, also for a finished run."
            ) from None

    def has_parameters(self, parameters: Mapping[str, Any]) -> bool:
        """Whether the start before, if there was one, had these parameters."""
        with contextlib.suppress(UserError):
            before, now = (json.dumps(found, default=str) for found in (self.read_facts().facts.parameters, parameters))
            return before == now
        return True

    def read_end(self) -> End | None:
        """None while the run goes on, and after a kill."""
        with contextlib.suppress(FileNotFoundError, UserError):
            return json_record.read(self.path / _END, End)
        return None

    def starts(self) -> list[Start]:
        """All starts, the first one first; damaged lines, as of a kill, are left out."""
        with contextlib.suppress(FileNotFoundError):
            return parse_starts((self.path / _STARTS).read_bytes())[0]
        return []

    def artifacts(self, names: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
        """Yield (file, name among the artifacts) of each file to upload that exists. names: of files beside `page/`."""
        in_page = [path.relative_to(self.run_folder) for path in sorted(self.path.rglob("*"))]
        shown = [path for path in in_page if path.name != LOG and not path.name.startswith(".")]
        for path in dict.fromkeys([*map(Path, names), *shown]):
            if (found := self.run_folder / path).is_file():
                yield found, path.as_posix()


def parse_starts(content: bytes) -> tuple[list[Start], int]:
    """Returns (starts in the content of starts.jsonl, the first one first; number of damaged lines)."""
    starts, num_damaged = list[Start](), 0
    for line in content.splitlines():
        try:
            starts.append(json_record.parse(line, Start, _STARTS))
        except UserError:
            num_damaged += bool(line.strip())
    return starts, num_damaged


def describe(description: str, starts: list[Start]) -> str:
    """The description of a run, with what ended its earlier starts, and which hosts went or came. Markdown."""
    lines = []
    for before, start in itertools.pairwise(starts):
        if start.before or start.changed:
            gone, new = sorted({*before.hosts} - {*start.hosts}), sorted({*start.hosts} - {*before.hosts})
            hosts = [f"without {', '.join(gone)}"] * bool(gone) + [f"with {', '.join(new)}"] * bool(new)
            when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start.time))
            why = [f"the start before was {start.before}"] * bool(start.before) + [start.changed] * bool(start.changed)
            lines.append(f"- {', '.join([when, f'from step {start.step:,}', *hosts])}: {'; '.join(why)}")
    if not lines:
        return description
    return "\n".join(
        [description, "", f"**Started {counted(len(starts), 'time')}**", "", *lines[-_MAX_STARTS_SHOWN:]]
    ).strip()
