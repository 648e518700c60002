"""Scores of weights on VTAB-1k's 19 tasks by a protocol: an experiment whose runs are small cells, each in the process
of its task.

experiment.json  protocol, method, weights, data. A folder holds one sweep.
cells/*.json     outcome of each cell that is done
results.json     protocol, weights, data, and a score for each task and seed
"""

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import model as models
from pipeline.architecture.pixels import RGB8
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import write_text
from pipeline.base.trained_on import TRAINED_BY, not_held_out, recorded, trained_by
from pipeline.base.words import counted
from pipeline.cluster.ray_tasks import RunJobs, shared_path
from pipeline.data.dataset.manifest import INFO, Dataset, open_dataset
from pipeline.data.storage.checksums import digest_of
from pipeline.evaluate.loaded_model import output_folder
from pipeline.experiment import engine, vtab_report
from pipeline.experiment.engine import Experiment, ExperimentAnswer, ExperimentPage, read_note, uri_of_runs, with_note
from pipeline.experiment.table import TO_RUN, Row, read_table
from pipeline.experiment.vtab_cell import (
    ALL,
    TEST,
    TRAIN,
    VAL,
    Setting,
    SweepJob,
    VtabCell,
    run_cell,
    view_of,
    warmup_steps,
)
from pipeline.experiment.vtab_report import TITLES, column_of, unpublished_warning
from pipeline.experiment.vtab_tasks import TASKS, Task
from pipeline.model import files, published
from pipeline.monitor.export import run_of_weights, tracked_folder_of
from pipeline.monitor.mlflow.weights import with_local_weights
from pipeline.monitor.origin import find_origin
from pipeline.monitor.run_page import RunFacts, split_facts
from pipeline.process.outputs import hold
from pipeline.settings import schema
from pipeline.settings.commands.transfer import ProtocolConfig, VtabConfig
from pipeline.settings.run import TrackConfig
from pipeline.settings.schema import Fact, facts_of, without_effect

# `configs/vtab/NAME.yaml`, one per published protocol (`prepare.yaml` is not a protocol).
_PUBLISHED = Path(__file__).resolve().parents[2] / "configs" / "vtab"


def run(config: VtabConfig, run_jobs: RunJobs | None = None) -> dict[str, Any] | None:
    """Run the cells that are not done, write results.json and return its content; None with config.plan.

    run_jobs: where cells are run; by default as Ray tasks. Raises UserError for a sweep that cannot run or differs from
    the folder's, and at the end if a cell failed; all other results are written then.
    """
    config = with_local_weights(config)
    if not published.is_of_hub(config.weights):  # These are in the cache of each node.
        shared_path("weights", config.weights)
    shared_path("data", config.data)
    folder = Path(str(shared_path("out", str(output(config)))))
    if not config.plan:
        hold(folder)
    sweep = Sweep(config, folder)
    print("\n".join([*without_effect(config), *engine.plan_lines(sweep, sweep.known()[1], {})]), flush=True)
    if config.plan:
        return None
    return engine.run(sweep, run_jobs or engine.on_ray(config.threads, config.gpu_share, config.num_tasks))


def output(config: VtabConfig) -> Path:
    """The folder of a sweep's results. Raises UserError for a path that is a file."""
    name = f"{config.protocol.name}-{config.method}"
    return output_folder(config.out, config.weights, "vtab", name, holds="experiment")


def tracking_uri(config: VtabConfig) -> str:
    """Where a sweep is sent to; "" for mlflow=none."""
    out = str(Path(config.out).parent) if config.out else "runs"
    return uri_of_runs(config.mlflow, TrackConfig(uri=os.environ.get("MLFLOW_TRACKING_URI", "")), out)


