"""The MLflow page of a study: a parent run, below which the runs of its cells, which send themselves, are shown."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.data.storage.atomic import write_files
from pipeline.monitor.page_folder import FIGURES
from pipeline.monitor.run_page import RunFacts
from pipeline.settings import schema
from pipeline.study.results import StudyResults
from pipeline.study.running.cells import Study, scored_on
from pipeline.transfer.track.parent_page import ParentPage, facts_of_splits, tags_of_folder

_BEST = "best_score"  # Of all models.
_PARAMETERS = (
    "question",
    "score",
    "run",
    "settings",
    "models",
    "data_sizes",
    "lengths",
    "budgets",
    "minutes",
    "cooldown",
    "seeds",
    "finetune",
)
_FILES = ("report.md", "report.html", "results.csv", "results.json")


class StudyPage(ParentPage):
    """Sends a study. uri: MLflow's tracking URI."""

    def __init__(self, study: Study, uri: str) -> None:
        run = study.cells[0].run.config
        super().__init__(_facts(study), study.folder, Path(study.config.out), uri, run.track.experiment)
        for cell in study.cells:
            for child in (cell.run, *cell.finetunes, *([cell.trunk] if cell.trunk else [])):
                self.has_run(child.folder)

    def reported(self, results: StudyResults, answer: str, files: Sequence[Path]) -> None:
        """The report is written. answer: Markdown. files: of the report; its pictures become figures."""
        states = Counter(cell.state for cell in results.cells)
        metrics = {f"runs_{state}": float(states[state]) for state in ("done", "failed", "diverged")}
        metrics["hours"] = sum(cell.hours or 0.0 for cell in results.cells)
        for cell in results.scored(results.score):
            for name in (_BEST, f"best_{cell.model}"):
                metrics[name] = max(metrics.get(name, 0.0), cell.scores[results.score])
        self.log(metrics)
        pictures = {file.name: file.read_bytes() for file in files if file.suffix == ".png"}
        write_files(self.folder / FIGURES, pictures)
        self.result = answer


def _facts(study: Study) -> RunFacts:
    config, dataset, data = study.config, study.dataset, study.cells[0].run.config.data
    settings = schema.to_dict(config) | {"models": [model.name for model in config.models]}
    tags = {"question": config.question, **tags_of_folder(study.folder, dataset)}
    description = (
        f"**Study** ({config.question}) of {', '.join(model.name for model in config.models)} on **{dataset.path.name}** (fingerprint "
        f"`{dataset.fingerprint}`): {len(study.cells)} pre-trainings, which are shown below this run, compared by {config.score}."
    )
    # As "61.00 % photos:val" for top-1, else as "61.00 % 5shot, photos:val".
    named = "" if config.score == "top1" else config.score
    return RunFacts(
        config.name,
        "study",
        {name: settings[name] for name in _PARAMETERS},
        tags,
        facts_of_splits(dataset, replace(data, eval_split=data.evaluated_split)),
        description,
        {},
        artifacts=_FILES,
        score=_BEST,
        scored_on=", ".join(filter(None, (named, scored_on(study)))),
    )
