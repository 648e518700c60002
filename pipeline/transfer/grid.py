"""The ViT paper's fine-tuning protocol (B.1.1): choose the learning rate on a dev split, then train on all data, once per seed.

Each run is a process of its own that resumes from its folder, so the same command continues an interrupted grid.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.base.errors import DivergedError, UserError
from pipeline.base.files import write_text
from pipeline.base.json_record import quoted
from pipeline.base.page import Block, Heading, Paragraph, Table, markdown
from pipeline.base.trained_on import TRAINED_BY, not_held_out
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import Dataset, location_and_split, open_dataset
from pipeline.data.mixture.run_data import open_run_data
from pipeline.data.storage.atomic import write_files
from pipeline.evaluate.intervals import of_seeds, sample_deviation
from pipeline.lifecycle.run_folder import RESUME
from pipeline.monitor.origin import sha256_now
from pipeline.monitor.page_folder import PageFolder
from pipeline.monitor.run_page import hide_passwords
from pipeline.process.outputs import try_output
from pipeline.settings import schema
from pipeline.settings.commands.reports import GridConfig
from pipeline.settings.commands.weights import ScoreConfig
from pipeline.transfer.child_run import (
    ChildRun,
    make_child,
    read_outcome,
    remove_unreadable_scores,
    start_command,
    trained_otherwise,
    wait_until_free,
    why_unusable,
    with_track,
)
from pipeline.transfer.track.data_names import data_names

if TYPE_CHECKING:
    from pipeline.transfer.track.grid_page import GridPage

GRID_FILE = "grid.json"
Start = Callable[[ChildRun, GridConfig], int]


def start_process(run: ChildRun, config: GridConfig) -> int:
    """Run launch/finetune.py by config.launcher; returns its exit code."""
    return start_command("finetune", ["--config", run.file, *run.overrides], config.launcher)


def run(config: GridConfig, start: Start = start_process) -> dict[str, Any]:
    """Run the grid, write its report, and return the content of results.json. start: executes a run.

    Its keys: lr (the chosen one), trials (lr, top1 on dev, loss; or lr, diverged: reason), runs (seed, top1), top1 (mean), std
    (over seeds, of n - 1; None for one seed), also (data set -> the same). Shares are in [0, 1]. Raises UserError when a run
    fails (its own output says why) or all trials diverge; exits with code 75 when a run was asked to stop.
    """
    trials = [make_run(config, config.trial_name(lr), lr, config.seeds[0], config.dev_share) for lr in config.lr]
    make_run(config, "final", config.lr[0], config.seeds[0], dev_share=0.0)  # To be refused before the trials.
    dataset, num_train, by_number = _check_data(trials[0], config)
    _claim(config)
    # Late: these import Matplotlib, which a mistake in the settings need not wait for.
    from pipeline.transfer.track.grid_page import GridPage
    from pipeline.transfer.track.parent_page import uri_of_runs

    settings = trials[0].config
    uri = uri_of_runs(config.mlflow, settings.track, config.out)
    num_runs = len(trials) + len(config.seeds)
    with GridPage(config, settings, dataset, num_train, num_runs, uri) if uri else contextlib.nullcontext() as page:
        result = {**_run(config, trials, start, page, by_number), "num_train": num_train}
        _write_report(result, config)
        if page:
            page.scored(result)
    return result


def _run(
    config: GridConfig, trials: list[ChildRun], start: Start, page: "GridPage | None", by_number: set[str]
) -> dict[str, Any]:
    """Returns the content of results.json. by_number: as of `_check_data`."""
    tried: list[dict[str, Any]] = []
    weights_now = sha256_now(trials[0].config.init.weights or "")
    _refuse_other_settings(trials)
    for lr, trial in zip(config.lr, trials, strict=True):
        _refuse_changed(trial, weights_now)
        try:
            tried.append({"lr": lr, **run_to_end(trial, config, start, page)})
        except DivergedError as error:  # A diverged trial is a result: this rate is not chosen.
            print(f"{config.name}: lr {lr:g} diverged")
            tried.append({"lr": lr, "diverged": str(error)})
        _refuse_other_weights(trials[0], trial)
        if page:
            page.ended(trial.folder, tried)
    best, num_dev = best_rate(tried)
    print(f"{config.name}: lr {best:g} is the best of {len(tried)} on {counted(num_dev, 'dev image')}")

    finals = [make_run(config, f"final-seed-{seed}", best, seed, dev_share=0.0) for seed in config.seeds]
    _refuse_other_settings(finals)
    runs: list[dict[str, Any]] = []
    for seed, final in zip(config.seeds, finals, strict=True):
        _refuse_changed(final, weights_now)
        try:
            scores = run_to_end(final, config, start, page)
        except DivergedError as error:
            raise UserError(f"{error} Or leave {best:g} out of lr.") from error
        _refuse_other_weights(trials[0], final)
        runs.append({"seed": seed, **{name: scores[name] for name in ("top1", "num_samples", "effective_images")}})
        if page:
            page.ended(final.folder, tried, runs, best)
    settings = finals[0].config
    return {
        "name": config.name,
        "run": config.run,
        "settings": [hide_passwords(text) for text in config.settings],
        "lr": best,
        "dev_share": config.dev_share,
        "weights": settings.init.weights,
        "data": settings.data.path,
        "split": settings.data.eval_split,
        TRAINED_BY: scores[TRAINED_BY],
        "trials": tried,
        "runs": runs,
        **mean_and_deviation([row["top1"] for row in runs]),
        "also": {
            data: _scores_on(data, name.folder, finals, data not in by_number)
            for data, name in data_names(config.also).items()
        },
    }


def make_run(config: GridConfig, name: str, lr: float, seed: int, dev_share: float) -> ChildRun:
    """The settings of one run. Raises UserError for a settings file that cannot be used."""
    overrides = [
        *config.settings,
        f"name={name}",
        f"out={Path(config.out) / config.name}",
        f"optimizer.lr={lr!r}",
        f"seed={seed}",
        f"data.dev_share={dev_share!r}",
    ]
    if dev_share:  # It names a metric of data.eval_split, which only the final runs are scored on.
        overrides.append("checkpoint.best=")
    run = make_child(name, config.run, overrides)
    if run.config.init.weights is None:
        raise UserError(f"{config.run} has no init.weights: set settings=[init.weights=...].")
    return run


def _check_data(trial: ChildRun, config: GridConfig) -> tuple[Dataset, int, set[str]]:
    """Returns (the data set of the runs, the images that the final ones train on, by_number).

    by_number: those of config.also whose classes have other names, and are matched by number.

    Raises UserError for splits and data sets that would fail in the final runs, after days.
    """
    settings, seed = trial.config.data, trial.config.seed
    if not trial.config.needs_labels:
        raise UserError(
            f"train.loss = {trial.config.train.loss} predicts no classes, and a rate is chosen by accuracy. Use train.loss=softmax, say."
        )
    dataset = open_dataset(settings.path)
    dataset.refuse_without_labels("data.path", "Fine-tuning needs some.")
    if not settings.eval_split:
        raise UserError("data.eval_split is empty, but the final runs are scored on it. Name a split.")
    for share in (config.dev_share, 0.0):
        opened = open_run_data(
            replace(settings, dev_share=share), seed, trial.config.train.global_batch, trial.config.labels
        )
    if settings.eval_split in opened.not_held_out(opened.trained_on(trial.config.name)):
        raise UserError(
            f"data.eval_split = {settings.eval_split} is trained on, but the final runs are scored on it. Name another split."
        )
    by_number = set()
    for data in config.also:
        path, split = location_and_split(data)
        other = open_dataset(path)
        other.split(split or "val")
        if not set(other.classes) <= set(opened.dataset.classes):
            _check_order(data, other.classes, settings.path, opened.dataset.classes)
            by_number.add(data)
    data_names(config.also)
    return dataset, len(opened.split), by_number


def _check_order(data: str, classes: list[str], path: str, trained: list[str]) -> None:
    """Raise UserError unless class numbers can mean the same in `trained`, the classes of the runs, as in `classes` of config.also."""
    if len(classes) != len(trained):
        raise UserError(
            f"also: {data} has {counted(len(classes), 'class')}, {path} has {len(trained):,}. They must be among these, or as many "
            "in the same order."
        )
    number = {name: n for n, name in enumerate(trained)}
    if moved := next((name for n, name in enumerate(classes) if number.get(name, n) != n), None):
        raise UserError(
            f"also: {quoted(moved)} is class {classes.index(moved)} of {data}, and class {number[moved]} of {path}. Where some classes "
            "have other names, all must be in the same order (class_list of launch/shard.py)."
        )


def _claim(config: GridConfig) -> None:
    """Write grid.json, by which the folder is known as a grid's. Raises UserError for a folder of something else."""
    folder = Path(config.out) / config.name
    try_output("name", folder, holds="grid")
    folder.mkdir(parents=True, exist_ok=True)
    about = {"run": config.run, "lr": config.lr, "dev_share": config.dev_share, "seeds": config.seeds}
    write_text(folder / GRID_FILE, json.dumps(about, indent=1) + "\n")


