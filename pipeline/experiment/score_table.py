"""Reads results.json of VTAB-1k sweeps into the columns of one table, beside the paper's; no mean over incomplete
groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.page import Table
from pipeline.evaluate.intervals import Interval, of_samples, of_seeds, of_tasks
from pipeline.experiment.published import PAPER, Published
from pipeline.experiment.vtab_tasks import GROUPS, TASKS
from pipeline.settings import schema

TITLES = {task.name: task.title for task in TASKS}
OVERALL = "mean of 19 tasks"
# Group or OVERALL -> names of its tasks.
MEMBERS: dict[str, list[str]] = {
    **{group: [task.name for task in TASKS if task.group == group] for group in GROUPS},
    OVERALL: [task.name for task in TASKS],
}
RESULTS_FILE = "results.json"
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

    facts: the content of results.json; {} for a published column.
    """

    name: str
    tasks: dict[str, TableScore]
    means: dict[str, TableScore]
    facts: dict[str, Any]

    @property
    def unpublished(self) -> list[str]:
        """Names of the scored tasks whose images are not those of the published files."""
        return [name for name in self.facts.get("unpublished", []) if name in self.tasks]

    def mark(self, *names: str) -> str:
        """Stands beside the score of a task or a mean (a key of MEMBERS), or a mean of tasks: † if it is not VTAB's."""
        members = [task for name in names for task in MEMBERS.get(name, [name])]
        return "†" if set(members) & set(self.unpublished) else ""

    def choice(self, task: str) -> str:
        """What was chosen for a task, in words; all choices if the seeds differ."""
        choices = {choice_in_words(score) for score in self.facts["scores"] if score["task"] == task}
        return "; ".join(sorted(choices - {""}))

    # ---------------------------------------------------------------- what a page shows
    def caveats(self) -> Iterator[str]:
        """Lines that say which scores are not VTAB's, and which tasks have none and why."""
        for line in unpublished_warning(self.unpublished):
            yield f"{self.name}: {line}"
        if absent := [name for name in TITLES if name not in self.tasks]:
            reasons = dict.fromkeys(self.facts["missing"], "not prepared")
            reasons |= {cell["task"]: "failed" for cell in self.facts["failed"]}
            listed = ", ".join(f"{TITLES[name]} ({reasons.get(name, 'not run')})" for name in absent)
            yield (
                f"{self.name} is not complete, and a mean over an incomplete group is not shown. Without a score:"
                f" {listed}."
            )

    def origin(self) -> Table:
        """The settings and files that it was made of."""
        shown = ("method", "precision", "micro_batch", "checkpoint", "protocol")
        flat = schema.flatten({name: self.facts[name] for name in shown})
        return Table(["", "value"], [(name, str(value)) for name, value in flat.items()])

    def details(self) -> Table:
        """What was chosen for each task, and the images that it was scored on."""
        rows = []
        for name, score in self.tasks.items():
            copies = self.facts["contamination"].get(name)
            searched = "not searched" if copies is None else f"{copies:,}"
            data = self.facts["data"].get(name, "")[:16]
            rows.append((TITLES[name], self.choice(name), f"{score.num_seeds}", f"{score.num_test:,}", searched, data))
        header = ("task", "chosen", "seeds", "test images", "copies of these in pre-training data", "data fingerprint")
        return Table(header, rows)


def unpublished_warning(tasks: Sequence[str]) -> list[str]:
    """What is said wherever scores of these tasks are shown, or their mean; [] for no task."""
    if not tasks:
        return []
    return [
        "Not VTAB-1k scores, because made from other files than the published ones (†):"
        f" {', '.join(TITLES[name] for name in tasks)}."
    ]


