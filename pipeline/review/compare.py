"""Compares any number of runs: what can be compared, what differs, curves, scores at equal budgets, and what is more
than noise.
"""

import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.files import table_csv
from pipeline.base.page import PngImage, Table, render
from pipeline.base.words import shorten
from pipeline.data.storage.atomic import write_files
from pipeline.evaluate.differences import LEVEL, in_words
from pipeline.evaluate.intervals import of_seeds
from pipeline.process.outputs import hold, try_output
from pipeline.review.budgets import FLOPS, IMAGES, at_equal_budget, curves, in_units
from pipeline.review.reader import read
from pipeline.review.record import RunRecord, best_first
from pipeline.review.statistics import (
    MAX_NAMED,
    Pair,
    Records,
    by_evaluation,
    comparable,
    contenders,
    listed,
    pairs_of,
    scored_on,
)
from pipeline.review.table import as_parquet, differences, row, settings_of_kinds
from pipeline.settings.commands.reports import CompareConfig

_TEMPLATE = Path(__file__).parent / "templates" / "comparison.j2"
# With more runs, a table of what differs has a row for each run, not a column.
_MAX_COLUMNS = 6
_MAX_PAIRS = 30
# Length of the folder's name; file systems allow 255 bytes.
_MAX_CHARACTERS = 60
# Said of a report where there was one: the folder is by default named after runs, and others may have the same names.
REPLACED = " (the earlier one there is replaced)"
# Budgets of two runs whose ratio is nearer to 1 count as the same.
_SAME_BUDGET = 0.01
# Columns of `row` that the page shows, by section.
_RUN = (
    "kind",
    "model",
    "data",
    "status",
    "steps",
    "planned_steps",
    "images_seen",
    "exaflops",
    "images_per_second",
    "device_seconds",
)
_DATA = (
    "fingerprint",
    "mixed_with",
    "excluded",
    "evaluation_split",
    "evaluation_fingerprint",
    "parent",
    "parent_sha256",
    "teacher",
)
_CODE = ("revision", "git_branch", "command", "torch", "device", "user", "ranks")


def run(config: CompareConfig) -> dict[str, RunRecord]:
    """Write the comparison of `config.runs` and print its table; returns the runs by their names in it.

    Raises UserError for an address that is not a run, and for damaged files, before anything is written.
    """
    found = [read(address) for address in config.runs]
    for (address, one), (again, other) in itertools.combinations(zip(config.runs, found, strict=True), 2):
        if one.folder.resolve() == other.folder.resolve():
            raise UserError(f"runs: {address} and {again} are the same run. Leave out one of them.")
    records = named(found)
    folder = Path(config.out) if config.out else Path("runs") / "compare" / _folder_name(list(records))
    try_output("out", folder, holds="comparison")
    hold(folder)
    groups = groups_of(records)
    pairs = [_pair_row(pair) for group in groups for pair in group.pairs]
    files: dict[str, bytes | str | None] = {
        # First: with report.html alone, the folder would be one of launch/report.py.
        "runs.parquet": as_parquet(records),
        "pairs.csv": table_csv(pairs) if pairs else None,
        **page(records, groups, curves(records)),
    }
    is_replaced = (folder / "report.html").exists()
    write_files(folder, files, mark="report.html")
    for line in summary(records, groups):
        print(line)
    print(f"comparison: {folder / 'report.html'}{REPLACED * is_replaced}")
    return records