def run_to_end(grid_run: ChildRun, config: GridConfig, start: Start, page: "GridPage | None" = None) -> dict[str, Any]:
    """The final scores of a run, which is started unless it has ended. Raises UserError and DivergedError."""
    outcome = read_outcome(grid_run)
    if outcome is None:
        if problem := why_unusable(grid_run):
            print(f"{problem} The run is started again.")
            remove_unreadable_scores(grid_run)
        print(f"{config.name}: {grid_run.name}", flush=True)
        if who := wait_until_free(grid_run.folder):
            raise UserError(f"{grid_run.folder} is in use by {who}. Stop that one first.")
        code = start(with_track(grid_run, page.tracking(grid_run.config.track)) if page else grid_run, config)
        if code == RESUME:
            print(f"{config.name}: {grid_run.name} was asked to stop: the same command continues (exit code {RESUME})")
            sys.exit(RESUME)
        outcome = read_outcome(grid_run)
        if outcome is None or (code and not isinstance(outcome, str)):
            raise UserError(f"{grid_run.folder} failed (exit code {code}), see above. The same command continues it.")
    if isinstance(outcome, str):
        raise DivergedError(f"{grid_run.folder}: {outcome}")
    return {**asdict(outcome), "effective_images": outcome.effective_images}


def _refuse_other_settings(runs: list[ChildRun]) -> None:
    """Raise UserError if some were trained with other settings so far, such as the rate that was the best of fewer."""
    if found := [f"{run.folder} ({text})" for run in runs if (text := trained_otherwise(run))]:
        raise UserError(
            f"Runs of this grid were trained with other settings: {', '.join(found)}. Set them back, remove these folders to train the "
            "runs anew, or start another grid with name=..."
        )


