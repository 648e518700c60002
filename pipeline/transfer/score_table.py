"""Scores of sweeps over VTAB-1k's tasks -> columns of one table, with means that say when they are not whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import json_record
from pipeline.errors import UserError
from pipeline.evaluate.intervals import Interval, of_samples, of_seeds, of_tasks
from pipeline.transfer.published import PAPER, Published
from pipeline.transfer.vtab_tasks import GROUPS, TASKS

OVERALL = "mean of 19 tasks"
RESULTS = "results.json"
_AGAIN = "Run its launch/vtab.py again: that writes the file anew from its cells."


@dataclass(frozen=True)
class _Protocol:
    name: str
    sha256: str


@dataclass(frozen=True)
class _Checkpoint:
    path: str
    sha256: str
    run_id: str | None = None


@dataclass(frozen=True)
class _Failure:
    task: str
    seed: int
    reason: str = ""


@dataclass(frozen=True)
class _Score:
    """accuracy, num_test: what the table is made of. The rest: what was chosen, where it was."""

    task: str
    seed: int
    accuracy: float
    num_test: int
    learning_rate: float | None = None
    weight_decay: float | None = None
    steps: float | None = None
    l2: float | None = None
    neighbours: float | None = None
    val_accuracy: float | None = None


@dataclass(frozen=True)
class _Results:
    """What is read of a results.json; there may be more."""

    protocol: _Protocol
    method: str
    checkpoint: _Checkpoint
    data: dict[str, str]
    contamination: dict[str, int | None] | None
    scores: list[_Score]
    failed: list[_Failure]
    missing: list[str]


@dataclass(frozen=True)
class Cell:
    """One number of the table, a share. interval: None where nothing is known of its spread. num_seeds: 0 as published."""

    accuracy: float
    interval: Interval | None
    num_seeds: int
    num_test: int


@dataclass(frozen=True)
class Column:
    """A model by a protocol. tasks: name -> Cell. means: group or OVERALL -> Cell, of whole ones only.

    absent: names of the tasks without a score, in TASKS' order. facts: what results.json says besides; {} as published.
    """

    name: str
    tasks: dict[str, Cell]
    means: dict[str, Cell]
    absent: list[str]
    facts: dict[str, Any]


def read_results(path: Path) -> dict[str, Any]:
    """results.json of a sweep's folder, or the file itself. Raises UserError for what is no such file."""
    file = path / RESULTS if path.is_dir() else path
    try:
        results = json_record.read(file, dict[str, Any])
        json_record.convert(results, _Results, str(file))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file. Name the folder of a sweep of launch/vtab.py.") from None
    except UserError as error:
        raise UserError(f"{error} {_AGAIN}") from None
    known = {task.name for task in TASKS}
    seen = set()
    for score in results["scores"]:
        if score["task"] not in known:
            raise UserError(f"{file}: {score['task']!r} is none of VTAB's tasks.")
        if not 0 <= score["accuracy"] <= 1 or score["num_test"] < 1:
            raise UserError(
                f"{file}: {score['task']} has accuracy {score['accuracy']} of {score['num_test']} test images."
            )
        cell = score["task"], score["seed"]
        if cell in seen:
            raise UserError(f"{file}: {cell[0]} has two scores of seed {cell[1]}.")
        seen.add(cell)
    return results


def column_of(name: str, results: dict[str, Any]) -> Column:
    """A sweep's column. With at least two seeds intervals are over these, else over test samples."""
    by_task: dict[str, dict[int, dict[str, Any]]] = {}
    for score in results["scores"]:
        by_task.setdefault(score["task"], {})[score["seed"]] = score
    tasks, means = {}, {}
    for task in TASKS:
        if of_seed := by_task.get(task.name):
            tasks[task.name] = _of_task(list(of_seed.values()))
    for mean, names in members().items():
        if all(name in tasks for name in names):
            means[mean] = _of_mean([by_task[name] for name in names])
    absent = [task.name for task in TASKS if task.name not in tasks]
    facts = {key: value for key, value in results.items() if key != "scores"}
    return Column(name, tasks, means, absent, {**facts, "details": details(by_task)})


