"""What a started study must not change: the content of study.json."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import objectives
from pipeline.data.mixture.run_data import open_run_data
from pipeline.monitor.origin import sha256_now
from pipeline.settings import changes, schema
from pipeline.settings.changes import Change, Fact, facts_of
from pipeline.settings.quantities import Limit
from pipeline.settings.run import RunConfig
from pipeline.transfer.child_run import ChildRun

if TYPE_CHECKING:
    from pipeline.study.running.cells import Study


@dataclass(frozen=True)
class StudyIdentity:
    """data: fingerprint of the data set. scoring: settings of fine-tunings by file. cells: settings by name. sources: what the cells read -> what tells it from others."""

    data: str
    scoring: dict[str, dict[str, Any]]
    cells: dict[str, dict[str, Any]]
    sources: dict[str, str]


def identity_of(study: "Study") -> StudyIdentity:
    """Raises UserError for data that cannot be opened."""
    scoring: dict[str, Any] = {}
    for finetune in study.cells[0].finetunes:
        settings = settings_of(finetune)
        del settings["init.weights"], settings["seed"]  # Of each cell.
        scoring[Path(finetune.file).name] = settings
    # As JSON, to be compared with what was read from a file.
    cells: Any = {cell.name: settings_of(cell.run) for cell in study.cells}
    scoring, cells = json.loads(json.dumps([scoring, cells]))
    return StudyIdentity(study.dataset.fingerprint, scoring, cells, _sources(study))


def settings_of(run: ChildRun) -> dict[str, Any]:
    """The settings of a run by dotted name that its results depend on."""
    known = objectives.facts(run.config.train.loss)
    return changes.decisive(objectives.flat_settings(run.config), known, "comparison")


def common_changes(then: StudyIdentity, now: StudyIdentity) -> list[Change]:
    """What differs of two studies but their cells. Sources that one of them does not know are taken to be the same."""
    sources = then.sources.keys() & now.sources.keys()
    old, new = (
        schema.flatten({"data": one.data, "scoring": one.scoring}) | {name: one.sources[name] for name in sources}
        for one in (then, now)
    )
    known: dict[str, Fact] = {}
    for file in {**then.scoring, **now.scoring}:
        known |= facts_of(RunConfig, f"scoring.{file}.")
    return changes.differences(old, new, known, "comparison")


def _sources(study: "Study") -> dict[str, str]:
    """Splits that cells are trained, fine-tuned and evaluated on, as a whole; weights that they begin with, and that teach them."""
    from pipeline.train.run_facts import datasets_of  # Late: the import takes seconds.

    first = study.cells[0]
    found = {}
    for run in (first.run, *first.finetunes):
        whole = replace(run.config.data, limit=Limit.parse("100%"))
        data = open_run_data(whole, 0, run.config.train.global_batch, run.config.labels)
        for of in datasets_of(data):
            excluded = of.notes["excluded"]
            found[f"{of.name}:{of.split} ({of.context})"] = f"{of.digest} without {excluded}"
    weights = {cell.run.config.init.weights for cell in study.cells} - {None}
    known = {f"the SHA-256 of {path}": sha256_now(path) for path in weights if path}
    known |= {
        f"the SHA-256 of the teacher of {cell.name}": objectives.teacher_digest(cell.run.config) for cell in study.cells
    }
    return found | {name: sha256 for name, sha256 in known.items() if sha256}
