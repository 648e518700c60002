"""Compares any number of runs: what can be compared, what differs, curves, and what is more than noise."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.base.files import table_csv
from pipeline.base.page import PngImage, Table, render
from pipeline.base.words import aligned, first_of, shorten
from pipeline.data.storage.atomic import write_files
from pipeline.evaluate.differences import LEVEL, in_words
from pipeline.evaluate.intervals import of_seeds
from pipeline.experiment.table import TEMPLATES
from pipeline.experiment.vtab_report import score_table
from pipeline.process.outputs import hold, try_output
from pipeline.review.curves import curves
from pipeline.review.record import RunRecord, Score, best_first, from_folder
from pipeline.review.statistics import (
    Contender,
    Pair,
    Records,
    by_evaluation,
    comparable,
    contenders,
    pairs_of,
    scored_on,
)
from pipeline.review.table import differences, parquet, row, settings_that_differ
from pipeline.settings.commands.reports import CompareConfig

_TEMPLATE = Path(__file__).parent / "templates" / "comparison.j2"
_MAX_PAIRS = 30
# Length of the folder's name; file systems allow 255 bytes.
_MAX_CHARACTERS = 60


def run(config: CompareConfig) -> dict[str, RunRecord]:
    """Write the comparison of `config.runs` and print its table; returns the runs by their names in it.

    Raises UserError for an address that is not a run, and for damaged files, before anything is written.
    """
    records = named([from_folder(Path(address)) for address in config.runs])
    names = list(records)
    joined = "-".join(names) if len(names) < 4 else f"{names[0]}-and-{len(names) - 1}-others"
    # Names of runs may hold anything.
    own = re.sub(r"[^\w.+-]", "_", joined)[:_MAX_CHARACTERS]
    folder = Path(config.out or f"runs/compare/{own}")
    try_output("out", folder, holds="comparison")
    hold(folder)
    groups = groups_of(records)
    pairs = [_pair_row(pair) for group in groups for pair in group.pairs]
    files: dict[str, bytes | str | None] = {
        # First: with report.html alone, the folder would be one of launch/report.py.
        "runs.parquet": parquet(records),
        "pairs.csv": table_csv(pairs) if pairs else None,
        **page(records, groups, curves(records)),
    }
    write_report(folder, files, ["comparison", *summary(records, groups)])
    return records


def write_report(folder: Path, files: Mapping[str, bytes | str | None], told: Sequence[str]) -> Path:
    """Write a report, and print what it is (told: kind, lines) and where; returns its HTML file."""
    file = folder / "report.html"
    write_files(folder, files, mark=file.name)
    print(*told[1:], f"{told[0]}: {file}", sep="\n")
    return file


def named(records: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """Runs by name, or by folder where several have the same name. A run that is given twice is there once."""
    names = Counter(record.name for record in records)
    return {record.name if names[record.name] == 1 else str(record.folder): record for record in records}


@dataclass(frozen=True)
class Group:
    """Runs that were scored by the same measure on the same images, and the test of each pair."""

    records: Records
    contenders: list[Contender]
    pairs: list[Pair]

    @property
    def of_seeds(self) -> str:
        """The mean of runs that differ in nothing but their seed, in words; "" for others."""
        if len(self.records) == 1 or [len(of.names) for of in self.contenders] != [len(self.records)]:
            return ""
        (found,) = self.contenders
        interval = of_seeds(found.values, found.num_samples, found.metric.is_share)
        in_brackets = found.metric.interval_text(interval.low, interval.high)
        return (
            f"{first_of(found.names, 12)} differ in their seed only, so there is no difference to test: mean"
            f" {found.metric.text(found.mean)}, 95 % interval over seeds{in_brackets}."
        )

    @property
    def title(self) -> str:
        return scored_on(next(iter(self.records.values())))[1]

    @property
    def ranked(self) -> list[tuple[str, Score]]:
        """The runs with their last score, the best first."""
        scored = [(name, record.last_score) for name, record in self.records.items() if record.last_score]
        return sorted(scored, key=lambda run: best_first(run[1]))

    def ranking(self) -> Table:
        scores = dict(self.ranked)
        rows = [(name, str(score), shown(score.step)) for name, score in scores.items()]
        return Table(("run", f"last {scores[next(iter(self.records))].name}", "step"), rows)

    def noise(self) -> Table:
        """The test of each pair, or of many those with the best run."""
        pairs = self.pairs if len(self.pairs) <= _MAX_PAIRS else self.pairs_of_best
        by = "by, points" if all(of.metric.is_share for of in self.contenders) else "by"
        header = ("better", "than", by, "95 % interval", "p", "p, corrected", "verdict", "test")
        return Table(header, [_told(pair) for pair in pairs])

    @property
    def pairs_of_best(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.first is self.pairs[0].first]


def groups_of(records: Records) -> list[Group]:
    """The groups of runs whose scores can be compared."""
    groups = [{name: records[name] for name in names} for names in by_evaluation(records).values()]
    return [Group(group, found := contenders(group), pairs_of(found)) for group in groups]


def summary(records: Records, groups: Sequence[Group]) -> Iterator[str]:
    """Lines for the terminal: each run with its last score, and the best of each group beside the others."""
    rows = [("run", "status", "kind of score", "score")]
    for name, record in by_kind(records, groups).items():
        score = record.last_score
        rows.append((shorten(name, 40), record.status, *((score.name, str(score)) if score else ("–", "–"))))
    yield from aligned(rows)
    yield from claims(groups)


def by_kind(records: Records, groups: Sequence[Group]) -> dict[str, RunRecord]:
    """The runs, those whose scores compare together and the best of them first; those without a score last."""
    scored = [name for group in groups for name, _ in group.ranked]
    return {name: records[name] for name in [*scored, *records]}


def claims(groups: Sequence[Group]) -> Iterator[str]:
    """What can be said of the best run of each group beside the others."""
    yield from filter(None, (group.of_seeds for group in groups))
    for pair in (pair for group in groups for pair in group.pairs_of_best):
        better, than, by, interval, _, corrected, verdict, _ = _told(pair)
        unit = " points" * pair.first.metric.is_share
        yield f"{better} over {than}: {by}{unit} ({interval}), corrected p {corrected}: {verdict}"


def page(records: Records, groups: Sequence[Group], pictures: Sequence[PngImage]) -> dict[str, bytes | str | None]:
    """The files of the comparison's page."""
    rows = {name: row(name, record) for name, record in by_kind(records, groups).items()}
    sections = {
        section: {
            name: {column.replace("_", " "): shown(value) for column, value in known[section].items()}
            for name, known in rows.items()
        }
        for section in ("Runs", "Data", "Code")
    }
    sections["Settings"] = settings_that_differ(records)
    for name, told in sections["Runs"].items():
        last = records[name].last_score
        scores = {"kind of score": last.name if last else "–", "last score": str(last or "–")}
        told |= scores | {"ended": when(records[name].period[1])}
    sweeps = [replace(record.sweep, name=name) for name, record in records.items() if record.sweep]
    return render(
        _TEMPLATE,
        f"Comparison of {first_of(list(records), 3)}",
        pictures,
        TEMPLATES,
        sweeps=sweeps,
        sweep_scores=score_table(sweeps) if sweeps else None,
        claims=list(claims(groups)),
        lines=list(comparable(records, [list(group.records) for group in groups])),
        groups=[group for group in groups if len(group.records) > 1],
        level=LEVEL,
        sections={title: Table(("", *values), differences(values)) for title, values in sections.items()},
    )


def shown(value: Any) -> str:
    """A value of a row as pages show it."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def when(seconds: float) -> str:
    """A time in words, UTC."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else "–"


def _told(pair: Pair) -> tuple[str, ...]:
    """A pair as tables show it."""
    d = pair.difference
    form, scale = ("+.2f", 100) if pair.first.metric.is_share else ("+.4f", 1)
    points = [format(scale * value, form) for value in (d.value, d.low, d.high)]
    p, corrected = ("<0.0001" if value < 0.0001 else f"{value:.4f}" for value in (d.p, pair.corrected))
    verdict = in_words(d, pair.corrected)
    interval = f"{points[1]} to {points[2]}"
    return pair.first.title, pair.second.title, points[0], interval, p, corrected, verdict, d.method


def _pair_row(pair: Pair) -> dict[str, Any]:
    tested = {"p_corrected": pair.corrected, "verdict": in_words(pair.difference, pair.corrected)}
    return {"first": pair.first.title, "second": pair.second.title, **asdict(pair.difference), **tested}
