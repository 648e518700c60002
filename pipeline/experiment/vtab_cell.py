"""One cell of a sweep: adapt weights to one task with one setting and score them. One process, one device.

Without DeepSpeed, because 1,000 images need neither ranks nor checkpoints, and its start alone takes as long as a small
cell. Step, loader, order, schedule, optimizer, loss and score are the code that training uses. The outcome is a
function of the cell, the sweep's protocol, method, precision and micro_batch, the weights and the data; on a CPU with
the same number of threads it is the same to the last bit.

Shapes: B batch, S image side, K classes, D features.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from pipeline import model as models
from pipeline.architecture.pixels import RGB8
from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted, on_one_line
from pipeline.data.dataset.manifest import Dataset, Split, open_dataset
from pipeline.data.dataset.split import BadBudget
from pipeline.data.loading.loader import Loader, normalise, train_requests
from pipeline.data.loading.mix import draw_mixing
from pipeline.data.loading.order import SampleOrder
from pipeline.data.loading.views import remembering_train_view
from pipeline.data.storage.bucket import to_path
from pipeline.data.storage.checksums import digest_of
from pipeline.evaluate.classify import extract, label_table, predict, score
from pipeline.evaluate.loaded_model import check_outputs
from pipeline.evaluate.probes import fewshot
from pipeline.evaluate.split_reader import SplitReader
from pipeline.experiment.vtab_tasks import Task
from pipeline.model import Model
from pipeline.model.convert.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from pipeline.monitor.profile import StepClock
from pipeline.objectives.classification import Classification
from pipeline.objectives.objective import Inputs, Objective
from pipeline.objectives.parameters import optimizers
from pipeline.objectives.parameters.optimizers import learning_rate
from pipeline.process.distributed import Ranks, seed_torch, use_exact_arithmetic
from pipeline.settings.commands.transfer import ProtocolConfig, VtabConfig
from pipeline.settings.quantities import Length
from pipeline.settings.run import AugmentConfig, OptimizerConfig
from pipeline.train.loop import training_step

TRAIN, VAL, ALL, TEST = "train800", "val200", "train800val200", "test"
# Steps between two checks of the loss, which wait for the device.
_CHECK_EVERY = 50


@dataclass(frozen=True)
class Setting:
    """One combination of the values that a protocol's lists try."""

    lr: float
    weight_decay: float
    length: Length

    def __str__(self) -> str:
        return f"lr {self.lr:g}, weight decay {self.weight_decay:g}, {self.length}"


@dataclass(frozen=True)
class VtabCell:
    """stage: search trains on train800 and scores on val200; final trains on both and scores on test; probe does both,
    on features. setting: None for a probe. fingerprint: of the task's data set. val_accuracy: of the
    setting, where it was chosen. choose, facts: as of a `RunSpec`.
    """

    task: Task
    stage: Literal["search", "final", "probe"]
    setting: Setting | None
    seed: int
    fingerprint: str
    val_accuracy: float | None = None
    choose: Callable[..., "VtabCell | None"] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    needs: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """Name of its file, without .json."""
        if self.setting is None:
            return f"{self.task.name}-probe"
        setting, length = self.setting, str(self.setting.length).replace(" ", "_")
        return f"{self.task.name}-{self.stage}-lr{setting.lr!r}-wd{setting.weight_decay!r}-{length}-seed{self.seed}"

    @property
    def group(self) -> str:
        return self.task.name


@dataclass(frozen=True)
class SweepJob:
    """A cell and the settings of its sweep, where config.weights is a file. sha256: of that file, hex."""

    cell: VtabCell
    config: VtabConfig
    sha256: str


