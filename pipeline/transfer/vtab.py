"""Scores of weights on VTAB-1k's 19 tasks by a protocol: plans and runs the cells of a sweep, and writes results.json.

    sweep.json      what the cells belong to: protocol, method, weights, data. A folder holds one sweep.
    cells/*.json    outcome of each cell that is done, which is not run again
    progress.json   while it runs: number of done cells of each task
    results.json    protocol, weights, data, and a score for each task and seed; written at the end

Where the cells run is decided by the caller, which passes a `RunJobs`.
"""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.base.files import write_text
from pipeline.base.trained_on import TrainedSet, not_held_out, recorded, trained_by
from pipeline.base.words import counted
from pipeline.data.dataset.dedup_report import DEDUP_REPORT, read_dedup_report
from pipeline.data.dataset.manifest import location_and_split
from pipeline.data.storage.bucket import to_path
from pipeline.evaluate.intervals import sample_deviation
from pipeline.evaluate.loaded_model import output_folder
from pipeline.monitor.mlflow.state import run_of_weights
from pipeline.ray_tasks import RunJobs
from pipeline.settings import schema
from pipeline.settings.commands.transfer import VtabConfig
from pipeline.settings.effect import without_effect
from pipeline.transfer.score_table import RESULTS_FILE, choice_in_words, read_results, unpublished_warning
from pipeline.transfer.sweep import (
    Outcome,
    Sweep,
    cell_name,
    open_sweep,
    protocol_sha256,
    protocol_title,
    score_row,
    settings_of,
)
from pipeline.transfer.sweep_progress import SweepProgress
from pipeline.transfer.track.sweep_page import SweepPage
from pipeline.transfer.vtab_cell import ALL, TEST, TRAIN, VAL, SweepJob, VtabCell, run_cell, view_of
from pipeline.transfer.vtab_tasks import TASKS, Task


