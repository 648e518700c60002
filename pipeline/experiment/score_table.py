"""Reads results.json of VTAB-1k sweeps into the columns of one table, beside the paper's; no mean over incomplete
groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.evaluate.intervals import Interval, of_samples, of_seeds, of_tasks
from pipeline.experiment.published import PAPER, Published
from pipeline.experiment.vtab_tasks import GROUPS, TASKS

OVERALL = "mean of 19 tasks"
# Group or OVERALL -> names of its tasks.
MEMBERS: dict[str, list[str]] = {
    **{group: [task.name for task in TASKS if task.group == group] for group in GROUPS},
    OVERALL: [task.name for task in TASKS],
}
RESULTS_FILE = "results.json"
_WAY_OUT = "Run its launch/vtab.py again: that writes the file anew from its cells."
# MLflow tag of a sweep: the tasks that were not made from the published files.
UNPUBLISHED_TAG = "not_published_files"


@dataclass(frozen=True)
class TableScore:
    """A score of the table, a share. interval: None if its spread is unknown. num_seeds, num_test: 0 for published
    scores.
    """

    accuracy: float
    interval: Interval | None
    num_seeds: int
    num_test: int


@dataclass(frozen=True)
class Column:
    """A model's scores by a protocol. means: group or OVERALL -> mean, for complete groups only.

    absent: names of the tasks without a score, in the order of TASKS. facts: the other content of results.json, and
    "details" (task -> what was chosen); {} for a published column.
    """

    name: str
    tasks: dict[str, TableScore]
    means: dict[str, TableScore]
    absent: list[str]
    facts: dict[str, Any]

    @property
    def unpublished(self) -> list[str]:
        """Names of the scored tasks whose images are not those of the published files."""
        return [name for name in self.facts.get("unpublished", []) if name in self.tasks]

    def mark(self, *names: str) -> str:
        """Stands beside the score of a task or a mean (a key of MEMBERS), or a mean of tasks: † if it is not VTAB's."""
        members = [task for name in names for task in MEMBERS.get(name, [name])]
        return "†" if set(members) & set(self.unpublished) else ""


def unpublished_warning(tasks: Sequence[str]) -> list[str]:
    """What is said wherever scores of these tasks are shown, or their mean; [] for no task."""
    if not tasks:
        return []
    titles = {task.name: task.title for task in TASKS}
    return [
        "Not VTAB-1k scores, because made from other files than the published ones (†):"
        f" {', '.join(titles[name] for name in tasks)}."
    ]


def read_results(path: Path) -> dict[str, Any]:
    """Read results.json; path: the file, or a sweep's folder. Raises UserError when it is missing or damaged."""
    file = path / RESULTS_FILE if path.is_dir() else path
    try:
        return json_record.read(file, dict[str, Any])
    except FileNotFoundError:
        raise UserError(f"{file}: no such file. Name the folder of a sweep of launch/vtab.py.") from None
    except UserError as error:
        raise UserError(f"{error} {_WAY_OUT}") from None


def column_of(name: str, results: dict[str, Any]) -> Column:
    """A sweep's column. Intervals are over seeds if there are at least two, else over test samples."""
    by_task: dict[str, dict[int, dict[str, Any]]] = {}
    for score in results["scores"]:
        by_task.setdefault(score["task"], {})[score["seed"]] = score
    tasks, means = {}, {}
    for task in TASKS:
        if by_seed := by_task.get(task.name):
            tasks[task.name] = _of_task(list(by_seed.values()))
    for mean, names in MEMBERS.items():
        if all(name in tasks for name in names):
            means[mean] = _of_mean([by_task[name] for name in names])
    absent = [task.name for task in TASKS if task.name not in tasks]
    facts = {key: value for key, value in results.items() if key != "scores"}
    return Column(name, tasks, means, absent, {**facts, "details": details(by_task)})


def details(by_task: dict[str, dict[int, dict[str, Any]]]) -> dict[str, str]:
    """Task -> what was chosen, in words; all choices if the seeds differ."""
    choices = {task: {choice_in_words(score) for score in by_seed.values()} for task, by_seed in by_task.items()}
    return {task: "; ".join(sorted(choice - {""})) for task, choice in choices.items()}


def choice_in_words(score: dict[str, Any]) -> str:
    """The setting of a row of results.json: 'lr 0.01, weight decay 0, 2,500 steps, 61.5 % on val200'."""
    formats = {
        "learning_rate": "lr {:g}",
        "weight_decay": "weight decay {:g}",
        "steps": "{:,} steps",
        "l2": "l2 {:g}",
        "neighbours": "neighbours {}",
    }
    words = [text.format(score[name]) for name, text in formats.items() if score.get(name) is not None]
    if score.get("val_accuracy") is not None:
        words.append(f"{100 * score['val_accuracy']:.1f} % on val200")
    return ", ".join(words)


def column_as_published(published: Published) -> Column:
    """A column of the paper. Its means are computed from the tasks' printed scores; intervals are unknown."""
    tasks = {task.name: TableScore(value / 100, None, 0, 0) for task, value in zip(TASKS, published.tasks, strict=True)}
    means = {
        mean: TableScore(float(np.mean([tasks[name].accuracy for name in names])), None, 0, 0)
        for mean, names in MEMBERS.items()
    }
    return Column(published.name, tasks, means, [], {})


def columns(sweeps: Sequence[Path], names: Sequence[str] = ()) -> list[Column]:
    """The sweeps' columns, in the order given, then the paper's. Raises UserError for a sweep that cannot be read."""
    read = [read_results(path) for path in sweeps]
    names = names or [default_name(path, results) for path, results in zip(sweeps, read, strict=True)]
    # Sweeps of the same name get a number.
    unique = [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]
    ours = [column_of(name, results) for name, results in zip(unique, read, strict=True)]
    return [*ours, *map(column_as_published, PAPER)]


def default_name(sweep: Path, results: dict[str, Any]) -> str:
    """Name of the sweep's folder, with the protocol if it is a changed one: the folder may have the published one's
    name.
    """
    folder = sweep if sweep.suffix != ".json" else sweep.parent
    protocol = results["protocol"]["name"]
    changed = f" ({protocol})" if "," in protocol else ""
    return f"{folder.resolve().name}{changed}"


def _of_task(scores: list[dict[str, Any]]) -> TableScore:
    accuracies = [score["accuracy"] for score in scores]
    num_test = scores[0]["num_test"]
    interval = of_seeds(accuracies, num_test) if len(scores) > 1 else of_samples(accuracies[0], num_test)
    return TableScore(float(np.mean(accuracies)), interval, len(scores), num_test)


def _of_mean(tasks: list[dict[int, dict[str, Any]]]) -> TableScore:
    """Unweighted mean over tasks. tasks: seed -> score, of each. The interval is over the seeds' means if all have the
    same.
    """
    means = [np.mean([score["accuracy"] for score in by_seed.values()]) for by_seed in tasks]
    tests = [next(iter(by_seed.values()))["num_test"] for by_seed in tasks]
    seeds = set(tasks[0])
    if len(seeds) > 1 and all(set(by_seed) == seeds for by_seed in tasks):
        of_each = [float(np.mean([by_seed[seed]["accuracy"] for by_seed in tasks])) for seed in sorted(seeds)]
        # The number of images of one task whose accuracy would be rounded as much as the mean of these is.
        num_test = len(tests) / float(np.sqrt((1 / np.square(tests, dtype=np.float64)).sum()))
        interval = of_seeds(of_each, num_test)
    else:
        interval = of_tasks(means, tests)
    return TableScore(float(np.mean(means)), interval, min(map(len, tasks)), sum(tests))