def run_cell(job: SweepJob) -> dict[str, Any]:
    """Run a cell; runs as a Ray task. Returns its outcome: accuracy in [0, 1] of num_images, steps, seconds, device and
    more.

    Raises UserError, which is not retried, for another data set or other weights than the cell's, unreadable images,
    and a final training that diverged.
    """
    begin = time.perf_counter()
    cell, config = job.cell, job.config
    dataset = open_dataset(to_path(config.data) / cell.task.name)
    if dataset.fingerprint != cell.fingerprint:
        raise UserError(f"{dataset.path} has changed: it was {cell.fingerprint}, and is {dataset.fingerprint}.")
    try:
        sha256 = digest_of(Path(config.weights))
    except OSError as error:
        raise UserError(f"{on_one_line(error)} on this host. Put it on storage that all nodes share.") from error
    if sha256 != job.sha256:
        raise UserError(
            f"{config.weights} has changed, or is another file on this host: its SHA-256 was {job.sha256[:16]}, and is"
            f" {sha256[:16]}. Put the first file back, or score this one with another out=..."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(config.threads)
    use_exact_arithmetic(device)
    adapt = probe if cell.stage == "probe" else finetune
    outcome = adapt(cell, config, dataset, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {**outcome, "seconds": round(time.perf_counter() - begin, 2), "device": name}


def finetune(cell: VtabCell, config: VtabConfig, dataset: Dataset, device: torch.device) -> dict[str, Any]:
    """Train all weights with the cell's setting and a new zero head, and score them."""
    protocol = config.protocol
    train, tested = (dataset.split(name, "none") for name in ((TRAIN, VAL) if cell.stage == "search" else (ALL, TEST)))
    size, augment = view_of(protocol, cell.task)
    model = models.load(
        config.weights,
        image_size=size,
        num_classes=dataset.num_classes,
        new_head=True,
        dropout=protocol.dropout,
        drop_path=0.0,
        seed=cell.seed,
        pixels=RGB8,
    ).to(device)
    steps, diverged = train_model(model, train, cell, config, device)
    outcome: dict[str, Any] = {"steps": steps, "num_images": len(tested), "accuracy": 0.0}
    read = reader(protocol, model, device)
    logits = _arithmetic(config, device)(lambda images: model(read(images)).float())
    if not diverged:
        model.eval()
        seen = predict(logits, _reading(tested, size, augment, config, device), "softmax")
        scores = score(seen, tested, dataset.num_classes)
        if math.isfinite(scores.loss):
            return {**outcome, "accuracy": scores.top1, "loss": scores.loss}
        diverged = steps  # By the last update, after which no loss of the training is computed.
    if cell.stage == "final":
        raise UserError(f"{cell.task.name} diverged by step {diverged} with {cell.setting}, seed {cell.seed}.")
    return {**outcome, "diverged": diverged}  # With accuracy 0 the setting is not chosen.


def train_model(
    model: Model, split: Split, cell: VtabCell, config: VtabConfig, device: torch.device
) -> tuple[int, int]:
    """Train in place. Returns (number of steps, step by which the loss was non-finite, or 0)."""
    protocol, setting, batch = config.protocol, cell.setting, config.protocol.batch
    assert setting is not None
    steps = setting.length.steps(len(split), batch)
    warmup = warmup_steps(protocol, setting, len(split))
    size, augment = view_of(protocol, cell.task)
    read = reader(protocol, model, device)
    objective = Classification(model, "softmax", read=lambda pixels, _: read(pixels))
    optimizer = optimizers.build(
        objective,
        objective.decayed(),
        OptimizerConfig(
            name=protocol.optimizer, lr=setting.lr, momentum=protocol.momentum, weight_decay=setting.weight_decay
        ),
    )
    order = SampleOrder(split.shard_sizes, cell.seed, batch, streams=1, window=len(split))
    accumulation = -(-batch // config.micro_batch)
    view = remembering_train_view(augment, cell.seed, size, _image_cache(cell.fingerprint, split.name, size, augment))
    clock = StepClock(torch.device("cpu"))
    trainer = _PlainTrainer(objective, optimizer, config, cell.seed, Ranks(0, 0, 1, device), clock)
    with Loader(
        split, view, config.threads, prefetch=2 * accumulation, max_bad_share=0.0, pin=device.type == "cuda"
    ) as loader:
        batches = loader.batches(train_requests(order, 0, steps, config.micro_batch, rank=0, world_size=1))
        for step in range(steps):
            lr = learning_rate(protocol.schedule, setting.lr, step, steps, warmup)
            mixing = draw_mixing(augment, size, cell.seed, step)
            loss = training_step(trainer, list(islice(batches, accumulation)), step, lr, mixing).loss
            # Now and then is enough, because weights that are non-finite once remain so.
            is_checked = step % _CHECK_EVERY == 0 or step + 1 == steps
            if is_checked and not math.isfinite(float(loss)):
                return steps, step + 1
    return steps, 0


@dataclass
class _PlainTrainer:
    """Trains an objective on one device without DeepSpeed, with the interface that `training_step` needs."""

    objective: Objective
    optimizer: torch.optim.Optimizer
    config: VtabConfig
    seed: int
    ranks: Ranks
    clock: StepClock
    step: int = 0

    def begin_step(self, step: int, lr: float) -> None:
        self.step = step
        self.objective.train()
        optimizers.set_rates(self.optimizer, step, lr)

    def seed_dropout(self, micro_batch: int) -> None:
        seed = random_numbers.torch_seed(self.seed, Purpose.DROPOUT, self.step, 0, micro_batch)
        seed_torch(seed, self.ranks.device.type == "cuda")

    def loss(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        with _arithmetic(self.config, self.ranks.device):
            return self.objective(inputs.views, inputs.facts)

    def backward(self, loss: Tensor, share: float) -> None:
        (loss * share).backward()

    def update(self, is_last: bool) -> None:
        if not is_last:
            return
        if self.config.protocol.clip:
            torch.nn.utils.clip_grad_norm_(self.objective.parameters(), self.config.protocol.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end_step(self) -> float:
        return math.nan


def probe(cell: VtabCell, config: VtabConfig, dataset: Dataset, device: torch.device) -> dict[str, Any]:
    """Score ridge regression on features, with the strength (l2) that is best on val200."""
    protocol = config.protocol
    size, augment = view_of(protocol, cell.task)
    model = models.load(config.weights, image_size=size, num_classes=0, pixels=RGB8).to(device)
    read = reader(protocol, model, device)
    features = _arithmetic(config, device)(lambda images: model.features(read(images)))
    values, labels = {}, {}
    for name in (TRAIN, VAL, TEST):
        split = dataset.split(name, "none")
        seen = extract(features, _reading(split, size, augment, config, device), np.arange(len(split)))
        check_outputs(config.weights, f"{cell.task.name}, {name}", seen, split)
        values[name], labels[name] = seen.values, label_table(split)[:, 0]
    # train800val200 consists of these two.
    values[ALL], labels[ALL] = (np.concatenate([part[TRAIN], part[VAL]]) for part in (values, labels))
    ridges = {train: fewshot.fit(values[train], labels[train], dataset.num_classes) for train in (TRAIN, ALL)}

    def accuracy(l2: float, train: str, tested: str) -> float:
        return float((ridges[train](values[tested], l2).argmax(1) == labels[tested]).mean())

    tried = {l2: accuracy(l2, TRAIN, VAL) for l2 in protocol.l2}
    best = max(tried, key=lambda l2: (tried[l2], -l2))
    outcome = {"accuracy": accuracy(best, ALL, TEST), "num_images": len(values[TEST]), "steps": None}
    return {**outcome, "val_accuracy": tried[best], "l2": best}


def view_of(protocol: ProtocolConfig, task: Task) -> tuple[int, AugmentConfig]:
    """Returns (image side, pre-processing) for a task, without flip or crop where these would change the label."""
    augment = replace(protocol.augment, flip=protocol.augment.flip and task.flip)
    if not task.crop:
        augment = replace(augment, crop="none")
    if task.small and protocol.small_image_size:
        small = protocol.small_image_size
        # As in an evaluation at another size, so that the same part of the image is seen.
        eval_resize = round(augment.eval_resize * small / protocol.image_size)
        return small, replace(augment, resize_to=protocol.small_resize_to, eval_resize=eval_resize)
    return protocol.image_size, augment


def warmup_steps(protocol: ProtocolConfig, setting: Setting, num_samples: int) -> int:
    """Warm-up steps of a setting on `num_samples` samples. Raises UserError if they are not fewer than all steps."""
    steps = setting.length.steps(num_samples, protocol.batch)
    warmup = protocol.schedule.warmup.steps(num_samples, protocol.batch, steps)
    if warmup >= steps:
        raise UserError(
            f"protocol.schedule.warmup = {protocol.schedule.warmup} is {counted(warmup, 'step')}, but a training of"
            f" {setting.length} has {steps:,}. Use protocol.schedule.warmup=5%."
        )
    return warmup


def reader(protocol: ProtocolConfig, model: Model, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Returns the function uint8 (B, S, S, 3) -> float32 (B, 3, S, S) on the device, normalised for the model."""
    read_as = RGB8 if protocol.pixels == "imagenet" else model.config.pixels
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))

    def read(images: Tensor) -> Tensor:
        pixels = normalise(images, device, torch.float32, read_as)
        return (pixels * 0.5 + 0.5 - mean) / std if protocol.pixels == "imagenet" else pixels

    return read


@lru_cache(maxsize=1)
def _image_cache(fingerprint: str, split: str, image_size: int, augment: AugmentConfig) -> dict[int, np.ndarray]:
    """Decoded images of a split, kept for the next cell of the same task if it runs in the same process."""
    return {}


def _arithmetic(config: VtabConfig, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def _reading(split: Split, size: int, augment: AugmentConfig, config: VtabConfig, device: torch.device) -> SplitReader:
    """A reader that allows no unreadable image: a score on fewer images is not comparable."""
    budget = BadBudget(0.0, "", "Make the data set again with launch/vtab_prepare.py.")
    return SplitReader(split, size, augment, config.micro_batch, config.threads, Ranks(0, 0, 1, device), budget=budget)
