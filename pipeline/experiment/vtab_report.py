"""The table of VTAB-1k sweeps, from their results.json, and the report of a sweep, beside the scores published in the
ViT paper (arXiv 2010.11929, version 2). No mean over incomplete groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.base.page import Paragraph, Table, markdown, render
from pipeline.base.trained_on import TRAINED_BY, not_held_out
from pipeline.evaluate.intervals import Interval, of_samples, of_seeds, of_tasks
from pipeline.experiment.table import TEMPLATES
from pipeline.experiment.vtab_tasks import GROUPS, TASKS
from pipeline.settings.yaml_reader import read_table

TITLES = {task.name: task.title for task in TASKS}
OVERALL = "mean of 19 tasks"
# Group or OVERALL -> names of its tasks.
MEMBERS: dict[str, list[str]] = {
    **{group: [task.name for task in TASKS if task.group == group] for group in GROUPS},
    OVERALL: [task.name for task in TASKS],
}


@dataclass(frozen=True)
class Published:
    """A column of Table 9 (vtab_report.yaml). tasks: per cent, in the order of the table and of vtab_tasks.TASKS.

    mean: of all 19, from Table 9. mean_of_runs, deviation: over 3 runs, from the VTAB row of Table 2.
    """

    name: str
    tasks: tuple[float, ...]
    mean: float
    mean_of_runs: float
    deviation: float


PAPER = read_table(__file__, tuple[Published, ...])


@dataclass(frozen=True)
class TableScore:
    """A score of the table, a share. interval: None if its spread is unknown. num_test: 0 for published scores."""

    accuracy: float
    interval: Interval | None
    num_test: int


@dataclass(frozen=True)
class Column:
    """A model's scores by a protocol. means: group or OVERALL -> mean, for complete groups only.

    facts: the content of results.json; of a published column, its scores alone.
    """

    name: str
    tasks: dict[str, TableScore]
    means: dict[str, TableScore]
    facts: dict[str, Any]

    @property
    def unpublished(self) -> list[str]:
        """Names of the scored tasks whose images are not those of the published files."""
        return [name for name in self.facts.get("unpublished", []) if name in self.tasks]

    def mark(self, name: str) -> str:
        """Stands beside the score of a task or a mean (a key of MEMBERS): † if it is not VTAB's."""
        return "†" if set(MEMBERS.get(name, [name])) & set(self.unpublished) else ""

    def caveats(self) -> Iterator[str]:
        """Lines that say which scores are not VTAB's, and which tasks have none and why."""
        for line in unpublished_warning(self.unpublished):
            yield f"{self.name}: {line}"
        for name, runs in self.facts.get(TRAINED_BY, {}).items():
            yield f"{self.name}, {TITLES[name]}: {not_held_out('test', runs)}."
        if absent := [name for name in TITLES if name not in self.tasks]:
            reasons = dict.fromkeys(self.facts["missing"], "not prepared")
            reasons |= {cell["task"]: "failed" for cell in self.facts["failed"]}
            listed = ", ".join(f"{TITLES[name]} ({reasons.get(name, 'not run')})" for name in absent)
            yield (
                f"{self.name} is not complete, and a mean over an incomplete group is not shown. Without a score:"
                f" {listed}."
            )


def unpublished_warning(tasks: Sequence[str]) -> list[str]:
    """What is said wherever scores of these tasks are shown, or their mean; [] for no task."""
    listed = ", ".join(TITLES[name] for name in tasks)
    return [f"Not VTAB-1k scores, because made from other files than the published ones (†): {listed}."] * bool(tasks)


def column_of(name: str, results: dict[str, Any]) -> Column:
    """A sweep's column. Intervals are over seeds if there are at least two, else over test samples."""
    by_task: dict[str, dict[int, dict[str, Any]]] = {}
    for score in results["scores"]:
        by_task.setdefault(score["task"], {})[score["seed"]] = score
    tasks = {task.name: _mean_of([by_task[task.name]]) for task in TASKS if task.name in by_task}
    complete = {mean: names for mean, names in MEMBERS.items() if set(names) <= set(tasks)}
    means = {mean: _mean_of([by_task[name] for name in names]) for mean, names in complete.items()}
    return Column(name, tasks, means, results)


