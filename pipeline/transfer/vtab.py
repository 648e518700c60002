"""Weights -> scores on VTAB-1k's 19 tasks by a protocol, cell by cell; `run` is the whole of it.

    sweep.json      what the cells are of: protocol, method, weights, data. A folder holds one sweep.
    cells/*.json    the outcome of each cell that is done, written whole; such a cell is not run again
    progress.json   while it runs: cells of each task that are done
    results.json    protocol, weights, data, and a score for each task and seed; written at the end

Where the cells run is not known here: `run` is given what runs them.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, Protocol

from pipeline import model as models
from pipeline import schema
from pipeline.data.manifest import Dataset, file_sha256, open_dataset
from pipeline.errors import UserError
from pipeline.evaluate.subject import output_folder
from pipeline.model import files
from pipeline.run_folder import write_atomically
from pipeline.track import run_id_of
from pipeline.transfer.board import Board
from pipeline.transfer.vtab_cell import ALL, TEST, TRAIN, VAL, Cell, Job, Setting, run_cell, view_of, warmup_steps
from pipeline.transfer.vtab_tasks import TASKS, Task
from pipeline.transfer_config import ProtocolConfig, VtabConfig

SWEEP_FILE, CELLS, RESULTS_FILE = "sweep.json", "cells", "results.json"
# Where launch/dedup.py leaves its report in a data set.
_DEDUP_REPORT = Path("dedup", "report.json")


class RunCells(Protocol):
    """Runs function(job) for each job somewhere; (number of the job, outcome) as they finish.

    on_retry is told why a job is run again, on_failure which one failed and why; the others go on.
    """

    def __call__(
        self,
        function: Callable[[Job], dict[str, Any]],
        jobs: Sequence[Job],
        on_retry: Callable[[str], None],
        on_failure: Callable[[int, str], None],
    ) -> Iterable[tuple[int, dict[str, Any]]]: ...


@dataclass(frozen=True)
class Sweep:
    """What is to be done. config: with weights one file, and absolute paths. sha256: of that file, hex.

    datasets: name of a task -> its data set. missing: names of tasks that have none.
    """

    config: VtabConfig
    sha256: str
    folder: Path
    datasets: dict[str, Dataset]
    missing: list[str]

    @property
    def tasks(self) -> list[Task]:
        return [task for task in TASKS if task.name in self.datasets]

    def identity(self) -> dict[str, Any]:
        """What every cell depends on beside itself."""
        protocol = self.config.protocol
        return {
            "format": "vit-vtab/1",
            "protocol": {"sha256": protocol_sha256(protocol), **schema.to_dict(protocol)},
            "method": self.config.method,
            "precision": self.config.precision,
            "checkpoint_sha256": self.sha256,
        }

    def searches(self) -> list[Cell]:
        """The cells that choose a setting of each task; none where there is one setting alone."""
        settings = settings_of(self.config.protocol)
        if self.config.method != "finetune" or len(settings) == 1:
            return []
        return [
            Cell(task, "search", setting, self.config.seeds[0], self.datasets[task.name].fingerprint)
            for task in self.tasks
            for setting in settings
        ]

    def finals(self, task: Task, setting: Setting | None) -> list[Cell]:
        """The cells that score a task with the setting chosen; of features one, in which nothing is random."""
        fingerprint = self.datasets[task.name].fingerprint
        if self.config.method != "finetune":
            return [Cell(task, "probe", None, self.config.seeds[0], fingerprint)]
        return [Cell(task, "final", setting, seed, fingerprint) for seed in self.config.seeds]


def run(config: VtabConfig, folder: Path, run_cells: RunCells) -> dict[str, Any] | None:
    """Run the cells that are not done, and write results.json, which is returned; None when it is only planned.

    folder: of the results (`output`), which nobody else works on. Raises UserError for a sweep that cannot be done or is
    another than the folder's; and, in the end, when a cell failed. All other results are there then.
    """
    sweep = open_sweep(config, folder)
    if config.plan:
        print_plan(sweep)
        return None
    _refuse_another_sweep(sweep)
    contamination = _contamination(sweep, config.pretrained_on)
    (folder / CELLS).mkdir(parents=True, exist_ok=True)

    # ---------------------------------------------------------------------- choose a setting of each task, then score it
    searches, settings = sweep.searches(), settings_of(config.protocol)
    # Which setting a task is scored with is not known yet, but how often.
    every = searches + [cell for task in sweep.tasks for cell in sweep.finals(task, settings[0])]
    outcomes = {cell: found for cell in searches if (found := _read(sweep, cell))}
    known_finals = [
        c for t in sweep.tasks if (s := _chosen(sweep, t, outcomes)[0]) for c in sweep.finals(t, s) if _read(sweep, c)
    ]
    _print_begin(sweep, len(every), len(outcomes) + len(known_finals))
    failed: dict[Cell, str] = {}
    board = Board([c.task.name for c in every], [c.task.name for c in [*outcomes, *known_finals]], folder)
    with board:
        _run(sweep, searches, outcomes, failed, board, run_cells)
        chosen = {task.name: _chosen(sweep, task, outcomes) for task in sweep.tasks}
        finals = [c for task in sweep.tasks if (s := chosen[task.name][0]) for c in sweep.finals(task, s)]
        outcomes |= {cell: found for cell in finals if (found := _read(sweep, cell))}
        _run(sweep, finals, outcomes, failed, board, run_cells)

    # ---------------------------------------------------------------------- the results
    scores = [_score(cell, outcomes[cell], chosen[cell.task.name][1]) for cell in finals if cell in outcomes]
    results = {
        "protocol": {"name": config.protocol.name, "sha256": protocol_sha256(config.protocol), **schema.to_dict(config.protocol)},
        "method": config.method,
        "checkpoint": {"path": sweep.config.weights, "sha256": sweep.sha256, "run_id": _pretraining_run(sweep.config.weights)},
        "data": {name: dataset.fingerprint for name, dataset in sweep.datasets.items()},
        "contamination": contamination,
        "scores": scores,
        "failed": [{"task": c.task.name, "cell": cell_name(c), "seed": c.seed, "reason": failed[c]} for c in [*searches, *finals] if c in failed],
        "missing": sweep.missing,
    }  # fmt: skip
    write_atomically(folder / RESULTS_FILE, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    _print_end(sweep, scores, folder)
    if failed:
        cell, reason = next(iter(failed.items()))
        raise UserError(
            f"{len(failed)} of {len(every):,} cells failed, such as {cell_name(cell)}: {reason} The same command tries them again; "
            f"all that is done is in {folder / RESULTS_FILE}."
        )
    return results


def output(config: VtabConfig) -> Path:
    """The folder of a sweep's results."""
    return output_folder(config.out, config.weights, "vtab", f"{config.protocol.name}-{config.method}").absolute()