def details(by_task: dict[str, dict[int, dict[str, Any]]]) -> dict[str, str]:
    """What was chosen for each task, in words; of seeds that differ in it, all of that."""
    found = {task: {choice_in_words(score) for score in of_seed.values()} for task, of_seed in by_task.items()}
    return {task: "; ".join(sorted(ways - {""})) for task, ways in found.items()}


def choice_in_words(score: dict[str, Any]) -> str:
    """What a row of results.json was scored with, in words: 'lr 0.01, weight decay 0, 2,500 steps, 61.5 % on val200'."""
    told = {
        "learning_rate": "lr {:g}",
        "weight_decay": "weight decay {:g}",
        "steps": "{:,} steps",
        "l2": "l2 {:g}",
        "neighbours": "neighbours {}",
    }
    words = [form.format(score[name]) for name, form in told.items() if score.get(name) is not None]
    if score.get("val_accuracy") is not None:
        words.append(f"{100 * score['val_accuracy']:.1f} % on val200")
    return ", ".join(words)


def column_as_published(published: Published) -> Column:
    """A column of the paper's: means as its tasks come to, before they are rounded for print; of no known interval."""
    tasks = {task.name: Cell(value / 100, None, 0, 0) for task, value in zip(TASKS, published.tasks, strict=True)}
    means = {
        mean: Cell(float(np.mean([tasks[name].accuracy for name in names])), None, 0, 0)
        for mean, names in members().items()
    }
    return Column(published.name, tasks, means, [], {})


def columns(sweeps: Sequence[Path], names: Sequence[str] = ()) -> list[Column]:
    """The sweeps' columns, in the order given, then the paper's. Raises UserError for a sweep that cannot be read."""
    found = [read_results(path) for path in sweeps]
    called = names or [default_name(path, results) for path, results in zip(sweeps, found, strict=True)]
    # Two sweeps of one folder name are told apart by their number.
    unique = [name if called.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(called, 1)]
    ours = [column_of(name, results) for name, results in zip(unique, found, strict=True)]
    return [*ours, *map(column_as_published, PAPER)]


def default_name(sweep: Path, results: dict[str, Any]) -> str:
    """That of its folder, which may be a published protocol's; so what was changed of that is said."""
    folder = sweep if sweep.suffix != ".json" else sweep.parent
    protocol = results["protocol"]["name"]
    changed = f" ({protocol})" if "," in protocol else ""
    return f"{folder.resolve().name}{changed}"


def common_tasks(table: Sequence[Column]) -> list[str]:
    """Tasks that every column has, in TASKS' order."""
    return [task.name for task in TASKS if all(task.name in column.tasks for column in table)]


def mean_of(column: Column, names: Sequence[str]) -> float:
    """Unweighted mean over some tasks, which the column has."""
    return float(np.mean([column.tasks[name].accuracy for name in names]))


def members() -> dict[str, list[str]]:
    """Group, or OVERALL -> names of its tasks."""
    groups: dict[str, list[str]] = {group: [task.name for task in TASKS if task.group == group] for group in GROUPS}
    return {**groups, OVERALL: [task.name for task in TASKS]}


def _of_task(scores: list[dict[str, Any]]) -> Cell:
    accuracies = [score["accuracy"] for score in scores]
    num_test = scores[0]["num_test"]
    interval = of_seeds(accuracies) if len(scores) > 1 else of_samples(accuracies[0], num_test)
    return Cell(float(np.mean(accuracies)), interval, len(scores), num_test)


def _of_mean(of_tasks_and_seeds: list[dict[int, dict[str, Any]]]) -> Cell:
    """Unweighted mean over tasks. Its spread is that of each seed's mean, where all tasks have the same seeds."""
    means = [np.mean([score["accuracy"] for score in of_seed.values()]) for of_seed in of_tasks_and_seeds]
    tests = [next(iter(of_seed.values()))["num_test"] for of_seed in of_tasks_and_seeds]
    seeds = set(of_tasks_and_seeds[0])
    if len(seeds) > 1 and all(set(of_seed) == seeds for of_seed in of_tasks_and_seeds):
        interval = of_seeds(
            [float(np.mean([of_seed[seed]["accuracy"] for of_seed in of_tasks_and_seeds])) for seed in sorted(seeds)]
        )
    else:
        interval = of_tasks(means, tests)
    fewest = min(map(len, of_tasks_and_seeds))
    return Cell(float(np.mean(means)), interval, fewest, sum(tests))