def _refuse_changed(run: ChildRun, weights_now: str) -> None:
    """Raise UserError if a run has ended, and not with the data and weights that its settings name now: it would not be run again.

    weights_now: their SHA-256, as of `sha256_now`.
    """
    if read_outcome(run) is None:  # A run that goes on compares its data itself.
        return
    try:
        facts = PageFolder(run.folder).read_facts().facts
    except UserError:
        return
    from pipeline.train.run_facts import datasets_of  # Late: the import takes seconds.

    config, changed = run.config, ""
    now = datasets_of(open_run_data(config.data, config.seed, config.train.global_batch, config.labels))
    for then, there in zip(facts.datasets, now, strict=False):
        before, after = (
            f"{data.digest} with {counted(data.num_samples, 'image')}, excluded {data.notes['excluded']}"
            for data in (then, there)
        )
        if before != after:
            changed = f"{there.name}, split {there.split}, was {before}, and is {after}"
            break
    origin = facts.origin
    if origin and weights_now and origin.sha256 != weights_now:
        changed = (
            f"{origin.path} had the SHA-256 {origin.sha256[:16]}, and {config.init.weights} has {weights_now[:16]}"
        )
    if changed:
        raise UserError(
            f"{run.folder} has ended, and would be another run now: {changed}. Start another grid with name=..., or put back what it "
            "began with."
        )


def _refuse_other_weights(first: ChildRun, other: ChildRun) -> None:
    """Raise UserError if two runs began with different weights: a run that init.weights names may have trained on meanwhile."""
    origins = []
    with contextlib.suppress(UserError):  # It has not begun.
        origins = [PageFolder(run.folder).read_facts().facts.origin for run in (first, other)]
    if len({origin.sha256 for origin in origins if origin}) > 1:
        began = " and ".join(
            f"{run.folder} with {origin.path}" for run, origin in zip((first, other), origins, strict=True) if origin
        )
        raise UserError(
            f"The runs of this grid began with different weights, {began}, so their scores cannot be compared. Name one checkpoint "
            "(settings=[init.weights=RUN/checkpoints/step-...]) and start another grid with name=..."
        )