def open_sweep(config: VtabConfig, folder: Path) -> Sweep:
    """Find the weights and the tasks' data sets. Raises UserError for what is not there, or does not fit."""
    known = [task.name for task in TASKS]
    if unknown := [name for name in config.tasks if name not in known]:
        raise UserError(f"tasks: there is no task {unknown[0]!r}. There are: {', '.join(known)}.")
    if "://" in config.data:
        raise UserError(
            f"data = {config.data}: every image is read hundreds of times, so copy the tasks' data sets to a disk."
        )
    weights = files.find_file(Path(config.weights)).absolute()
    datasets, missing = {}, {}
    for name in known:
        try:
            datasets[name] = open_dataset(Path(config.data).absolute() / name)
        except UserError as error:
            missing[name] = str(error)
    for name in config.tasks or known:
        if name in missing and (config.tasks or not datasets):
            raise UserError(
                f"{missing[name].partition(' Shard it')[0]} Make it with launch/vtab_prepare.py tasks=[{name}] ..."
            )
    datasets = {name: dataset for name, dataset in datasets.items() if name in (config.tasks or known)}
    config = replace(config, weights=str(weights), data=str(Path(config.data).absolute()))
    sweep = Sweep(config, file_sha256(weights), folder, datasets, list(missing))
    for task in sweep.tasks:
        _check_dataset(sweep, task)
    return sweep