def read_results(path: Path) -> dict[str, Any]:
    """Read results.json; path: the file, or a sweep's folder. Raises UserError when it is missing or damaged."""
    file = path / RESULTS_FILE if path.is_dir() else path
    try:
        return json_record.read(file, dict[str, Any])
    except FileNotFoundError:
        raise UserError(f"{file}: no such file. Name the folder of a sweep of launch/vtab.py.") from None
    except UserError as error:
        raise UserError(f"{error} Run its launch/vtab.py again: that writes the file anew from its cells.") from None


def column_of(name: str, results: dict[str, Any]) -> Column:
    """A sweep's column. Intervals are over seeds if there are at least two, else over test samples."""
    by_task: dict[str, dict[int, dict[str, Any]]] = {}
    for score in results["scores"]:
        by_task.setdefault(score["task"], {})[score["seed"]] = score
    tasks = {task.name: _mean_of([by_task[task.name]]) for task in TASKS if task.name in by_task}
    complete = {mean: names for mean, names in MEMBERS.items() if set(names) <= set(tasks)}
    means = {mean: _mean_of([by_task[name] for name in names]) for mean, names in complete.items()}
    return Column(name, tasks, means, results)


def choice_in_words(score: dict[str, Any]) -> str:
    """What a row of results.json chose: 'learning rate 0.01, weight decay 0, steps 2500, val accuracy 0.615'."""
    names = ("learning_rate", "weight_decay", "steps", "l2", "neighbours", "val_accuracy")
    return ", ".join(f"{name.replace('_', ' ')} {score[name]:g}" for name in names if score.get(name) is not None)


def column_as_published(published: Published) -> Column:
    """A column of the paper. Its means are computed from the tasks' printed scores; intervals are unknown."""
    shares = zip(TASKS, published.tasks, strict=True)
    scores = [{"task": task.name, "seed": 0, "accuracy": value / 100, "num_test": 0} for task, value in shares]
    return replace(column_of(published.name, {"scores": scores}), facts={})


def columns(sweeps: Sequence[Path], names: Sequence[str] = ()) -> list[Column]:
    """The sweeps' columns, in the order given, then the paper's. Raises UserError for a sweep that cannot be read."""
    read = [read_results(path) for path in sweeps]
    names = names or [default_name(path, results) for path, results in zip(sweeps, read, strict=True)]
    # Sweeps of the same name get a number.
    unique = [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]
    return [*map(column_of, unique, read), *map(column_as_published, PAPER)]


def default_name(sweep: Path, results: dict[str, Any]) -> str:
    """Name of the sweep's folder, with the protocol if it is a changed one: the folder may have the published one's
    name.
    """
    folder = sweep if sweep.suffix != ".json" else sweep.parent
    protocol = results["protocol"]["name"]
    return folder.resolve().name + (f" ({protocol})" if "," in protocol else "")


def _mean_of(tasks: list[dict[int, dict[str, Any]]]) -> TableScore:
    """The score of a task, or the unweighted mean of several. tasks: seed -> score, of each.

    The interval is over the seeds' means if all tasks have the same seeds; unknown if the numbers of images are.
    """
    means = [np.mean([score["accuracy"] for score in by_seed.values()]) for by_seed in tasks]
    tests = [next(iter(by_seed.values()))["num_test"] for by_seed in tasks]
    seeds, num_seeds = set(tasks[0]), min(map(len, tasks))
    interval = None
    if not all(tests):
        num_seeds = 0
    elif len(seeds) > 1 and all(set(by_seed) == seeds for by_seed in tasks):
        of_each = [float(np.mean([by_seed[seed]["accuracy"] for by_seed in tasks])) for seed in sorted(seeds)]
        # The number of images of one task whose accuracy would be rounded as much as the mean of these is.
        num_test = len(tests) / float(np.sqrt((1 / np.square(tests, dtype=np.float64)).sum()))
        interval = of_seeds(of_each, num_test)
    elif len(tasks) == 1:
        interval = of_samples(means[0], tests[0])
    else:
        interval = of_tasks(means, tests)
    return TableScore(float(np.mean(means)), interval, num_seeds, sum(tests))