def run(config: VtabConfig, folder: Path, run_jobs: RunJobs, uri: str = "") -> dict[str, Any] | None:
    """Run the cells that are not done, write results.json and return its content; None with config.plan.

    folder: for the results (see `output`), locked by the caller. uri: MLflow's store that the sweep is sent to; empty is none.
    Raises UserError for a sweep that cannot run or differs from the folder's, and at the end if a cell failed; all other results are written then.
    """
    sweep = open_sweep(config, folder)
    for line in without_effect(config):
        print(line, flush=True)
    if config.plan:
        _print_plan(sweep)
        return None
    contamination = _contamination(sweep, list(filter(None, config.pretrained_on)))
    sweep.claim()
    earlier = _earlier_results(folder)

    # ---------------------------------------------------------------------- choose each task's setting, then score it
    searches = [cell for task in sweep.tasks for cell in sweep.searches(task)]
    outcomes = {cell: outcome for task in sweep.tasks for cell, outcome in sweep.done(task).items()}
    # The chosen settings may be unknown yet, but not the number of final cells.
    any_setting = settings_of(config.protocol)[0]
    cells = searches + [cell for task in sweep.tasks for cell in sweep.finals(task, any_setting)]
    _print_begin(sweep, len(cells), len(outcomes))
    failed: dict[VtabCell, str] = {}
    header = _header(sweep, contamination, earlier)
    with (
        SweepPage(sweep, header, uri, len(cells), outcomes, failed) if uri else nullcontext() as page,
        SweepProgress([cell.task.name for cell in cells], [cell.task.name for cell in outcomes], folder) as progress,
    ):
        _run(sweep, searches, outcomes, failed, progress, page, run_jobs)
        chosen = {task.name: sweep.chosen(task, outcomes) for task in sweep.tasks}
        finals = [cell for task in sweep.tasks if (s := chosen[task.name][0]) for cell in sweep.finals(task, s)]
        _run(sweep, finals, outcomes, failed, progress, page, run_jobs)

        # ------------------------------------------------------------------ results
        scores = [score_row(cell, outcomes[cell], chosen[cell.task.name][1]) for cell in finals if cell in outcomes]
        failures = [
            {"task": cell.task.name, "cell": cell_name(cell), "seed": cell.seed, "reason": failed[cell]}
            for cell in [*searches, *finals]
            if cell in failed
        ]
        results = {**header, "scores": scores, "failed": failures, "missing": sweep.missing}
        results = _with_earlier(results, earlier)
        write_text(folder / RESULTS_FILE, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        _print_end(sweep, scores, folder)
        if page:
            page.scored(results)
    if failed:
        cell, reason = next(iter(failed.items()))
        raise UserError(
            f"{len(failed)} of {counted(len(cells), 'cell')} failed, such as {cell_name(cell)}: {reason} The same command tries them "
            f"again; all that is done is in {folder / RESULTS_FILE}."
        )
    return results


def output(config: VtabConfig) -> Path:
    """The folder of a sweep's results. Raises UserError for a path that is a file."""
    name = f"{config.protocol.name}-{config.method}"
    return output_folder(config.out, config.weights, "vtab", name, holds="VTAB-1k sweep")


def _run(
    sweep: Sweep,
    cells: list[VtabCell],
    outcomes: dict[VtabCell, Outcome],
    failed: dict[VtabCell, str],
    progress: SweepProgress,
    page: SweepPage | None,
    run_jobs: RunJobs,
) -> None:
    """Run the cells that have no outcome; add theirs to `outcomes` or `failed`."""
    jobs = [SweepJob(cell, sweep.config, sweep.sha256) for cell in cells if cell not in outcomes]

    def fail(index: int, reason: str) -> None:
        cell = jobs[index].cell
        failed[cell] = reason
        progress.gave_up(cell.task.name, str(cell), reason)
        if page:
            page.ended()

    if jobs:
        for index, outcome in run_jobs(run_cell, jobs, progress.retried, fail):
            cell = jobs[index].cell
            outcomes[cell] = outcome
            sweep.write(cell, outcome)
            progress.ended(cell.task.name, _in_words(cell, outcome), outcome["seconds"])
            if page:
                page.ended()


def _header(sweep: Sweep, contamination: dict[str, int | None], earlier: dict[str, Any]) -> dict[str, Any]:
    """What results.json says of the sweep. earlier: see `_earlier_results`."""
    config, protocol = sweep.config, sweep.config.protocol
    # Those of tasks that this start leaves out, whose scores are kept.
    kept = [name for name in earlier.get("unpublished", []) if name not in sweep.datasets]
    return {
        "protocol": {**schema.to_dict(protocol), "name": protocol_title(protocol), "sha256": protocol_sha256(protocol)},
        "method": config.method,
        "precision": config.precision,
        "micro_batch": config.micro_batch,
        "checkpoint": {"path": config.weights, "sha256": sweep.sha256, "run_id": run_of_weights(sweep.named)},
        "data": {name: dataset.fingerprint for name, dataset in sweep.datasets.items()},
        "contamination": contamination,
        "unpublished": [task.name for task in TASKS if task.name in [*sweep.unpublished, *kept]],
    }


def _earlier_results(folder: Path) -> dict[str, Any]:
    """The content of the folder's results.json; {} without one that can be used.

    sweep.json allows no other weights, protocol or data in a folder, so scores of several starts belong together.
    """
    if not (folder / RESULTS_FILE).exists():
        return {}
    try:
        return read_results(folder)
    except UserError as error:
        print(f"{error} It is written anew.", flush=True)
        return {}


def _with_earlier(results: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """The results, with the earlier scores that are not among them: of tasks and seeds that this start left out."""
    if not earlier:
        return results
    known = {(row["task"], row["seed"]) for row in results["scores"]}
    kept = [row for row in earlier["scores"] if (row["task"], row["seed"]) not in known]
    tasks = {row["task"] for row in kept}
    if kept:
        print(
            f"{len(kept):,} scores of earlier starts are kept in {RESULTS_FILE}: {', '.join(sorted(tasks))}", flush=True
        )
    order = [task.name for task in TASKS]
    return {
        **results,
        **{
            name: {task: (earlier[name] or {}).get(task) for task in tasks} | results[name]
            for name in ("data", "contamination")
        },
        "scores": sorted([*results["scores"], *kept], key=lambda row: order.index(row["task"])),
        "missing": [name for name in results["missing"] if name not in tasks],
    }


def _contamination(sweep: Sweep, pretrained_on: list[str]) -> dict[str, int | None]:
    """Task -> number of its test images that the weights were trained on, or else of pre-training images marked as copies of these.

    None if copies were not searched for in all sets that the weights were trained on.
    """
    sets = recorded(models.read_weights(sweep.config.weights).extra)
    total: dict[str, int | None] = dict.fromkeys(sweep.datasets)
    if pretrained_on:
        total = _copies(sweep, pretrained_on, sets)
    for task, dataset in sweep.datasets.items():
        if runs := trained_by(sets, dataset.fingerprint, TEST):
            total[task] = dataset.info["samples"][TEST]
            print(f"{task}: {not_held_out(TEST, runs)}", flush=True)
    return total


def _copies(sweep: Sweep, pretrained_on: list[str], sets: list[TrainedSet]) -> dict[str, int | None]:
    """The copies in all of these data sets together, as `_contamination`. sets: what the weights were trained on, as far as known."""
    names = {(one.fingerprint, one.split): one.name for one in sets}
    trained = list(names)
    found, used = [], set[tuple[str, str]]()
    for name in pretrained_on:
        copies, one = _copies_in(sweep, name, trained)
        if one in used:
            raise UserError(f"pretrained_on names {name} twice.")
        found.append(copies)
        used.add(one)
    if left := [f"{name}:{split}" for (digest, split), name in names.items() if (digest, split) not in used]:
        raise UserError(
            f"pretrained_on = {', '.join(pretrained_on)}, but the weights were trained on {', '.join(left)}, too. Name all: "
            "pretrained_on=[FOLDER,FOLDER]"
        )
    total: dict[str, int | None] = {}
    for task in sweep.datasets:
        counts = [count for copies in found if (count := copies[task]) is not None]
        total[task] = sum(counts) if len(counts) == len(found) else None
    return total


def _copies_in(
    sweep: Sweep, name: str, trained: list[tuple[str, str]]
) -> tuple[dict[str, int | None], tuple[str, str]]:
    """Returns (copies in one data set, as `_contamination`; its fingerprint and split). trained: the same of all, as far as known."""
    place, named = location_and_split(name)
    path = to_path(place) / DEDUP_REPORT
    likely = named or next((split for _, split in trained), "train")
    remedy = f"launch/dedup.py data={place} split={likely} against=..."
    try:
        report = read_dedup_report(to_path(place))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is missing. Make it with {remedy}") from None
    digest = report.data.fingerprint
    known_splits = [split for other, split in trained if other == digest]
    if trained and not known_splits:
        known = ", ".join(dict.fromkeys(other for other, _ in trained))
        raise UserError(f"pretrained_on = {place} is {digest}, but the weights were trained on {known}.")
    if named and known_splits and named not in known_splits:
        raise UserError(f"pretrained_on = {name}, but the weights were trained on its split {', '.join(known_splits)}.")
    split = named or next(iter(known_splits), "train")
    copies: dict[str, int | None] = dict.fromkeys(sweep.datasets)
    if report.data.is_split(split):
        tests = [part for part in report.against if part.name.endswith(f":{TEST}")] if report.marked else []
        of_test = {part.fingerprint: part.copies for part in tests}
        copies = {task: of_test.get(dataset.fingerprint) for task, dataset in sweep.datasets.items()}
    else:
        way_out = "" if known_splits else f", or name the split of the weights: pretrained_on={place}:SPLIT"
        print(
            f"note: {path} is a search of {report.data.name}, so copies of test images in its split {split} count as not searched. "
            f"Search it with launch/dedup.py data={place} split={split} against=...{way_out}",
            flush=True,
        )
    return copies, (digest, split)


# -------------------------------------------------------------------- what is printed
def _print_begin(sweep: Sweep, num_cells: int, num_done: int) -> None:
    protocol = sweep.config.protocol
    print(
        f"{sweep.config.weights} ({sweep.sha256[:16]}) on {len(sweep.datasets)} of {counted(len(TASKS), 'task')} by "
        f"{protocol_title(protocol)} ({protocol_sha256(protocol)[:16]}), {sweep.config.method}: {counted(num_cells, 'cell')}, "
        f"{num_done:,} of them done before",
        flush=True,
    )
    _print_notes(sweep)


def _in_words(cell: VtabCell, outcome: Outcome) -> str:
    diverged = f", diverged by step {outcome['diverged']}" if "diverged" in outcome else ""
    return f"{cell}: {outcome['accuracy']:.2%} of {counted(outcome['num_images'], 'image')}{diverged}"


def _print_end(sweep: Sweep, scores: list[dict[str, Any]], folder: Path) -> None:
    """Print the mean accuracy of each task. (launch/vtab_report.py writes the report beside published scores.)"""
    means = []
    marks = {""}
    for task in sweep.tasks:
        rows = [row for row in scores if row["task"] == task.name]
        if not rows:
            print(f"{task.title:<12}  no score")
            continue
        accuracies = [row["accuracy"] for row in rows]
        means.append(mean(accuracies))
        marks.add(mark := "†" if task.name in sweep.unpublished else "")
        deviation = sample_deviation(accuracies)
        spread = "" if deviation is None else f" ± {deviation:.2%}"
        print(
            f"{task.title:<12} {means[-1]:>8.2%}{mark}{spread}  ({counted(len(rows), 'seed')}, {counted(rows[0]['num_test'], 'image')})  "
            f"{choice_in_words(rows[0])}"
        )
    for line in unpublished_warning(sweep.unpublished):
        print(line)
    if means:
        print(f"mean of {counted(len(means), 'task')}: {mean(means):.2%}{max(marks)}")
    print(f"results: {folder / RESULTS_FILE}", flush=True)


def _print_plan(sweep: Sweep) -> None:
    """Print the cells and the compute of each task."""
    protocol = sweep.config.protocol
    trained = models.read_weights(sweep.config.weights).config
    columns = "{:<12} {:>5} {:>7} {:>6} {:>5} {:>13} {:>11} {:>10}"
    print(columns.format("task", "side", "search", "final", "done", "trained on", "scored on", "PFLOP"))
    total_cells = total_done = 0
    total_flops = 0.0
    for task in sweep.tasks:
        size, num_done = view_of(protocol, task)[0], len(sweep.done(task))
        num_searches, num_finals = len(sweep.searches(task)), len(sweep.finals(task, settings_of(protocol)[0]))
        num_trained, num_scored = _num_images(sweep, task)
        flops = models.training_flops_per_image(replace(trained, image_size=(size, size))) * (
            num_trained + num_scored / 3
        )
        total_cells, total_done = total_cells + num_searches + num_finals, total_done + num_done
        total_flops += flops
        row = (num_searches, num_finals, num_done, f"{num_trained:,}", f"{num_scored:,}", f"{flops / 1e15:,.1f}")
        print(columns.format(task.title, size, *row))
    print(
        f"{counted(total_cells, 'cell')}, {total_done:,} of them done; {total_flops / 1e15:,.1f} PFLOP in all, "
        f"{total_flops / 1e14 / 3600:,.2f} hours at a sustained 100 TFLOP/s. Protocol {protocol_title(protocol)} "
        f"({protocol_sha256(protocol)[:16]}), method {sweep.config.method}."
    )
    _print_notes(sweep)


def _print_notes(sweep: Sweep) -> None:
    if sweep.unusable:
        reason = next(iter(sweep.unusable.values()))
        print(
            f"{len(sweep.unusable):,} results of cells cannot be used, and these cells run again: {reason}", flush=True
        )
    missing = [f"not prepared: {', '.join(sweep.missing)}"] if sweep.missing else []
    for note in [*sweep.notes, *missing, *unpublished_warning(sweep.unpublished)]:
        print(note, flush=True)


def _num_images(sweep: Sweep, task: Task) -> tuple[int, int]:
    """Returns (images trained on, images scored) of all cells of a task. Final cells count with the longest length tried."""
    protocol, num = sweep.config.protocol, sweep.datasets[task.name].info["samples"]
    if sweep.config.method != "finetune":
        return 0, num[TRAIN] + num[VAL] + num[TEST]
    settings, num_searches, num_finals = settings_of(protocol), len(sweep.searches(task)), len(sweep.config.seeds)
    steps = num_finals * max(setting.length.steps(num[ALL], protocol.batch) for setting in settings)
    if num_searches:
        steps += sum(setting.length.steps(num[TRAIN], protocol.batch) for setting in settings)
    return steps * protocol.batch, num[VAL] * num_searches + num[TEST] * num_finals