def _check_dataset(sweep: Sweep, task: Task) -> None:
    dataset, protocol = sweep.datasets[task.name], sweep.config.protocol
    if lacking := {TRAIN, VAL, ALL, TEST} - set(dataset.splits):
        raise UserError(f"{dataset.path} has no split {min(lacking)!r}. Make it with launch/vtab_prepare.py.")
    for setting in settings_of(protocol) if sweep.config.method == "finetune" else ():
        for split in (TRAIN, ALL):
            warmup_steps(protocol, setting, dataset.info["samples"][split])


def settings_of(protocol: ProtocolConfig) -> list[Setting]:
    """Every setting that a protocol tries, in the order of its lists."""
    tried = itertools.product(protocol.length, protocol.lr, protocol.weight_decay)
    return [Setting(lr, weight_decay, length) for length, lr, weight_decay in tried]


def protocol_sha256(protocol: ProtocolConfig) -> str:
    """Hex digest of all its settings: the same for the same protocol, in whatever file it stands."""
    return hashlib.sha256(json.dumps(schema.to_dict(protocol), sort_keys=True).encode()).hexdigest()


def cell_name(cell: Cell) -> str:
    """Of its file."""
    if cell.setting is None:
        return f"{cell.task.name}-probe"
    setting, length = cell.setting, str(cell.setting.length).replace(" ", "_")
    return f"{cell.task.name}-{cell.stage}-lr{setting.lr!r}-wd{setting.weight_decay!r}-{length}-seed{cell.seed}"


def _run(
    sweep: Sweep, cells: list[Cell], outcomes: dict[Cell, dict[str, Any]], failed: dict[Cell, str], board: Board, run_cells: RunCells
) -> None:  # fmt: skip
    """Run those cells that have no outcome, and keep theirs."""
    waiting = [cell for cell in cells if cell not in outcomes]

    def fail(number: int, reason: str) -> None:
        failed[waiting[number]] = reason
        board.gave_up(waiting[number].task.name, _in_words(waiting[number]), reason)

    if waiting:
        for number, outcome in run_cells(run_cell, [Job(cell, sweep.config) for cell in waiting], board.retried, fail):
            cell = waiting[number]
            content = {"cell": cell_name(cell), **_identity(sweep, cell), "outcome": outcome}
            write_atomically(_file(sweep, cell), json.dumps(content, indent=1) + "\n")
            outcomes[cell] = outcome
            board.ended(cell.task.name, _in_words(cell), outcome)


def _file(sweep: Sweep, cell: Cell) -> Path:
    return sweep.folder / CELLS / f"{cell_name(cell)}.json"


def _identity(sweep: Sweep, cell: Cell) -> dict[str, Any]:
    """What a cell's outcome follows from, beside its name."""
    identity = sweep.identity()
    return {"fingerprint": cell.fingerprint, "seed": cell.seed, **identity, "protocol": identity["protocol"]["sha256"]}


def _read(sweep: Sweep, cell: Cell) -> dict[str, Any] | None:
    """The outcome of a cell that is done; None when it is not, or its file is not what we wrote."""
    try:
        content = json.loads(_file(sweep, cell).read_text())
        outcome = content.pop("outcome")
        return outcome if content == {"cell": cell_name(cell), **_identity(sweep, cell)} else None
    except (FileNotFoundError, ValueError, KeyError, AttributeError):
        return None


def _chosen(sweep: Sweep, task: Task, outcomes: dict[Cell, dict[str, Any]]) -> tuple[Setting | None, float | None]:
    """The setting of a task with the best accuracy on val200, and that; ties go to the lower rate, then to the shorter run.

    None as long as a cell of its search has no outcome: of fewer settings, another might be the best. Without a search
    the protocol's one, of unknown accuracy.
    """
    settings = settings_of(sweep.config.protocol)
    cells = [cell for cell in sweep.searches() if cell.task == task]
    if not cells:
        return settings[0], None
    if any(cell not in outcomes for cell in cells):
        return None, None

    def rank(cell: Cell) -> tuple[float, ...]:
        assert cell.setting is not None
        found = outcomes[cell]
        return found["accuracy"], -cell.setting.lr, -found["steps"], -cell.setting.weight_decay

    best = max(cells, key=rank)
    return best.setting, outcomes[best]["accuracy"]