class Sweep(Experiment):
    """config: with absolute paths, weights a file. sha256: of that file, hex. datasets: of the tasks that are
    scored, by name. missing: names of tasks without one.

    Raises UserError for what is missing, or does not suit the protocol.
    """

    config: VtabConfig
    kind, score, work = "vtab", "accuracy", staticmethod(run_cell)

    def __init__(self, config: VtabConfig, folder: Path) -> None:
        self.folder, self.named = folder, config.weights
        self.datasets, self.missing = _open_datasets(config)
        file = files.find_file(Path(config.weights)).absolute()
        self.sha256 = digest_of(file)
        self.config = config = replace(config, weights=str(file), data=str(Path(config.data).absolute()))
        self.tasks = [task for task in TASKS if task.name in self.datasets]
        for task in self.tasks:
            _check_dataset(self, task)
        # Those that launch/vtab_prepare.py did not make of all published files: their scores are not VTAB's.
        made = {name: dataset.info["source"].get("vtab", {}) for name, dataset in self.datasets.items()}
        self.unpublished = [name for name, of in made.items() if (of.get("task"), of.get("published")) != (name, True)]
        protocol, weights = config.protocol, models.read_weights(config.weights)
        self.model, sets = weights.config, recorded(weights.extra)
        runs = {name: trained_by(sets, dataset.fingerprint, TEST) for name, dataset in self.datasets.items()}
        self.trained_by = {name: names for name, names in runs.items() if names}
        self.notes = [
            f"{file} ({self.sha256[:16]}) on {len(self.tasks)} of {counted(len(TASKS), 'task')} by"
            f" {protocol_title(protocol)} ({protocol_sha256(protocol)[:16]}), {config.method}",
            *_check_weights(self, weights),
            *[f"not prepared: {', '.join(self.missing)}"] * bool(self.missing),
            *unpublished_warning(self.unpublished),
            *[f"{name}: {not_held_out(TEST, names)}" for name, names in self.trained_by.items()],
        ]
        data = {f"data.{name}": dataset.fingerprint for name, dataset in self.datasets.items()}
        self.shared = {"checkpoint_sha256": self.sha256, **data}
        settings: list[Setting | None] = [*settings_of(protocol)]
        stage, seeds = "final", config.seeds
        if config.method != "finetune":  # A probe draws nothing.
            stage, settings, seeds = "probe", [None], [0]
        tried = settings if len(settings) > 1 else []
        searches = [self._cell(task, "search", setting, seeds[0]) for task in self.tasks for setting in tried]
        # The chosen setting may be unknown yet, but not the number of final cells.
        finals = [
            self._cell(task, stage, settings[0], seed, choose=partial(self._choose, task, seed) if tried else None)
            for task in self.tasks
            for seed in seeds
        ]
        self.specs = [*searches, *finals]

    # ---------------------------------------------------------------- cells
    def _cell(self, task: Task, stage: Any, setting: Setting | None, seed: int, **more: Any) -> VtabCell:
        dataset, protocol = self.datasets[task.name], self.config.protocol
        num = dataset.info["samples"]
        train, tested = (TRAIN, VAL) if stage == "search" else (ALL, TEST)
        steps = setting.length.steps(num[train], protocol.batch) if setting else 0
        side = view_of(protocol, task)[0]
        flops = models.training_flops_per_image(replace(self.model, image_size=(side, side)))
        scored = num[tested] if setting else num[ALL] + num[TEST]
        facts = {
            "data_size": num[train],
            "steps": steps,
            "images_seen": steps * protocol.batch,
            "exaflops": flops * (steps * protocol.batch + scored / 3) / 1e18,
        }
        return VtabCell(task, stage, setting, seed, dataset.fingerprint, facts=facts, **more)

    def _choose(self, task: Task, seed: int, rows: Mapping[str, Row]) -> VtabCell | None:
        """The final cell with the setting that is best on val200; None while an outcome of the search is missing. Ties
        go to the lower rate, the shorter run, the lower weight decay.
        """
        cells = [cell for cell in self.specs if cell.stage == "search" and cell.task == task]
        if any(rows[cell.name].state in TO_RUN for cell in cells):
            return None

        def rank(cell: VtabCell) -> tuple[float, ...]:
            assert cell.setting
            row = rows[cell.name]
            return row.scores["accuracy"], -cell.setting.lr, -row.steps, -cell.setting.weight_decay

        best = max(cells, key=rank)
        return self._cell(task, "final", best.setting, seed, val_accuracy=rows[best.name].scores["accuracy"])

    # ---------------------------------------------------------------- what the engine asks
    @property
    def flops(self) -> float:
        return 1e18 * float(sum(cell.facts["exaflops"] for cell in self.specs))

    def job(self, specs: list[VtabCell], page: ExperimentPage | None) -> SweepJob:
        return SweepJob(specs[0], self.config, self.sha256)

    def ended(self, spec: VtabCell, found: dict[str, Any]) -> None:
        file = self._file_of(spec)
        file.parent.mkdir(exist_ok=True)
        write_text(file, json.dumps(found, indent=1) + "\n")

    def settings(self, specs: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """Settings of the sweep; those of the cells are in their names. Dropout masks are drawn per micro-batch."""
        protocol = schema.flatten({"protocol": schema.to_dict(self.config.protocol)})
        return {"this sweep": protocol | self._own_settings()}

    def _own_settings(self) -> dict[str, Any]:
        return {name: getattr(self.config, name) for name in ("method", "precision", "micro_batch")}

    def known_settings(self) -> Mapping[str, Fact]:
        return facts_of(VtabConfig)

    def _file_of(self, cell: VtabCell) -> Path:
        return self.folder / "cells" / f"{cell.name}.json"

    def row(self, spec: VtabCell) -> Row:
        tried = spec.setting
        settings: dict[str, Any] = {
            "stage": spec.stage,
            "learning_rate": tried and tried.lr,
            "weight_decay": tried and tried.weight_decay,
            "length": tried and str(tried.length),
            "val_accuracy": spec.val_accuracy,
            "data": spec.fingerprint,
            "published": spec.group not in self.unpublished,
            TRAINED_BY: self.trained_by.get(spec.group),
        }
        row = Row(spec.name, spec.group, spec.seed, settings=settings, **spec.facts)
        try:
            found = json_record.read(self._file_of(spec), dict[str, Any])
        except FileNotFoundError:
            return with_note(row, read_note(self.folder, spec.name))
        except UserError as error:
            return replace(row, state="damaged", reason=str(error))
        known = [name for name in ("val_accuracy", "l2", "diverged", "device") if found.get(name) is not None]
        return replace(
            row,
            state="done",
            scores={"accuracy": found["accuracy"]},
            num_test={"accuracy": found["num_images"]},
            loss=found.get("loss"),
            hours=found["seconds"] / 3600,
            settings=settings | {name: found[name] for name in known},
        )

    # ---------------------------------------------------------------- the answer
    def results(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The content of results.json."""
        names, order, protocol = {row.name for row in rows}, list(TITLES), self.config.protocol
        # Those of tasks and seeds that this start leaves out are kept. The first row of a task and seed counts.
        known = [*rows, *(row for row in read_table(self.folder) if row.name not in names)][::-1]
        done = [row for row in known if row.state == "done" and row.settings["stage"] != "search"]
        scored = {(order.index(row.group), row.seed): row for row in done}
        of_task = {row.group: row.settings for row in [*scored.values(), *rows]}
        of_task = {task: of_task[task] for task in order if task in of_task}
        title, sha256 = protocol_title(protocol), protocol_sha256(protocol)
        return {
            "protocol": {**schema.to_dict(protocol), "name": title, "sha256": sha256},
            **self._own_settings(),
            "checkpoint": {
                "path": self.config.weights,
                "sha256": self.sha256,
                "run_id": run_of_weights(self.named),
            },
            "data": {task: settings["data"] for task, settings in of_task.items()},
            TRAINED_BY: {task: runs for task, settings in of_task.items() if (runs := settings.get(TRAINED_BY))},
            "unpublished": [task for task, settings in of_task.items() if not settings["published"]],
            "scores": [
                {
                    "task": row.group,
                    "seed": row.seed,
                    "accuracy": row.scores["accuracy"],
                    "num_test": row.num_test["accuracy"],
                    "steps": row.steps or None,
                    **{name: row.settings.get(name) for name in ("learning_rate", "weight_decay", "val_accuracy")},
                    **{name: value for name, value in row.settings.items() if name == "l2"},
                }
                for _, row in sorted(scored.items())
            ],
            "failed": [
                {"task": row.group, "cell": row.name, "seed": row.seed, "reason": row.reason}
                for row in rows
                if row.state == "failed"
            ],
            "missing": [name for name in self.missing if name not in of_task],
        }

    def answer(self, rows: Sequence[Row]) -> ExperimentAnswer:
        results = self.results(rows)
        column = column_of(f"{self.config.method} by {results['protocol']['name']}", results)
        states = [row.state for row in rows]
        metrics = {f"cells_{state}": float(states.count(state)) for state in ("done", "failed")}
        metrics["cells_diverged"] = float(sum(bool(row.settings.get("diverged")) for row in rows))
        if not set(states) & set(TO_RUN):
            metrics |= vtab_report.metrics_of(column)
        answer = ExperimentAnswer(metrics, result=results)
        answer.files = {"results.json": json.dumps(results, indent=1, ensure_ascii=False) + "\n"}
        if column.tasks:
            answer.files |= vtab_report.page(column)
            answer.summary = vtab_report.summary(column)
        return answer

    def page(self) -> ExperimentPage | None:
        uri = tracking_uri(self.config)
        return ExperimentPage(self.facts(), self.folder, self.folder.parent, uri, "vtab") if uri else None

    def facts(self) -> RunFacts:
        config, results = self.config, self.results(list(self.known()[1].values()))
        run, run_id = tracked_folder_of(self.named), results["checkpoint"]["run_id"]
        tags = {**vtab_report.tags_of(results), "dataset": "VTAB-1k", "run_folder_path": str(self.folder.resolve())}
        datasets = []
        for task, dataset in self.datasets.items():
            training, test = (split_facts(task, dataset, *of) for of in ((ALL, "training"), (TEST, "evaluation")))
            if task in self.trained_by:
                test.notes[TRAINED_BY] = self.trained_by[task]
            datasets += [training, test]
        weights = Path(config.weights)
        return RunFacts(
            f"{run.name if run else weights.stem} {config.protocol.name}-{config.method}",
            "vtab",
            schema.flatten({"protocol": results["protocol"]}) | self._own_settings() | {"seeds": config.seeds},
            tags,
            tuple(datasets),
            f"**VTAB-1k of `{weights.name}`**, {counted(len(self.specs), 'cell')}: {'. '.join(self.notes)}."
            " `results.csv` among the artifacts has a row for each cell.",
            {"parent": str(run_id)} if run_id else {},
            score="vtab_mean",
            scored_on="mean of VTAB-1k",
            origin=find_origin(weights, self.named),
        )


def _open_datasets(config: VtabConfig) -> tuple[dict[str, Dataset], list[str]]:
    """Returns (data sets by task, names of tasks without one)."""
    if unknown := [name for name in config.tasks if name not in TITLES]:
        raise UserError(f"tasks: there is no task {unknown[0]!r}. There are: {', '.join(TITLES)}.")
    if "://" in config.data:
        raise UserError(
            f"data = {config.data}: every image is read hundreds of times, so copy the tasks' data sets to a disk."
        )
    paths = {name: Path(config.data).absolute() / name for name in TITLES}
    missing = [name for name, path in paths.items() if not (path / INFO).exists()]
    asked = config.tasks or [name for name in TITLES if name not in missing] or list(TITLES)
    for name in asked:
        if name in missing:
            raise UserError(f"{paths[name]}: no such data set. Make it with launch/vtab_prepare.py tasks=[{name}] ...")
    return {name: open_dataset(path) for name, path in paths.items() if name in asked}, missing


def _check_dataset(sweep: Sweep, task: Task) -> None:
    dataset, protocol = sweep.datasets[task.name], sweep.config.protocol
    dataset.refuse_without_labels("data", "Make it with launch/vtab_prepare.py.")
    for name in (TRAIN, VAL, ALL, TEST):
        num_labels = dataset.split(name, "none").label_counts
        # A probe would take no label, -1, for the last class, and no method learns the second of two.
        if others := int((num_labels != 1).sum()):
            raise UserError(
                f"{dataset.path}: {others:,} of {counted(len(num_labels), 'image')} of {name} have no label, or"
                " several, but a task of VTAB-1k has one for each. Make it with launch/vtab_prepare.py."
            )
    for setting in settings_of(protocol) if sweep.config.method == "finetune" else ():
        for split in (TRAIN, ALL):
            warmup_steps(protocol, setting, dataset.info["samples"][split])


def _check_weights(sweep: Sweep, weights: models.Weights) -> list[str]:
    """Notes on the weights. Raises UserError for weights of other than 8-bit RGB, and an image size that they cannot
    take, before Ray is started.
    """
    config, protocol, model, notes = sweep.config, sweep.config.protocol, weights.config, list[str]()
    model.pixels.refuse_others(RGB8, config.weights, "VTAB-1k")
    if config.method == "finetune" and protocol.dropout and isinstance(model, models.ResNetConfig):
        raise UserError(
            f"protocol.dropout = {protocol.dropout}: {config.weights} is a ResNet, which has none. Use"
            " protocol.dropout=0."
        )
    for size in dict.fromkeys(view_of(protocol, task)[0] for task in sweep.tasks):
        try:
            resized = models.adapted(model, config.weights, size)
            if isinstance(model, models.ViTConfig) and isinstance(resized, models.ViTConfig):
                models.resample_state(weights.state, model, resized)
                notes += models.resizing_notes(model, resized)
        except UserError as error:
            name = "image_size" if size == protocol.image_size else "small_image_size"
            raise UserError(f"protocol.{name} = {size} does not suit {config.weights}: {error}") from None
    return notes


def settings_of(protocol: ProtocolConfig) -> list[Setting]:
    """All settings that a protocol tries, in the order of its lists."""
    tried = itertools.product(protocol.length, protocol.lr, protocol.weight_decay)
    return [Setting(lr, weight_decay, length) for length, lr, weight_decay in tried]


def protocol_sha256(protocol: ProtocolConfig) -> str:
    """Hex digest of all settings of a protocol, independent of the file they come from."""
    return hashlib.sha256(json.dumps(schema.to_dict(protocol), sort_keys=True).encode()).hexdigest()


def protocol_title(protocol: ProtocolConfig) -> str:
    """A protocol's name, with the settings that differ from the published one: 'peft_224, changed: image_size, lr'."""
    file = _PUBLISHED / f"{protocol.name}.yaml"
    if protocol.name == "prepare" or not file.exists():
        return protocol.name
    published = schema.load(VtabConfig, file, ["weights=any"]).protocol
    then, now = (schema.flatten(schema.to_dict(settings)) for settings in (published, protocol))
    changed = [name for name in now if now[name] != then[name]]
    return f"{protocol.name}, changed: {', '.join(changed)}" if changed else protocol.name