def best_rate(tried: list[dict[str, Any]]) -> tuple[float, int]:
    """Returns (learning rate with the highest dev accuracy, number of dev images). Ties: the lower loss.

    Raises UserError if all diverged.
    """
    scored = [trial for trial in tried if "diverged" not in trial]
    if not scored:
        raise UserError(f"every learning rate diverged; of the first: {tried[0]['diverged']} Add lower ones to lr.")
    best = min(scored, key=lambda trial: (-trial["top1"], trial["loss"]))
    return best["lr"], best["num_samples"]


def mean_and_deviation(accuracies: list[float]) -> dict[str, float | None]:
    """top1 (the mean) and std (the sample deviation, None for a single one)."""
    return {"top1": float(np.mean(accuracies)), "std": sample_deviation(accuracies)}


def _write_report(result: dict[str, Any], config: GridConfig) -> None:
    """Write report.md and results.json."""
    folder = Path(config.out) / config.name
    title = f"{config.name}: {100 * result['top1']:.2f} % top-1"
    files = {
        "report.md": markdown(title, page(result)),
        "results.json": json.dumps(result, indent=1, ensure_ascii=False),
    }
    write_files(folder, files, mark="results.json")
    spread = "" if result["std"] is None else f"standard deviation {100 * result['std']:.2f} over "
    print(f"{title}, {spread}{counted(len(result['runs']), 'seed')}; report: {folder / 'report.md'}")


def page(result: dict[str, Any]) -> list[Block]:
    """The report: the score, the trials, each run."""
    accuracies = [run["top1"] for run in result["runs"]]
    rows = [
        (
            f"{result['data']}, {result['split']}",
            _score_text(result, accuracies, result["runs"][0]["num_samples"]),
            f"{result['runs'][0]['num_samples']:,}",
        )
    ]
    for data, scores in result["also"].items():
        rows.append(
            (data, _score_text(scores, scores["of_seeds"], scores["num_samples"]), f"{scores['num_samples']:,}")
        )
    trials = [
        (f"{trial['lr']:g}", "diverged", "-")
        if "diverged" in trial
        else (f"{trial['lr']:g}", f"{100 * trial['top1']:.2f}", f"{trial['loss']:.4f}")
        for trial in result["trials"]
    ]
    chosen = frozenset(i for i, trial in enumerate(result["trials"]) if trial["lr"] == result["lr"])
    spread = ": mean ± standard deviation" if len(accuracies) > 1 else ""
    return [
        Paragraph(f"Weights {result['weights']}, run {result['run']} {' '.join(result['settings'])}".rstrip() + "."),
        *([Paragraph(f"{not_held_out(result['split'], runs)}.")] if (runs := result[TRAINED_BY]) else []),
        Table(("data", f"top-1, %{spread}", "images"), rows),
        Heading("Choice of the learning rate"),
        Paragraph(
            f"On {counted(best_rate(result['trials'])[1], 'image')} of the {counted(result['num_train'], 'training image')}, held out at random "
            f"(dev_share = {result['dev_share']:g}); the final runs then train on all of them, with the rate in bold."
        ),
        Table(("lr", "top-1 on dev, %", "loss"), trials, chosen),
        Heading("Final runs"),
        Table(("seed", "top-1, %"), [(f"{run['seed']}", f"{100 * run['top1']:.2f}") for run in result["runs"]]),
    ]


def _score_text(scores: dict[str, Any], accuracies: list[float], num_test: int) -> str:
    if len(accuracies) == 1:
        return f"{100 * scores['top1']:.2f}"
    interval = of_seeds(accuracies, num_test)
    spread = f"95 % interval of the mean {100 * interval.low:.2f} to {100 * interval.high:.2f}"
    return f"{100 * scores['top1']:.2f} ± {100 * scores['std']:.2f} ({spread})"


def _scores_on(data: str, name: str, finals: list[ChildRun], match_classes: bool) -> dict[str, Any]:
    """Scores of the final runs on another data set, `folder` or `folder:split`. name: of the folder of each one's report."""
    from pipeline.evaluate import report  # Late: the import takes seconds.

    path, split = location_and_split(data)
    found = []
    for final in finals:
        settings = [
            f"weights={final.folder}",
            f"data={path}",
            f"split={split or 'val'}",
            f"out={final.folder / 'evaluate' / name}",
            "shots=0",
            f"match_classes={json.dumps(match_classes)}",
        ]
        found.append(report.run(schema.load(ScoreConfig, None, settings)))
    accuracies = [scores["top1"] for scores in found]
    return {**mean_and_deviation(accuracies), "of_seeds": accuracies, "num_samples": found[0]["num_samples"]}
