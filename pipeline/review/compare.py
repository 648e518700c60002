"""Compares any number of runs: what can be compared, what differs, curves, scores at equal budgets, and what is more than noise."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base.errors import UserError
from pipeline.base.files import table_csv
from pipeline.base.page import Block, Heading, Paragraph, PngImage, Table, report
from pipeline.base.words import counted, shorten
from pipeline.data.storage.atomic import write_files
from pipeline.evaluate.differences import GROUPED, LEVEL, MCNEMAR, PROPORTIONS, STUDENT, in_words
from pipeline.evaluate.intervals import of_seeds
from pipeline.monitor.run_page import TEACHER_TAG, DatasetFacts
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
from pipeline.settings.commands.reports import CompareConfig

# With more runs, a table has no column for each: it lists the runs of each value.
_MAX_COLUMNS = 6
_MAX_PAIRS = 30
# The longest name of a comparison's folder; file systems allow 255 bytes.
_MAX_FOLDER_NAME = 120
# With fewer log lines the median says little, because the first ones are slow.
_MIN_SPEEDS = 5
# Said of a report where there was one: the folder is by default named after runs, and others may have the same names.
REPLACED = " (the earlier one there is replaced)"
# Budgets of two runs whose ratio is nearer to 1 count as the same.
_SAME_BUDGET = 0.01
# Settings that are names and places, not differences.
PLACES = ("name", "out", "track.uri", "launch.env")
_METHODS = {
    PROPORTIONS: "Two proportions: p is of the pooled z-test, the interval Newcombe's. Scores on the same images vary together, which "
    "this test ignores: it finds too few differences rather than too many.",
    MCNEMAR: "McNemar's test counts the images on which only one of the two is right; the interval is Bonett and Price's.",
    GROUPED: "The images are in groups that are alike, such as those of a patient: Student's t is of what the groups add to the difference.",
    STUDENT: "Student's t compares the means over seeds, with a common variance, also of a single run; what is more than noise of the seeds on these images may "
    "still be noise on others, with many seeds as with few.",
}


def run(config: CompareConfig) -> dict[str, RunRecord]:
    """Write the comparison of `config.runs` and print its table; returns the runs by their names in it.

    Raises UserError for an address that is no run, and for damaged files, before anything is written.
    """
    found = [read(address) for address in config.runs]
    _refuse_twice(config.runs, found)
    records = named(found)
    folder = Path(config.out) if config.out else Path("runs") / "compare" / folder_name(list(records))
    try_output("out", folder, holds="comparison")
    hold(folder)
    for record in records.values():
        for problem in record.problems:
            print(f"{record.address}: {problem}")
    pictures = curves(records)
    groups = groups_of(records)
    blocks = list(page(records, groups, pictures))
    pairs = [_pair_row(pair) for group in groups for pair in group.pairs]
    files: dict[str, bytes | str | None] = {
        # First: with report.html alone, the folder would be one of launch/report.py.
        "table.csv": table_csv([table_row(name, record) for name, record in records.items()]),
        "pairs.csv": table_csv(pairs) if pairs else None,
        **report(f"Comparison of {listed(list(records), 4)}", blocks),
    }
    is_replaced = (folder / "report.html").exists()
    write_files(folder, files, mark="report.html")
    for line in summary(records, groups):
        print(line)
    print(f"comparison: {folder / 'report.html'}{REPLACED * is_replaced}")
    return records


def _refuse_twice(addresses: Sequence[str], records: Sequence[RunRecord]) -> None:
    """Raise UserError for one folder by two names."""
    for (other, before), (address, record) in itertools.combinations(zip(addresses, records, strict=True), 2):
        if record.folder.resolve() == before.folder.resolve():
            raise UserError(f"runs: {other} and {address} are the same run. Leave out one of them.")


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


def summary(records: Records, groups: Sequence["Group"]) -> Iterator[str]:
    """Lines for the terminal: each run with its last score, named where runs have several; the best of each group beside the others."""
    scores = [record.last_score for record in records.values()]
    names = {score.name for score in scores if score}
    for (name, record), score in zip(records.items(), scores, strict=True):
        what = f"{score.name} " if score and len(names) > 1 else ""
        yield f"{shorten(name, 40):<40} {record.status:<9} {what}{score or 'no score'}"
    yield from filter(None, (group.of_seeds for group in groups))
    for pair in (pair for group in groups for pair in group.pairs if pair.first is group.pairs[0].first):
        d = pair.difference
        yield f"{pair.first.title} over {pair.second.title}{_budget(pair)}: {100 * d.value:+.2f} points ({100 * d.low:+.2f} to {100 * d.high:+.2f}), corrected p {_p(pair.corrected)}: {in_words(d, pair.corrected)}"


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
            f"{listed(found[0].names, MAX_NAMED)} differ in their seed only, so there is no difference of settings to test: mean "
            f"{100 * found[0].mean:.2f} %, 95 % interval over seeds {100 * interval.low:.2f} to {100 * interval.high:.2f}."
        )


def groups_of(records: Records) -> list[Group]:
    """The groups of runs whose scores can be compared."""
    groups = [{name: records[name] for name in names} for names in by_evaluation(records).values()]
    return [Group(group, pairs_of(contenders(group))) for group in groups]


def page(records: Records, groups: Sequence[Group], pictures: Sequence[PngImage]) -> Iterator[Block]:
    """The blocks of the comparison."""
    yield Heading("What can be compared")
    for line in comparable(records, [list(group.records) for group in groups]):
        yield Paragraph(line)
    for name, record in records.items():
        if record.problems:
            yield Paragraph(f"Of {name}, {'; '.join(record.problems).rstrip('.')}.")
    yield Heading("Runs")
    rows = [_shown(table_row(name, record), record) for name, record in records.items()]
    # A column that says the same of all runs is one phrase.
    same = [column for column in rows[0] if column != "run" and len({row[column] for row in rows}) == 1]
    if same:
        yield Paragraph(f"The same for all: {'; '.join(f'{column} {rows[0][column]}' for column in same)}.")
    header = [column for column in rows[0] if column not in same]
    scores = [record.last_score for record in records.values()]
    of_groups = ", or their groups where they have some" * any(
        score and score.effective < score.num_samples for score in scores
    )
    yield Table(header, [[row[column] for column in header] for row in rows])
    yield Paragraph(
        f"Brackets are 95 % intervals: Wilson's over the images of one run{of_groups}, which says nothing of other seeds; Student's t over seeds, "
        "which says nothing of other images. Compute is the time of training steps times the number of ranks."
        + " The best score is chosen on the images that score it, so it is a little too good."
        * any(row["best score"] not in ("the last", "–") for row in rows)
    )
    for group in groups:
        if len(group.records) > 1:
            yield from _ranking(group.records)
            yield from _noise(group.pairs)
            yield from _untested(group)
            yield from _budgets(group.records)
    if pictures:
        yield Heading("Curves")
        yield from pictures
    yield Heading("Differing settings")
    yield from _settings(records)
    yield Heading("Data")
    yield from _facts("data", {name: data_facts(record) for name, record in records.items()})
    yield Heading("Code")
    yield from _facts("code", {name: code_facts(record) for name, record in records.items()})


# ---------------------------------------------------------------------- tables
def table_row(name: str, record: RunRecord) -> dict[str, Any]:
    """One run's row of table.csv; unknown values are empty."""
    last, best = record.last_score, record.best_score
    train, held_out = record.dataset("training"), record.dataset("evaluation")
    row: dict[str, Any] = {
        "run": name,
        "address": record.address,
        "mlflow_run_id": record.run_id or "",
        "kind": record.kind,
        "model": record.model,
        "data": record.data_name,
        "fingerprint": train.digest if train else "",
        "evaluation_split": record.split,
        "evaluation_fingerprint": held_out.digest if held_out else "",
        "status": record.status,
        "outcome": record.outcome,
        "steps": record.last_step or "",
        "planned_steps": record.steps or "",
        "images_seen": record.images_seen or "",
        "exaflops": record.exaflops or "",
        "images_per_second": median_speed(record)[0] or "",
        "training_seconds": record.training_seconds or "",
        "ranks": record.ranks or "",
        "device": record.tags.get("device", ""),
        "revision": record.revision,
        "ended": record.period[1] or "",
    }
    for kind, score in (("last", last), ("best", best)):
        interval = score.interval if score else None
        row |= {
            f"{kind}_score": "" if score is None else score.value,
            f"{kind}_low": interval.low if interval else "",
            f"{kind}_high": interval.high if interval else "",
            f"{kind}_step": "" if score is None or score.step is None else score.step,
        }
    return {**row, "score": last.name if last else "", "score_images": last.num_samples if last else ""}