def _score(cell: Cell, outcome: dict[str, Any], val_accuracy: float | None) -> dict[str, Any]:
    """A row of results.json."""
    setting = cell.setting
    return {
        "task": cell.task.name, "seed": cell.seed, "accuracy": outcome["accuracy"], "num_test": outcome["num_images"],
        "learning_rate": setting.lr if setting else None, "weight_decay": setting.weight_decay if setting else None,
        "steps": outcome["steps"], "val_accuracy": outcome.get("val_accuracy", val_accuracy),
        **{name: outcome[name] for name in ("l2", "neighbours") if name in outcome},
    }  # fmt: skip


def _refuse_another_sweep(sweep: Sweep) -> None:
    """A folder holds one sweep; its sweep.json says which. Tasks and seeds may be added."""
    file = sweep.folder / SWEEP_FILE
    now = {**sweep.identity(), "data": {name: dataset.fingerprint for name, dataset in sweep.datasets.items()}}
    then: dict[str, Any] = {}
    if file.exists():
        then = json.loads(file.read_text())
        old, new = (schema.flatten(of) for of in (then, now))
        others = [
            f"{name} was {old.get(name)}, is {new[name]}" for name in new if old.get(name, new[name]) != new[name]
        ]
        others += [f"{name} was {old[name]}" for name in old if name not in new and not name.startswith("data.")]
        if others:
            raise UserError(
                f"{sweep.folder} holds another sweep: {'; '.join(others)}. Choose another out=..., or remove the folder."
            )
        now["data"] = {**then["data"], **now["data"]}
    elif sweep.folder.exists() and (
        strangers := [p.name for p in sweep.folder.iterdir() if not p.name.startswith(".")]
    ):
        raise UserError(
            f"out = {sweep.folder} is not empty (it holds {strangers[0]}), and holds no sweep. Choose another folder."
        )
    if now != then:
        sweep.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(now, indent=1) + "\n")


def _contamination(sweep: Sweep, pretrained_on: str) -> dict[str, int | None]:
    """Task -> images of the pre-training data that are marked as copies of its test images; None where nobody looked."""
    found: dict[str, int | None] = dict.fromkeys(sweep.datasets)
    if not pretrained_on:
        return found
    path = Path(pretrained_on) / _DEDUP_REPORT
    try:
        report = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is not there. Make it with launch/dedup.py data={pretrained_on} against=...") from None
    trained = models.read_weights(sweep.config.weights)[2].get("fingerprint")
    if trained and trained != report["data"]["fingerprint"]:
        raise UserError(
            f"pretrained_on = {pretrained_on} is {report['data']['fingerprint']}, but the weights were trained on "
            f"{trained}."
        )
    if report["marked"]:
        copies = {
            part["fingerprint"]: part["copies"] for part in report["against"] if part["name"].endswith(f":{TEST}")
        }
        found = {name: copies.get(dataset.fingerprint) for name, dataset in sweep.datasets.items()}
    return found


def _pretraining_run(weights: str) -> str | None:
    """MLflow's id of the run whose folder a checkpoint lies in."""
    return next((found for folder in Path(weights).parents[:3] if (found := run_id_of(folder))), None)


def _in_words(cell: Cell) -> str:
    if cell.setting is None:
        return f"{cell.task.title}, features"
    return f"{cell.task.title}, {'search' if cell.stage == 'search' else 'final'}, {cell.setting}, seed {cell.seed}"


