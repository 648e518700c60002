"""Scores the weights of several runs again on one split, with precision, recall and F1 of each class."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.page import Block, Heading, Paragraph, Table
from pipeline.base.trained_on import TRAINED_BY, not_held_out
from pipeline.base.words import counted
from pipeline.data.storage.bucket import to_path
from pipeline.evaluate import render, report
from pipeline.review.record import RunRecord
from pipeline.settings import schema
from pipeline.settings.commands.reports import CompareConfig
from pipeline.settings.commands.weights import ScoreConfig

_OF_CLASS = ("precision", "recall", "f1")
_MAX_LISTED = 30

Scores = dict[str, dict[str, Any]]


def rescore(records: Mapping[str, RunRecord], config: CompareConfig) -> Scores:
    """Score each run on `config.split` of `config.data`, by default those of the first run. Returns run -> scores.json.

    Raises UserError for a run without a folder, and for weights of other classes than the data.
    """
    for name, record in records.items():
        if record.folder is None or not (record.folder / "config.json").exists():
            raise UserError(f"{name} ({record.address}) has no folder with weights here: leave out score and split.")
    first = next(iter(records.values()))
    data = config.data or str(first.settings["data.path"])
    paths = {str(to_path(str(record.settings["data.path"]))) for record in records.values()}
    if not config.data and len(paths) > 1:
        raise UserError(
            f"these runs differ in data.path: {', '.join(sorted(paths))}. Say which one to score on: data=..."
        )
    split = config.split or str(first.settings["data.eval_split"])
    if not split:
        raise UserError(f"data.eval_split of {next(iter(records))} is empty. Say which split to score on: split=...")
    scores = {}
    for name, record in records.items():
        print(f"{name}:")
        settings = [f"weights={record.folder}", f"data={data}", f"split={split}", "shots=0", f"batch={config.batch}",
                    f"threads={config.threads}"]  # fmt: skip
        scores[name] = report.run(schema.load(ScoreConfig, None, settings))
    return scores


def class_rows(scores: Scores) -> list[dict[str, Any]]:
    """One row per class: name, support, and precision, recall and F1 of each run.

    The classes are those that all weights have, which include those of the data; their order may differ.
    """
    by_run = {name: _by_class(of_run["per_class"]) for name, of_run in scores.items()}
    first, *others = by_run.values()
    rows = []
    for key, of_first in first.items():
        if all(key in of_run for of_run in others):
            row = {"class": of_first["class"], "support": of_first["support"]}
            for name, of_run in by_run.items():
                row |= {f"{name} {score}": of_run[key][score] for score in _OF_CLASS}
            rows.append(row)
    return rows


def _by_class(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Rows by name, and by the order of classes that have the same name, as ImageNet's two cranes."""
    count: Counter[str] = Counter()
    found = {}
    for row in rows:
        found[row["class"], count[row["class"]]] = row
        count[row["class"]] += 1
    return found


def page(scores: Scores) -> list[Block]:
    """The blocks of the scores and of the classes."""
    names = list(scores)
    of_first = scores[names[0]]
    sums = [
        (text, *(f"{100 * scores[name][key]:.2f}" for name in names))
        for key, text in render.SCORES.items()
        if all(key in of_run for of_run in scores.values())  # Of five classes or fewer, there is no top-5.
    ]
    sums.append(("loss", *(f"{scores[name]['loss']:.4f}" for name in names)))
    first, second = names[:2]
    rows = sorted(class_rows(scores), key=lambda row: row[f"{first} f1"] - row[f"{second} f1"])
    shown = rows if len(rows) <= _MAX_LISTED else [*rows[: _MAX_LISTED // 2], *rows[-_MAX_LISTED // 2 :]]
    classes = [
        (
            row["class"],
            *(f"{100 * row[f'{name} {key}']:.1f}" for key in _OF_CLASS for name in names),
            f"{row['support']:,}",
        )
        for row in shown
    ]
    header = ("class", *(f"{'F1' if key == 'f1' else key}, {name}" for key in _OF_CLASS for name in names), "images")
    left = (
        f"; {len(shown)} of {counted(len(rows), 'class')}, all are in per_class.csv" if len(shown) < len(rows) else ""
    )
    trained = [
        Paragraph(f"{name}: {not_held_out(of_run['split'], of_run[TRAINED_BY])}.")
        for name, of_run in scores.items()
        if of_run.get(TRAINED_BY)
    ]
    return [
        Heading(f"Scored again on {of_first['data']}, split {of_first['split']}"),
        *trained,
        Table(("score, %", *names), sums),
        Heading("Classes"),
        Paragraph(f"Sorted by F1 of {first} minus F1 of {second}{left}. In per cent."),
        Table(header, classes),
    ]