def named(records: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """Runs by name. Runs of the same name also get the name of the folder around theirs, or a number."""
    names = [record.name for record in records]
    found: dict[str, RunRecord] = {}
    for record in records:
        name = record.name
        if names.count(name) > 1:
            name = f"{name} ({record.folder.resolve().parent.name})"
        number = 2
        while name in found:
            name, number = f"{record.name} ({number})", number + 1
        found[name] = record
    return found


def _folder_name(names: Sequence[str]) -> str:
    """The name of a folder for runs, whose names may hold anything."""
    full_name = "-".join(names) if len(names) < 4 else f"{names[0]}-and-{len(names) - 1}-others"
    return re.sub(r"[^\w.+-]", "_", full_name)[:_MAX_CHARACTERS]


@dataclass(frozen=True)
class Group:
    """Runs that were scored by the same measure on the same images, and the test of each pair."""

    records: Records
    pairs: list[Pair]

    @property
    def of_seeds(self) -> str:
        """The mean of runs that differ in nothing but their seed, in words; "" for others."""
        found = contenders(self.records)
        if len(self.records) == 1 or [len(of.names) for of in found] != [len(self.records)]:
            return ""
        interval = of_seeds(found[0].values, found[0].num_samples)
        return (
            f"{listed(found[0].names, MAX_NAMED)} differ in their seed only, so there is no difference of settings to"
            f" test: mean {100 * found[0].mean:.2f} %, 95 % interval over seeds {100 * interval.low:.2f} to"
            f" {100 * interval.high:.2f}."
        )

    @property
    def title(self) -> str:
        return scored_on(next(iter(self.records.values())))

    def ranking(self) -> Table:
        """The runs by their last score, and their scores at equal budgets."""
        scored = {name: record.last_score for name, record in self.records.items()}
        header, rows = (
            ["run", "last score", "step"],
            {name: [name, str(score), shown(score and score.step)] for name, score in scored.items()},
        )
        for axis in (IMAGES, FLOPS):
            budget, found = at_equal_budget(self.records, axis)
            if found:
                header.append(f"score within {in_units(budget, axis)}")
                for name, score in found.items():
                    rows[name].append(f"{score}, step {shown(score.step)}" if score else "–")
        return Table(header, [rows[name] for name in sorted(rows, key=lambda name: best_first(scored[name]))])

    def noise(self) -> Table:
        """The test of each pair, or of many those with the best run."""
        pairs = self.pairs
        if len(pairs) > _MAX_PAIRS:
            pairs = [pair for pair in pairs if pair.first is pairs[0].first]
        header = ("better", "than", "by, points", "95 % interval", "p", "p, corrected", "verdict", "test")
        rows = [
            (
                pair.first.title,
                pair.second.title,
                f"{100 * d.value:+.2f}",
                f"{100 * d.low:+.2f} to {100 * d.high:+.2f}",
                _p(d.p),
                _p(pair.corrected),
                in_words(d, pair.corrected) + _budget(pair),
                d.method,
            )
            for pair in pairs
            for d in [pair.difference]
        ]
        return Table(header, rows)

    @property
    def untested(self) -> list[str]:
        tested = {name for pair in self.pairs for name in (*pair.first.names, *pair.second.names)}
        return [name for name in self.records if name not in tested]


def groups_of(records: Records) -> list[Group]:
    """The groups of runs whose scores can be compared."""
    groups = [{name: records[name] for name in names} for names in by_evaluation(records).values()]
    return [Group(group, pairs_of(contenders(group))) for group in groups]


def summary(records: Records, groups: Sequence[Group]) -> Iterator[str]:
    """Lines for the terminal: each run with its last score, and the best of each group beside the others."""
    for name, record in records.items():
        score = record.last_score
        yield f"{shorten(name, 40):<40} {record.status:<9} {f'{score.name} {score}' if score else 'no score'}"
    yield from filter(None, (group.of_seeds for group in groups))
    for pair in (pair for group in groups for pair in group.pairs if pair.first is group.pairs[0].first):
        d = pair.difference
        yield (
            f"{pair.first.title} over {pair.second.title}{_budget(pair)}: {100 * d.value:+.2f} points"
            f" ({100 * d.low:+.2f} to {100 * d.high:+.2f}), corrected p {_p(pair.corrected)}:"
            f" {in_words(d, pair.corrected)}"
        )


def page(records: Records, groups: Sequence[Group], pictures: Sequence[PngImage]) -> dict[str, bytes | str | None]:
    """The files of the comparison's page."""
    rows = {name: row(name, record) for name, record in records.items()}

    def chosen(columns: Sequence[str]) -> dict[str, dict[str, str]]:
        return {run: {column.replace("_", " "): shown(of[column]) for column in columns} for run, of in rows.items()}

    scores = {
        name: {
            "last score": str(r.last_score or "–"),
            "best score": str(r.best_score or "–"),
            "ended": when(r.period[1]),
        }
        for name, r in records.items()
    }
    of_runs, of_others = settings_of_kinds(records).values()
    sections = {
        "Runs": {name: of_run | scores[name] for name, of_run in chosen(_RUN).items()},
        "Settings": of_runs,
        "Settings of evaluations and other reports": of_others,
        "Data": chosen(_DATA),
        "Code": chosen(_CODE),
    }
    return render(
        _TEMPLATE,
        f"Comparison of {listed(list(records), 4)}",
        pictures,
        lines=list(comparable(records, [list(group.records) for group in groups])),
        groups=[group for group in groups if len(group.records) > 1],
        level=LEVEL,
        sections={title: _differing(values) for title, values in sections.items() if len(values) > 1},
    )


def _differing(values: Mapping[str, Mapping[str, Any]]) -> tuple[str, Table | None]:
    """Returns (what is known and the same of all runs, a table of what differs if anything does). values: run -> name
    -> value.
    """
    rows = differences(values)
    differ = [name for name, *_ in rows]
    of_first = next(iter(values.values()))
    same = "; ".join(f"{name} {value}" for name, value in of_first.items() if value != "–" and name not in differ)
    if not rows:
        return same, None
    if len(values) <= _MAX_COLUMNS:
        return same, Table(("", *values), rows)
    return same, Table(("run", *differ), list(zip(values, *(of_runs for _, *of_runs in rows), strict=True)))


def shown(value: Any) -> str:
    """A value of a row as pages show it."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def when(seconds: float) -> str:
    """A time in words, UTC."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else "–"


def _budget(pair: Pair) -> str:
    """Budget of the better of two runs, such as ", with 2.5 times the images and 2.5 times the FLOPs"; "" if equal."""
    told = []
    for name, amount in (("images", lambda record: record.images_seen), ("FLOPs", lambda record: record.exaflops)):
        first, second = (amount(of.records[0]) for of in (pair.first, pair.second))
        if first and second and abs(first / second - 1) > _SAME_BUDGET:
            told.append(f"{first / second:.3g} times the {name}")
    return f", with {' and '.join(told)}" if told else ""


def _p(value: float) -> str:
    return "<0.0001" if value < 0.0001 else f"{value:.4f}"


def _pair_row(pair: Pair) -> dict[str, Any]:
    tested = {"p_corrected": pair.corrected, "verdict": in_words(pair.difference, pair.corrected)}
    return {"first": pair.first.title, "second": pair.second.title, **asdict(pair.difference), **tested}
