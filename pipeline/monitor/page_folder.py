"""run.json and `page/` of a run: what is known of it beside its metrics.

    run.json                `RunFile`: facts, model, starts and the end of the last one; replaced as a whole
    page/environment.txt    versions of the system, of GPUs and of all installed packages
    page/predictions.npz    what the last evaluation predicted for each image
    page/figures/*.png      drawn at evaluations
    page/mistakes/          the most confident mistakes: a page, pictures, and a CSV (`pipeline/evaluate/mistakes.py`)

The run folder is the truth and MLflow a copy: these files are uploaded under the same names, so that a run's downloaded
artifacts are a run folder, and launch/track_sync.py can make the whole MLflow run from the folder, also in another
store.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import write_text
from pipeline.base.words import counted
from pipeline.monitor.run_page import RunFacts

RUN_FILE = "run.json"
PAGE = "page"
# Folder of the figures that MLflow shows, in a run folder or that of a sweep, grid or study.
FIGURES = f"{PAGE}/figures"
# Folder of the mistakes of the last evaluation, in `page/`.
MISTAKES = "mistakes"
_MAX_STARTS_SHOWN = 20
LOG = "drawing.log"  # Not uploaded.


@dataclass(frozen=True)
class Start:
    """One start of a run. time: seconds since 1970. step: from which it continued. before: how the start before ended.

    changed: settings that were others until then, as "optimizer.lr was 0.005, is 0.002".
    """

    time: float
    step: int
    hosts: tuple[str, ...] = ()
    before: str = ""
    changed: str = ""


@dataclass(frozen=True)
class End:
    """How a start ended. status: FINISHED, FAILED or KILLED (MLflow's names). tags: to set on the MLflow run."""

    status: str
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFile:
    """Content of run.json. experiment: name of the MLflow experiment. end: None during the run, and after a
    kill.
    """

    experiment: str
    facts: RunFacts
    starts: tuple[Start, ...] = ()
    end: End | None = None
    format: Literal[1] = 1


class PageFolder:
    """run.json and `page/` of one run folder. Only rank 0 of a run writes them."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder, self.path = run_folder, run_folder / PAGE
        self.file = run_folder / RUN_FILE

    def begin(self, experiment: str, facts: RunFacts, start: Start) -> None:
        """Write the facts and the start of a run, which has no end; a report has no starts."""
        self._write(RunFile(experiment, facts, (*self.starts(), start) if facts.steps else ()))

    def write_text(self, name: str, lines: list[str]) -> None:
        """Write a text file, such as environment.txt."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / name, "\n".join(lines) + "\n")

    def end(self, end: End) -> None:
        """Write how the start ended."""
        self._write(replace(self.read_facts(), end=end))

    def _write(self, content: RunFile) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.file, json.dumps(asdict(content), indent=1))

    def saved(self) -> RunFile | None:
        """Content of run.json; None before the first start."""
        try:
            return json_record.read(self.file, RunFile)
        except FileNotFoundError:
            return None

    def read_facts(self) -> RunFile:
        """Like `saved`, but raises UserError for a run that never started."""
        if (saved := self.saved()) is None:
            raise UserError(f"{self.file} is missing: {self.run_folder} is not the folder of a started run.")
        return saved

    def starts(self) -> tuple[Start, ...]:
        """All starts, the first one first."""
        saved = self.saved()
        return saved.starts if saved else ()

    def artifacts(self, names: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
        """Yield (file, name among the artifacts) of each file to upload that exists. names: of files beside `page/`."""
        in_page = [path.relative_to(self.run_folder) for path in sorted(self.path.rglob("*"))]
        shown = [path for path in in_page if path.name != LOG and not path.name.startswith(".")]
        for path in dict.fromkeys([Path(RUN_FILE), *map(Path, names), *shown]):
            if (found := self.run_folder / path).is_file():
                yield found, path.as_posix()


def describe(description: str, starts: tuple[Start, ...]) -> str:
    """The description of a run, with what ended its earlier starts, and which settings changed. Markdown."""
    lines = []
    for start in starts[1:]:
        before = f"the start before was {start.before}" if start.before else ""
        if why := "; ".join(filter(None, (before, start.changed))):
            at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start.time))
            lines.append(f"- {at}, from step {start.step:,}: {why}")
    if not lines:
        return description
    title = f"**Started {counted(len(starts), 'time')}**"
    return "\n".join([description, "", title, "", *lines[-_MAX_STARTS_SHOWN:]]).strip()
