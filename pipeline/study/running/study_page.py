"""The MLflow page of a study: a parent run, below which the runs of its cells, which send themselves, are shown."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.data.storage.atomic import write_files
from pipeline.monitor.page_folder import FIGURES
from pipeline.monitor.run_page import RunFacts
from pipeline.study.results import StudyResults
from pipeline.study.running.cells import Study, scored_on
from pipeline.transfer.track.parent_page import ParentPage, facts_of_splits, tags_of_folder

_BEST = "best_score"  # Of all models.
_FILES = ("report.md", "report.html", "results.csv", "results.json")


class StudyPage(ParentPage):
    """Sends a study. uri: MLflow's tracking URI."""

    def __init__(self, study: Study, uri: str) -> None:
        run = study.cells[0].run.config
        super().__init__(_facts(study), study.folder, Path(study.config.out), uri, run.track.experiment)
        for cell in study.cells:
            for child in (cell.run, *cell.finetunes, *([cell.trunk] if cell.trunk else [])):
                self.has_run(child.folder)

    def reported(self, results: StudyResults, sentences: Sequence[str], files: Sequence[Path]) -> None:
        """The report is written. sentences: its answer. files: of the report; its pictures become figures."""
        states = Counter(cell.state for cell in results.cells)
        metrics = {"runs_done": float(states["done"]), "runs_failed": float(states["failed"]), "runs_diverged": float(states["diverged"]),
                   "hours": sum(cell.hours or 0.0 for cell in results.cells)}  # fmt: skip
        scored = results.scored(results.score)
        for model in results.models:
            if of_model := [cell.scores[results.score] for cell in scored if cell.model == model]:
                metrics[f"best_{model}"] = max(of_model)
        if scored:
            metrics[_BEST] = max(cell.scores[results.score] for cell in scored)
        self.log(metrics)
        pictures = {file.name: file.read_bytes() for file in files if file.suffix == ".png"}
        write_files(self.folder / FIGURES, pictures)
        self.result = f"**Result**: {' '.join(sentences)}"


def _facts(study: Study) -> RunFacts:
    config, dataset, data = study.config, study.dataset, study.cells[0].run.config.data
    parameters = {
        "question": config.question, "score": config.score, "run": config.run, "settings": " ".join(config.settings),
        "models": [model.name for model in config.models], "data_sizes": [str(size) for size in config.data_sizes],
        "lengths": [str(length) for length in config.lengths], "budgets": config.budgets, "minutes": config.minutes, "cooldown": config.cooldown,
        "seeds": config.seeds, "finetune": config.finetune, "vtab": config.vtab,
    }  # fmt: skip
    tags = {"question": config.question, **tags_of_folder(study.folder, dataset)}
    description = (
        f"**Study** ({config.question}) of {', '.join(model.name for model in config.models)} on **{dataset.path.name}** (fingerprint "
        f"`{dataset.fingerprint}`): {len(study.cells)} pre-trainings, which are shown below this run, compared by {config.score}."
    )
    # As "61.00 % photos:val" for top-1, else as "61.00 % 5shot, photos:val".
    named = {"top1": "", "vtab": "VTAB-1k"}.get(config.score, config.score)
    return RunFacts(
        config.name,
        "study",
        parameters,
        tags,
        facts_of_splits(dataset, replace(data, eval_split=data.evaluated_split)),
        description,
        {},
        artifacts=_FILES,
        score=_BEST,
        scored_on=", ".join(filter(None, (named, scored_on(study)))),
    )