def column_as_published(published: Published) -> Column:
    """A column of the paper. Its means are computed from the tasks' printed scores; intervals are unknown."""
    shares = zip(TASKS, published.tasks, strict=True)
    scores = [{"task": task.name, "seed": 0, "accuracy": value / 100, "num_test": 0} for task, value in shares]
    return column_of(published.name, {"scores": scores})


def _mean_of(tasks: list[dict[int, dict[str, Any]]]) -> TableScore:
    """The score of a task, or the unweighted mean of several. tasks: seed -> score, of each.

    The interval is over the seeds' means if all tasks have the same seeds; unknown if the numbers of images are.
    """
    means = [np.mean([score["accuracy"] for score in by_seed.values()]) for by_seed in tasks]
    tests = [next(iter(by_seed.values()))["num_test"] for by_seed in tasks]
    seeds = set(tasks[0])
    if not all(tests):
        interval = None
    elif len(seeds) > 1 and all(set(by_seed) == seeds for by_seed in tasks):
        of_each = [float(np.mean([by_seed[seed]["accuracy"] for by_seed in tasks])) for seed in sorted(seeds)]
        # The number of images of one task whose accuracy would be rounded as much as the mean of these is.
        num_test = len(tests) / float(np.sqrt((1 / np.square(tests, dtype=np.float64)).sum()))
        interval = of_seeds(of_each, num_test)
    elif len(tasks) == 1:
        interval = of_samples(means[0], tests[0])
    else:
        interval = of_tasks(means, tests)
    return TableScore(float(np.mean(means)), interval, sum(tests))


# -------------------------------------------------------------------- the report
def summary(column: Column) -> str:
    """The scores of a sweep, with its caveats, as Markdown."""
    return markdown(column.name, [*map(Paragraph, column.caveats()), score_table([column])])


def page(column: Column) -> dict[str, bytes | str | None]:
    """The files of the report of a sweep, beside the paper's scores."""
    table = score_table([column, *map(column_as_published, PAPER)])
    return render(TEMPLATES / "vtab.j2", f"VTAB-1k: {column.name}", table=table, columns=[column], paper=PAPER)


def score_table(table: Sequence[Column]) -> Table:
    """Tasks by group, each with its mean; and the overall mean."""
    rows: list[list[str]] = []
    bold = set()
    for mean, members in MEMBERS.items():
        if mean in GROUPS:
            rows += [[TITLES[name], *(_text(column, name) for column in table)] for name in members]
        bold.add(len(rows))
        title = f"{mean} (mean of {len(members)})" if mean in GROUPS else mean
        rows.append([title, *(_text(column, mean) for column in table)])
    return Table(["task", *(column.name for column in table)], rows, frozenset(bold))


def _text(column: Column, name: str) -> str:
    """A score of a task, or a mean, with its interval. Scores of other files than the published ones are marked."""
    members = MEMBERS.get(name)
    digits = 2 if members else 1
    if score := (column.tasks | column.means).get(name):
        found = score.interval
        spread = f" [{100 * found.low:.{digits}f}, {100 * found.high:.{digits}f}]" if found else ""
        return f"{100 * score.accuracy:.{digits}f}{column.mark(name)}{spread}"
    return f"– ({sum(task in column.tasks for task in members)} of {len(members)})" if members else "–"


def metrics_of(column: Column) -> dict[str, float]:
    """Accuracies of tasks and means, for a tracker."""
    metrics = {f"task_{name}": score.accuracy for name, score in column.tasks.items()}
    for name, score in column.means.items():
        metrics[f"vtab_{'mean' if name == OVERALL else name}"] = score.accuracy
    return metrics | {"tasks_scored": len(column.tasks)}


def tags_of(facts: dict[str, Any]) -> dict[str, str]:
    """Tags that say what a sweep was made of. facts: content of its results.json."""
    return {
        "protocol": facts["protocol"]["name"],
        "protocol_sha256": facts["protocol"]["sha256"],
        "method": facts["method"],
        "checkpoint": str(facts["checkpoint"]["path"]),
        "checkpoint_sha256": str(facts["checkpoint"]["sha256"]),
        "not_published_files": ",".join(facts["unpublished"]),
    }
