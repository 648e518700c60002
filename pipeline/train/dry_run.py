"""A step and an evaluation of a run's largest shapes before its first step: memory that is too small shows in a minute."""

import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from pipeline.data.dataset.split import Split
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.mix import draw_mixing
from pipeline.errors import OneRankError
from pipeline.estimate.memory import what_takes_less
from pipeline.estimate.plan import Plan
from pipeline.lifecycle.stop import Stop
from pipeline.model import Config
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig
from pipeline.train.loop import training_step
from pipeline.train.objective import Objective
from pipeline.train.zero.engine import Engine


@contextmanager
def room_for_training(config: RunConfig, plan: Plan, model: Config, stop: Stop) -> Iterator[None]:
    """Inside, a rank that runs out of memory ends all ranks, with settings that take less."""
    with _room("training", lambda: what_takes_less(config, plan, model), stop):
        yield


def dry_run_on_all_ranks(
    config: RunConfig, plan: Plan, engine: Engine, objective: Objective, split: Split, evaluation: Split, stop: Stop
) -> None:  # fmt: skip
    """One training step and one batch of evaluation, of the largest shapes; leaves everything as it was.

    Before anything is loaded. Where a rank runs out of memory, all ranks end with what would take less.
    """
    batch = _blank(plan.micro_batch, config.model.image_size, split.max_labels)
    micro_batches = [batch] * min(2, plan.accumulation)  # At the second one there are gradients beside the activations.
    mixing = draw_mixing(config.augment, config.model.image_size, config.seed, step=0)
    with engine.untouched(len(micro_batches)):
        training_step(engine, objective, micro_batches, step=0, lr=0.0, mixing=mixing)
    count = min(config.evaluate.batch, -(-len(evaluation) // plan.world_size))
    smaller = f"Use evaluate.batch={count // 2}." if count > 1 else "It is one image: use a larger GPU."
    with _room(f"evaluation of evaluate.batch = {count} images", lambda: smaller, stop):
        batch = _blank(count, config.model.image_size, 0)
        engine.forward(batch.images, *objective.extra_inputs(batch, engine.ranks.device))


@contextmanager
def _room(what: str, way_out: Callable[[], str], stop: Stop) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        traceback.clear_frames(error.__traceback__)  # What they hold: it takes a little memory to say what would help.
        where = f"{socket.gethostname()} ran out of memory before the first step, trying out {what}"
        stop.refuse(OneRankError(f"{where}: {reason} {way_out()}"))


def _is_of_memory(error: BaseException) -> bool:
    """torch has an exception of its own on a GPU; its allocator on a CPU has not, nor have NCCL and cuBLAS."""
    said = str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in said for words in ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
    )


def _blank(count: int, image_size: ImageSize, num_labels: int) -> Batch:
    """Black images of class 0."""
    return Batch(
        torch.zeros(count, *image_size, 3, dtype=torch.uint8),
        torch.zeros(count, num_labels, dtype=torch.int64),
        torch.ones(count, dtype=torch.bool),
        np.zeros(count, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
    )
