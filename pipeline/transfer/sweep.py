"""The cells of a sweep, and the files in its folder that say what the cells belong to and which are done.

A cell's outcome is one small file, written atomically, which also holds everything that the outcome depends on.
"""

import hashlib
import itertools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import model as models
from pipeline.architecture.pixels import RGB8
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import write_text
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import INFO, Dataset, file_sha256, open_dataset
from pipeline.lifecycle.run_folder import holder
from pipeline.model import files
from pipeline.process.committed import NAME as CHECKPOINT
from pipeline.process.committed import run_of_checkpoint
from pipeline.settings import changes, schema
from pipeline.settings.changes import facts_of
from pipeline.settings.commands.transfer import ProtocolConfig, VtabConfig
from pipeline.transfer.vtab_cell import ALL, TEST, TRAIN, VAL, Setting, VtabCell, view_of, warmup_steps
from pipeline.transfer.vtab_tasks import TASKS, Task

SWEEP_FILE, CELLS = "sweep.json", "cells"
# `configs/vtab/NAME.yaml`, one per published protocol (`prepare.yaml` is not a protocol).
_PUBLISHED = Path(__file__).resolve().parents[2] / "configs" / "vtab"
_FACTS = facts_of(VtabConfig)
# The optional settings of the first protocols, which are in a protocol's digest always. Any other is only if it is set, so that
# digests stay when one is added.
_IN_EVERY_DIGEST = {
    "small_image_size",
    "small_resize_to",
    "pixels",
    "optimizer",
    "momentum",
    "weight_decay",
    "clip",
    "dropout",
    "l2",
    "neighbours",
    "temperature",
    "schedule.decay",
    "schedule.drops",
    "schedule.warmup",
    "schedule.final",
    "augment.crop",
    "augment.area_min",
    "augment.area_max",
    "augment.aspect_min",
    "augment.aspect_max",
    "augment.resize_to",
    "augment.flip",
    "augment.resize_filter",
    "augment.color_jitter",
    "augment.randaugment_layers",
    "augment.randaugment_magnitude",
    "augment.erase",
    "augment.mixup",
    "augment.cutmix",
    "augment.eval_resize",
    "augment.eval_crop",
}
Outcome = dict[str, Any]


@dataclass(frozen=True)
class _Outcome:
    """The fields of an outcome that are checked; there may be more."""

    accuracy: float
    num_images: int
    steps: int | None
    val_accuracy: float | None = None
    l2: float | None = None
    neighbours: int | None = None


@dataclass(frozen=True)
class _SweepFile:
    data: dict[str, str]