def _shown(row: Mapping[str, Any], record: RunRecord) -> dict[str, str]:
    """One run's row of the page: column -> text."""
    last, best = record.last_score, record.best_score
    steps = f"{row['steps']:,}" if row["steps"] else "–"
    compute = f"{record.training_seconds * max(1, record.ranks):,.0f} s" if record.training_seconds else "–"
    devices = f" ({record.ranks} × {row['device'] or 'rank'})" if record.ranks and record.training_seconds else ""
    at_best = f", step {best.step:,}" if best and best.step is not None else ""
    is_last = last is not None and best is not None and best.step == last.step
    return {
        "run": row["run"],
        "kind": record.kind,
        "model": record.model or "–",
        "data": row["data"] or "–",
        "status": record.status or "–",
        "steps": f"{steps} of {record.steps:,}" if record.steps else steps,
        "images seen": f"{record.images_seen:,}" if record.images_seen else "–",
        "FLOPs": in_units(record.exaflops * 1e18, FLOPS) if record.exaflops else "–",
        "images/s": speed(record),
        "compute": compute + devices,
        "last score": str(last or "–"),
        "best score": "the last" if is_last else f"{best}{at_best}" if best else "–",
        "ended": when(record.period[1]),
    }


def when(seconds: float) -> str:
    """A time in words, UTC."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else "–"


def median_speed(record: RunRecord) -> tuple[float, int]:
    """Returns (median training speed in images/s, number of log lines); (0, n) for fewer than five lines."""
    speeds = record.metrics.get("images_per_second")
    count = len(speeds) if speeds else 0
    return (float(np.median(speeds.values)) if speeds and count >= _MIN_SPEEDS else 0.0), count


def speed(record: RunRecord) -> str:
    """The median training speed; no number for fewer than five log lines."""
    median, count = median_speed(record)
    if not median:
        return f"{counted(count, 'log line')}, too few" if count else "not logged"
    return f"{median:,.1f}"


def _ranking(records: Records) -> Iterator[Block]:
    scored = {name: score for name, record in records.items() if (score := record.last_score) is not None}
    names = sorted(scored, key=lambda name: best_first(scored[name]))
    yield Heading(f"Ranking on {scored_on(records[names[0]])}")
    several = len({records[name].model for name in names}) > 1
    rows = [
        (name, str(scored[name]), "–" if (step := scored[name].step) is None else f"{step:,}")
        + ((records[name].model or "–",) if several else ())
        for name in names
    ]
    yield Table(("run", "last score", "step", *(("model",) if several else ())), rows)


def _untested(group: Group) -> Iterator[Block]:
    if words := group.of_seeds:
        yield Paragraph(words)
        return
    tested = {name for pair in group.pairs for name in (*pair.first.names, *pair.second.names)}
    if left := [name for name in group.records if name not in tested]:
        yield Paragraph(
            f"No difference of {listed(left, MAX_NAMED)} is tested: these are no accuracies, or of an unknown number of images."
        )


def _budget(pair: Pair) -> str:
    """What the better one of two runs had more or less of, as ", with 2.5 times the images and 2.5 times the FLOPs"; "" where that is the same."""
    told = []
    for name, amount in (("images", lambda record: record.images_seen), ("FLOPs", lambda record: record.exaflops)):
        first, second = (amount(of.records[0]) for of in (pair.first, pair.second))
        if first and second and abs(first / second - 1) > _SAME_BUDGET:
            told.append(f"{first / second:.3g} times the {name}")
    return f", with {' and '.join(told)}" if told else ""


def _noise(tested: Sequence[Pair]) -> Iterator[Block]:
    if not tested:
        return
    yield Heading("Is the difference more than noise?")
    shown = tested
    if len(tested) > _MAX_PAIRS:
        shown = [pair for pair in tested if pair.first is tested[0].first]
    clear = sum(pair.corrected < LEVEL for pair in tested)
    yield Paragraph(
        f"Pairs whose difference is more than noise: {clear:,} of {len(tested):,}."
        + (" Shown is the best run against others; all pairs are in pairs.csv." if len(shown) < len(tested) else "")
    )
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
        for pair in shown
        for d in [pair.difference]
    ]
    yield Table(("better", "than", "by, points", "95 % interval", "p", "p, corrected", "verdict", "test"), rows)
    used = [text for method, text in _METHODS.items() if any(pair.difference.method == method for pair in tested)]
    seeds = (
        ""
        if all(p.difference.method == STUDENT for p in tested)
        else (
            " The tests over images do not know how much another seed would change a score: train several seeds to know."
        )
    )
    yield Paragraph(
        f"p, corrected: by Holm's method for {counted(len(tested), 'pair')}; of pairs below 0.05, even one is "
        f"wrong with a probability of at most 5 %. The intervals are of each pair alone. {' '.join(used)}{seeds}"
    )


def _p(value: float) -> str:
    return "<0.0001" if value < 0.0001 else f"{value:.4f}"


def _pair_row(pair: Pair) -> dict[str, Any]:
    d = pair.difference
    return {
        "first": pair.first.title,
        "second": pair.second.title,
        "difference": d.value,
        "low": d.low,
        "high": d.high,
        "p": d.p,
        "p_corrected": pair.corrected,
        "verdict": in_words(d, pair.corrected),
        "test": d.method,
    }


def _budgets(records: Records) -> Iterator[Block]:
    for axis in (IMAGES, FLOPS):
        budget, found = at_equal_budget(records, axis)
        if not found:
            continue
        yield Heading(f"Scores at equal {axis.name}")
        last = {name: record.last_score for name, record in records.items()}
        if all(at.used >= 0.999 * budget and at.score == last[name] for name, at in found.items()):
            yield Paragraph(
                f"All runs end at the same amount, {in_units(budget, axis)}: the ranking above is also this one."
            )
            continue
        yield Paragraph(
            f"The largest budget that all runs reached is {in_units(budget, axis)}; of each run, the newest evaluation within it. "
            "A run that was planned longer still has a higher learning rate there."
        )
        rows = []
        for name, at in sorted(found.items(), key=lambda item: best_first(item[1].score)):
            if at.score is None:
                rows.append((name, "no evaluation within it", "–", "–", "–"))
            else:
                step = 0 if at.score.step is None else at.score.step
                share = f"{100 * at.used / budget:.0f} %"
                rows.append((name, str(at.score), f"{step:,}", in_units(at.used, axis), share))
        yield Table(("run", "score", "step", axis.name, "share of the budget"), rows)


# ---------------------------------------------------------------------- what differs
def differences(values: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows (name, value in each run) of the values that differ. values: run -> name -> value."""
    keys = dict.fromkeys(key for of_run in values.values() for key in of_run)
    rows = [(key, *(str(of_run.get(key, "-")) for of_run in values.values())) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def settings_of(records: Records) -> dict[str, dict[str, Any]]:
    """The settings of each run other than names and places, and the weights that it began with, or learnt from."""
    found = {n: {k: v for k, v in r.settings.items() if k not in PLACES} for n, r in records.items()}
    for name, record in records.items():
        weights = {"initial": record.origin and record.origin.details, TEACHER_TAG: record.tags.get(TEACHER_TAG)}
        found[name] |= {f"weights, {which}": text for which, text in weights.items() if text}
    return found


def _difference_table(what: str, names: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """A column for each run; of many runs, a row for each value with its runs."""
    if len(names) <= _MAX_COLUMNS:
        return Table((what, *names), rows)
    by_run = []
    for key, *values in rows:
        by_value: dict[str, list[str]] = {}
        for name, value in zip(names, values, strict=True):
            by_value.setdefault(value, []).append(name)
        for number, (value, of_value) in enumerate(by_value.items()):
            by_run.append(("" if number else key, value, f"{len(of_value)}", listed(of_value, MAX_NAMED)))
    return Table((what, "value", "runs", "which"), by_run)


def _settings(records: Records) -> Iterator[Block]:
    with_settings = {name: record for name, record in records.items() if record.settings}
    # Evaluations have none of the settings of training.
    evaluations = {name: record for name, record in with_settings.items() if record.kind == "evaluation"}
    others = {name: record for name, record in with_settings.items() if record.kind != "evaluation"}
    for alike in (others, evaluations):
        if len(alike) > 1:
            rows = differences(settings_of(alike))
            yield _difference_table("setting", list(alike), rows) if rows else Paragraph("None but their names.")
    partly = [name for name, record in others.items() if not record.has_all_settings]
    if partly:
        yield Paragraph(f"Of {listed(partly, MAX_NAMED)} only the settings that differ from the defaults are known.")
    if without := [name for name in records if name not in with_settings]:
        yield Paragraph(f"No settings are known of {listed(without, MAX_NAMED)}.")


def _facts(what: str, facts: Mapping[str, Mapping[str, str]]) -> Iterator[Block]:
    """What is known and the same of all runs, and what differs. facts: run -> name -> value."""
    rows = differences(facts)
    differ = {row[0] for row in rows}
    of_first = next(iter(facts.values()))
    if same := [f"{name} {value}" for name, value in of_first.items() if value != "–" and name not in differ]:
        yield Paragraph(f"The same for all: {'; '.join(same)}.")
    if rows:
        yield _difference_table(what, list(facts), rows)
    if not (same or rows):
        yield Paragraph("Not recorded by any of these runs.")


def data_facts(record: RunRecord) -> dict[str, str]:
    """What is known of a run's data."""

    def shown(facts: DatasetFacts | None, name: str) -> dict[str, str]:
        count = f"{facts.num_samples:,}" if facts and facts.num_samples else "–"
        return {
            f"{name} data": facts.name if facts else "–",
            f"{name} split": facts.split if facts else "–",
            f"{name} fingerprint": (facts.digest if facts else "") or "–",
            f"{name} images": count,
        }

    others = [facts for facts in record.datasets if facts.context == "training"][1:]
    mixed = ", ".join(
        f"{facts.name} {facts.split} {facts.digest} {facts.notes.get('share', '')}".strip() for facts in others
    )
    return {
        **shown(record.dataset("training"), "training"),
        "training data beside it": mixed or "–",
        "excluded samples": record.parameters.get("excluded", "–"),
        **shown(record.dataset("evaluation"), "evaluation"),
    }


def code_facts(record: RunRecord) -> dict[str, str]:
    """What is known of the code and the machine that ran it."""
    names = {
        "git branch": "mlflow.source.git.branch",
        "command": "mlflow.source.name",
        "PyTorch": "torch",
        "device": "device",
        "user": "mlflow.user",
    }
    known = {shown: record.tags.get(tag) or "–" for shown, tag in names.items()}
    return {"git revision": record.revision or "–", **known, "ranks": f"{record.ranks}" if record.ranks else "–"}


def folder_name(names: Sequence[str]) -> str:
    """The name of a folder for runs, whose names may hold anything: none that leads elsewhere, and none that is too long."""
    full_name = "-".join(names)
    if len(full_name.encode()) > _MAX_FOLDER_NAME:
        first = names[0].encode()[:80].decode(errors="ignore")
        full_name = f"{first}-and-{len(names) - 1}-others" if len(names) > 1 else first
    plain = "".join("_" if letter == "/" or not letter.isprintable() else letter for letter in full_name)
    return plain if plain.strip(".") else "_"
