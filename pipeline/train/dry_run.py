"""Dry run: one step and one evaluation batch of the largest shapes before training, so that out-of-memory shows at once.

So does an operation whose bits a GPU cannot repeat (engine.deterministic).
"""

import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pipeline import objectives
from pipeline.base.errors import OneRankError
from pipeline.base.words import counted
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.mix import draw_mixing
from pipeline.data.loading.views import Views
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig
from pipeline.train.loop import training_step
from pipeline.train.start import Prepared
from pipeline.train.zero.engine import Engine

# In torch's error for an operation, whose name it begins with, under engine.deterministic.
_NO_SUCH_KERNEL = " does not have a deterministic implementation"
# In the errors of torch.compile (engine.compile) without a C++ compiler for a CPU's kernels, and without Triton, or the C compiler
# that it needs, for a GPU's.
_NO_COMPILER = ("InvalidCxxCompiler", "Cannot find a working triton installation", "Failed to find C compiler")


def dry_run_on_all_ranks(engine: Engine, prepared: Prepared) -> None:
    """Run one training step and one batch of each evaluator, of the largest shapes; leaves no trace in model or optimizer.

    Call it before a checkpoint is loaded. Out of memory on any rank ends all ranks, with settings that need less.
    """
    config, data, plan = prepared.config, prepared.data, prepared.plan
    views = engine.objective.views(config)
    batch = _blank(plan.micro_batch, views, data.split.max_labels)
    micro_batches = [batch] * min(2, plan.accumulation)  # The second has gradients and activations in memory.
    mixing = draw_mixing(config.augment, config.model.image_size, config.seed, step=0)
    with engine.untouched(len(micro_batches)):
        training_step(engine, micro_batches, step=0, lr=0.0, mixing=mixing)
    if objectives.metrics(config)["scores"]:
        most = max(len(split) for _, split in data.evaluated.values())
        with _trial("evaluation", config, -(-most // plan.world_size)) as count:
            if engine.objective.predicts_classes:
                engine.forward(_images(count, config))
            else:
                engine.measure(_blank(count, views, 0))
    if probe := prepared.run_probe:
        read = [len(probe.labelled.choice.rows), len(probe.labelled.test)] if probe.labelled else []
        most = max(*read, min(config.probe.rankme_images, len(probe.own)), 0)
        with _trial("probe", config, most) as count:
            engine.features(_images(count, config))


@contextmanager
def _trial(what: str, config: RunConfig, most: int) -> Iterator[int]:
    """Context of a batch of an evaluator; yields its number of images. most: that a rank may get."""
    count = min(config.evaluate.batch, most)
    smaller = f"Use evaluate.batch={count // 2}." if count > 1 else "The batch is one image: use a larger GPU."
    with room(f"{what} with {counted(count, 'image')} (evaluate.batch = {config.evaluate.batch})", lambda: smaller):
        yield count


@contextmanager
def room(what: str, way_out: Callable[[], str]) -> Iterator[None]:
    """Context in which an out-of-memory error on one rank ends all ranks. what: is tried out. way_out: what takes less memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        operation, has_no_kernel, _ = reason.partition(_NO_SUCH_KERNEL)
        if has_no_kernel:
            raise OneRankError(
                f"torch has no kernel for {operation} that gives the same bits each time on this GPU. Use engine.deterministic=false "
                "(a resumed run then differs in the last bits), or compute it otherwise."
            ) from None
        if any(words in str(error) for words in _NO_COMPILER):
            what = "Triton and a C compiler" if torch.cuda.is_available() else "a C++ compiler (g++, or what CXX names)"
            raise OneRankError(
                f"engine.compile = true needs {what}, which {socket.gethostname()} does not have. Install it, or use engine.compile=false."
            ) from None
        if not _is_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # Frees tensors: the estimate below needs memory.
        where = f"{socket.gethostname()} ran out of memory before the first step, trying out {what}"
        raise OneRankError(f"{where}: {reason} {way_out()}") from None


def _is_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory. Only CUDA's allocator has an exception type; CPU, NCCL and cuBLAS have texts."""
    text = str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in text for words in ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
    )


def _images(count: int, config: RunConfig) -> Tensor:
    return torch.zeros(count, *config.model.image_size, 3, dtype=torch.uint8)


def _blank(count: int, views: tuple[Views, ...], num_labels: int) -> Batch:
    """A batch of black images of class 0."""
    return Batch(
        tuple(torch.zeros(group.count, count, *ImageSize.parse(group.size), 3, dtype=torch.uint8) for group in views),
        torch.zeros(count, num_labels, dtype=torch.int64),
        torch.ones(count, dtype=torch.bool),
        np.zeros(count, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
    )