@dataclass(frozen=True)
class Sweep:
    """config: with absolute paths, weights a file. sha256: of that file, hex. folder: of the sweep's
    files. named: the weights as the command names them, such as a run that keeps its checkpoints elsewhere.

    datasets: task name -> data set. missing: names of tasks without one. notes: lines to print.
    unusable: file of an outcome -> reason why it cannot be used; these cells are run again.
    """

    config: VtabConfig
    sha256: str
    folder: Path
    datasets: dict[str, Dataset]
    missing: list[str]
    notes: list[str] = field(default_factory=list)
    unusable: dict[Path, str] = field(default_factory=dict)
    named: str = ""

    @property
    def unpublished(self) -> list[str]:
        """Names of the tasks that launch/vtab_prepare.py did not make of all published files: their scores are not VTAB's."""
        made = {name: dataset.info["source"].get("vtab", {}) for name, dataset in self.datasets.items()}
        return [name for name, of in made.items() if (of.get("task"), of.get("published")) != (name, True)]

    @property
    def tasks(self) -> list[Task]:
        return [task for task in TASKS if task.name in self.datasets]

    def searches(self, task: Task) -> list[VtabCell]:
        """The cells that choose a task's setting; none if the protocol has only one."""
        settings = settings_of(self.config.protocol)
        if self.config.method != "finetune" or len(settings) == 1:
            return []
        fingerprint = self.datasets[task.name].fingerprint
        return [VtabCell(task, "search", setting, self.config.seeds[0], fingerprint) for setting in settings]

    def finals(self, task: Task, setting: Setting) -> list[VtabCell]:
        """The cells that score a task with a setting, one per seed; a single one, of seed 0, for a probe, which draws nothing."""
        fingerprint = self.datasets[task.name].fingerprint
        if self.config.method != "finetune":
            return [VtabCell(task, "probe", None, 0, fingerprint)]
        return [VtabCell(task, "final", setting, seed, fingerprint) for seed in self.config.seeds]

    def chosen(self, task: Task, outcomes: dict[VtabCell, Outcome]) -> tuple[Setting | None, float | None]:
        """Returns (best setting, its accuracy on val200). Ties go to the lower rate, the shorter run, the lower weight decay.

        (None, None) while an outcome of the search is missing. Without a search: (the protocol's first setting, None).
        """
        cells = self.searches(task)
        if not cells:
            return settings_of(self.config.protocol)[0], None
        if any(cell not in outcomes for cell in cells):
            return None, None

        def rank(cell: VtabCell) -> tuple[float, ...]:
            assert cell.setting is not None
            outcome = outcomes[cell]
            return outcome["accuracy"], -cell.setting.lr, -outcome["steps"], -cell.setting.weight_decay

        best = max(cells, key=rank)
        return best.setting, outcomes[best]["accuracy"]

    def done(self, task: Task) -> dict[VtabCell, Outcome]:
        """The outcomes of a task's cells that are done."""
        found = {cell: outcome for cell in self.searches(task) if (outcome := self.read(cell))}
        setting, _ = self.chosen(task, found)
        finals = self.finals(task, setting) if setting else []
        return found | {cell: outcome for cell in finals if (outcome := self.read(cell))}

    def read(self, cell: VtabCell) -> Outcome | None:
        """The outcome of a cell; None if it is not done, or if its file cannot be used (see `unusable`)."""
        file = self.file_of(cell)
        try:
            content = json_record.read(file, dict[str, Any])
            outcome = json_record.convert(content.pop("outcome", None), dict[str, Any], str(file), "outcome")
            json_record.convert(outcome, _Outcome, str(file), "outcome")
            if other := [name for name, value in self._about(cell).items() if content.get(name) != value]:
                raise UserError(f"{file} is of another {other[0]}.")
        except FileNotFoundError:
            return None
        except UserError as error:
            self.unusable[file] = str(error)
            return None
        return outcome

    def write(self, cell: VtabCell, outcome: Outcome) -> None:
        write_text(self.file_of(cell), json.dumps({**self._about(cell), "outcome": outcome}, indent=1) + "\n")

    def claim(self) -> None:
        """Write sweep.json. Raises UserError if the folder holds another sweep, or other files.

        Tasks and seeds may be added to a sweep.
        """
        protocol = schema.to_dict(self.config.protocol)
        data = {name: dataset.fingerprint for name, dataset in self.datasets.items()}
        now, then = {"protocol": protocol, **self._identity(), "data": data}, dict[str, Any]()
        file = self.folder / SWEEP_FILE
        if file.exists():
            then = _read_sweep(file)
            before = {**then, "data": {**data, **then["data"]}}
            now["data"] = {**then["data"], **data}
            if others := changes.differences(schema.flatten(before), schema.flatten(now), _FACTS):
                raise UserError(
                    f"{self.folder} holds another sweep: {'; '.join(map(str, others))}. Choose another out=..., or remove the folder."
                )
        elif self.folder.exists() and (found := [p.name for p in self.folder.iterdir() if not p.name.startswith(".")]):
            raise UserError(
                f"out = {self.folder} is not empty (it holds {found[0]}), and holds no sweep. Choose another folder."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if now != then:
            write_text(file, json.dumps(now, indent=1) + "\n")
        # After sweep.json, without which a folder that is not empty is refused: a kill or a full disk may come between them.
        (self.folder / CELLS).mkdir(exist_ok=True)

    def file_of(self, cell: VtabCell) -> Path:
        """The file of a cell's outcome."""
        return self.folder / CELLS / f"{cell_name(cell)}.json"

    def _about(self, cell: VtabCell) -> dict[str, Any]:
        """Everything that a cell's outcome depends on."""
        return {
            "cell": cell_name(cell),
            "fingerprint": cell.fingerprint,
            "protocol_sha256": protocol_sha256(self.config.protocol),
            **self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        """What all outcomes of the sweep depend on, beside the protocol and the data."""
        config = self.config
        return {
            "method": config.method,
            "precision": config.precision,
            "micro_batch": config.micro_batch,  # Dropout masks are drawn per micro-batch.
            "checkpoint_sha256": self.sha256,
        }


def open_sweep(config: VtabConfig, folder: Path) -> Sweep:
    """Find the weights and the tasks' data sets. Raises UserError for what is missing, or does not suit the protocol."""
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
        path = Path(config.data).absolute() / name
        try:
            datasets[name] = open_dataset(path)
        except UserError as error:
            if (path / INFO).exists() and name in (config.tasks or known):
                raise  # It is prepared, but damaged: a sweep without it would not be what was asked for.
            missing[name] = str(error)
    for name in config.tasks or known:
        if name in missing and (config.tasks or not datasets):
            raise UserError(
                f"{missing[name].partition(' Shard it')[0]} Make it with launch/vtab_prepare.py tasks=[{name}] ..."
            )
    datasets = {name: dataset for name, dataset in datasets.items() if name in (config.tasks or known)}
    named = config.weights
    config = replace(config, weights=str(weights), data=str(Path(config.data).absolute()))
    sweep = Sweep(config, file_sha256(weights), folder, datasets, list(missing), named=named)
    for task in sweep.tasks:
        _check_dataset(sweep, task)
    if who := CHECKPOINT.fullmatch(weights.parent.name) and holder(
        run_of_checkpoint(weights) or weights.parent.parent.parent
    ):
        sweep.notes.append(
            f"the run of {weights.parent} is in training ({who}) and may remove this checkpoint, without which no cell can run: name one "
            "that is kept, or a copy"
        )
    _check_weights(sweep)
    return sweep


def _read_sweep(file: Path) -> dict[str, Any]:
    """The content of sweep.json. Raises UserError when it is damaged."""
    try:
        content = json_record.read(file, dict[str, Any])
        json_record.convert(content, _SweepFile, str(file))
        return content
    except UserError as error:
        raise UserError(
            f"{error} Remove this file and move {CELLS}/ aside, or choose another out=...: it says what the cells are of."
        ) from None


def _check_dataset(sweep: Sweep, task: Task) -> None:
    dataset, protocol = sweep.datasets[task.name], sweep.config.protocol
    dataset.refuse_without_labels("data", "Make it with launch/vtab_prepare.py.")
    if missing := {TRAIN, VAL, ALL, TEST} - set(dataset.splits):
        raise UserError(f"{dataset.path} has no split {min(missing)!r}. Make it with launch/vtab_prepare.py.")
    for name in (TRAIN, VAL, ALL, TEST):
        num_labels = np.diff(dataset.split(name, "none").label_offsets)
        # A probe would take no label, -1, for the last class, and no method learns the second of two.
        if others := int((num_labels != 1).sum()):
            raise UserError(
                f"{dataset.path}: {others:,} of {counted(len(num_labels), 'image')} of {name} have no label, or several, but a task of "
                "VTAB-1k has one for each. Make it with launch/vtab_prepare.py."
            )
    for setting in settings_of(protocol) if sweep.config.method == "finetune" else ():
        for split in (TRAIN, ALL):
            warmup_steps(protocol, setting, dataset.info["samples"][split])


def _check_weights(sweep: Sweep) -> None:
    """Raise UserError for weights of other than 8-bit RGB, and an image size that they cannot take, before Ray is started. Adds notes."""
    config, protocol = sweep.config, sweep.config.protocol
    weights, state = models.read_weights(config.weights)[:2]
    weights.pixels.refuse_others(RGB8, config.weights, "VTAB-1k")
    if config.method == "finetune" and protocol.dropout and isinstance(weights, models.ResNetConfig):
        raise UserError(
            f"protocol.dropout = {protocol.dropout}: {config.weights} is a ResNet, which has none. Use protocol.dropout=0."
        )
    for size in dict.fromkeys(view_of(protocol, task)[0] for task in sweep.tasks):
        try:
            resized = models.adapted(weights, config.weights, size)
            if isinstance(weights, models.ViTConfig) and isinstance(resized, models.ViTConfig):
                models.resample_state(state, weights, resized)
                sweep.notes.extend(models.resizing_notes(weights, resized))
        except UserError as error:
            name = "image_size" if size == protocol.image_size else "small_image_size"
            raise UserError(f"protocol.{name} = {size} does not suit {config.weights}: {error}") from None


def settings_of(protocol: ProtocolConfig) -> list[Setting]:
    """All settings that a protocol tries, in the order of its lists."""
    tried = itertools.product(protocol.length, protocol.lr, protocol.weight_decay)
    return [Setting(lr, weight_decay, length) for length, lr, weight_decay in tried]


def protocol_sha256(protocol: ProtocolConfig) -> str:
    """Hex digest of all settings of a protocol, independent of the file they come from."""
    settings, defaults = schema.to_dict(protocol), changes.defaults(ProtocolConfig)
    for name, value in schema.flatten(settings).items():
        if value == defaults[name] and name not in _IN_EVERY_DIGEST:
            section, _, field = name.rpartition(".")
            del (settings[section] if section else settings)[field]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def protocol_title(protocol: ProtocolConfig) -> str:
    """A protocol's name, with the settings that differ from the published one: 'peft_224, changed: image_size, lr'."""
    file = _PUBLISHED / f"{protocol.name}.yaml"
    if protocol.name == "prepare" or not file.exists():
        return protocol.name
    published = schema.load(VtabConfig, file, ["weights=any"]).protocol
    then, now = (schema.flatten(schema.to_dict(settings)) for settings in (published, protocol))
    changed = [name for name in now if now[name] != then[name]]
    return f"{protocol.name}, changed: {', '.join(changed)}" if changed else protocol.name


def cell_name(cell: VtabCell) -> str:
    """Name of a cell's file, without .json."""
    if cell.setting is None:
        return f"{cell.task.name}-probe"
    setting, length = cell.setting, str(cell.setting.length).replace(" ", "_")
    return f"{cell.task.name}-{cell.stage}-lr{setting.lr!r}-wd{setting.weight_decay!r}-{length}-seed{cell.seed}"


def score_row(cell: VtabCell, outcome: Outcome, val_accuracy: float | None = None) -> dict[str, Any]:
    """A row of results.json. val_accuracy: of the setting chosen; a probe's outcome has its own."""
    setting = cell.setting
    return {
        "task": cell.task.name,
        "seed": cell.seed,
        "accuracy": outcome["accuracy"],
        "num_test": outcome["num_images"],
        "learning_rate": setting.lr if setting else None,
        "weight_decay": setting.weight_decay if setting else None,
        "steps": outcome["steps"],
        "val_accuracy": outcome.get("val_accuracy", val_accuracy),
        **{name: outcome[name] for name in ("l2", "neighbours") if name in outcome},
    }