def _print_begin(sweep: Sweep, cells: int, done: int) -> None:
    protocol = sweep.config.protocol
    print(
        f"{sweep.config.weights} ({sweep.sha256[:16]}) on {len(sweep.datasets)} of {len(TASKS)} tasks by {protocol.name} "
        f"({protocol_sha256(protocol)[:16]}), {sweep.config.method}: {cells:,} cells, {done:,} of them done before",
        flush=True,
    )
    if sweep.missing:
        print(f"not prepared: {', '.join(sweep.missing)}", flush=True)
    for name, dataset in sweep.datasets.items():
        if not dataset.info["source"].get("vtab", {}).get("published", True):
            print(f"{name}: not the published files, so its score is not VTAB's", flush=True)


def _print_end(sweep: Sweep, scores: list[dict[str, Any]], folder: Path) -> None:
    """The table of tasks. The report beside published ones is another command's."""
    means = []
    for task in sweep.tasks:
        rows = [row for row in scores if row["task"] == task.name]
        if not rows:
            print(f"{task.title:<12}  no score")
            continue
        of_task = [row["accuracy"] for row in rows]
        means.append(mean(of_task))
        rate = f"  lr {rows[0]['learning_rate']:g}, {rows[0]['steps']:,} steps" if rows[0]["steps"] else ""
        deviation = f" ± {pstdev(of_task):.2%}" if len(rows) > 1 else ""
        print(
            f"{task.title:<12} {mean(of_task):>8.2%}{deviation}  ({len(rows)} seeds, {rows[0]['num_test']:,} images){rate}"
        )
    if means:
        print(f"mean of {len(means)} tasks: {mean(means):.2%}")
    print(f"results: {folder / RESULTS_FILE}", flush=True)


def print_plan(sweep: Sweep) -> None:
    """Every task's cells, and the arithmetic that they take."""
    protocol, config = sweep.config.protocol, sweep.config
    trained, _, _ = models.read_weights(config.weights)
    settings, total_flops, total_cells, total_done = settings_of(protocol), 0.0, 0, 0
    print(
        f"{'task':<12} {'side':>5} {'search':>7} {'final':>6} {'done':>5} {'trained on':>13} {'scored on':>11} {'PFLOP':>10}"
    )
    for task in sweep.tasks:
        dataset, size = sweep.datasets[task.name], view_of(protocol, task)[0]
        searches = [cell for cell in sweep.searches() if cell.task == task]
        outcomes = {cell: found for cell in searches if (found := _read(sweep, cell))}
        setting = _chosen(sweep, task, outcomes)[0]
        done = len(outcomes) + sum(1 for cell in sweep.finals(task, setting) if setting and _read(sweep, cell))
        finals = sweep.finals(task, settings[0])
        num = dataset.info["samples"]
        flops = models.training_flops_per_image(replace(trained, image_size=(size, size)))
        if config.method == "finetune":
            # Of several lengths, the final training may take any; the longest is counted.
            longest = max(s.length.steps(num[ALL], protocol.batch) for s in settings)
            of_search = sum(c.setting.length.steps(num[TRAIN], protocol.batch) for c in searches if c.setting)
            images = (of_search + longest * len(finals)) * protocol.batch
            scored = num[VAL] * len(searches) + num[TEST] * len(finals)
        else:
            images, scored = 0, num[TRAIN] + num[VAL] + num[TEST]
        work = flops * (images + scored / 3)
        total_flops, total_cells, total_done = (
            total_flops + work,
            total_cells + len(searches) + len(finals),
            total_done + done,
        )
        print(
            f"{task.title:<12} {size:>5} {len(searches):>7} {len(finals):>6} {done:>5} {images:>13,} {scored:>11,} {work / 1e15:>10,.1f}"
        )
    print(
        f"{total_cells:,} cells, {total_done:,} of them done; {total_flops / 1e15:,.1f} PFLOP in all, "
        f"{total_flops / 1e14 / 3600:,.2f} hours of a device that keeps up 100 TFLOP/s. Protocol {protocol.name} "
        f"({protocol_sha256(protocol)[:16]}), method {config.method}."
    )
    if sweep.missing:
        print(f"not prepared: {', '.join(sweep.missing)}")
