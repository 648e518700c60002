"""Saves without training: a small model's weights and moments, cut among any number of ranks as one likes.

Imports torch only when the model is made: a process without it is forked much faster.
"""

import os
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.architecture.variants import configure
from pipeline.checkpoint.store import Checkpoints, verify
from pipeline.checkpoint.writer import Commit, SaveJob, save
from pipeline.data.storage.bucket import BucketPath

CONFIG = configure("ViT-mu/8", 16, 3, width=8, depth=1, mlp_width=8, num_heads=1)
STATES = ("weights", "exp_avg")


@cache
def tensors(step: int) -> dict[str, dict[str, np.ndarray]]:
    """state -> name -> float32 array, other ones for each step."""
    from pipeline.model import build

    weights = build(CONFIG, seed=step).state_dict()
    return {state: {n: t.numpy() + np.float32(i) for n, t in weights.items()} for i, state in enumerate(STATES)}


@cache
def metadata(step: int) -> dict[str, str]:
    """Of model.safetensors."""
    from pipeline.model import safetensors_metadata

    return safetensors_metadata(CONFIG, {"step": step})


def cut(names: dict[str, np.ndarray], world_size: int) -> list[list[tuple[str, int, int]]]:
    """Ranges for each rank: all tensors one after another, cut into equal parts, as ZeRO-1 does."""
    total = sum(array.size for array in names.values())
    bounds = [total * rank // world_size for rank in range(world_size + 1)]
    found = []
    for begin, end in pairwise(bounds):
        ranges, at = [], 0
        for name, array in names.items():
            low, high = max(begin, at), min(end, at + array.size)
            if low < high:
                ranges.append((name, low - at, high - low))
            at += array.size
        found.append(ranges)
    return found


def job(
    folder: Path | BucketPath,
    step: int,
    rank: int = 0,
    world_size: int = 1,
    token: str = "t",
    keep: int = 2,
    damaged: Sequence[str] = (),
    always: bool = False,
    retry: float = 5.0,
    **state: Any,
) -> tuple[SaveJob, int]:
    """One rank's job of a save, and the memory that holds its data (a file descriptor)."""
    data = tensors(step)
    ranges = cut(data["weights"], world_size)[rank]
    memory = os.memfd_create("test")
    with open(memory, "wb", closefd=False) as file:
        for arrays in data.values():
            for name, start, length in ranges:
                file.write(arrays[name].reshape(-1)[start : start + length].tobytes())
    shapes = {name: list(array.shape) for name, array in data["weights"].items()}
    commit = Commit(
        {"step": step, **state},
        shapes,
        metadata(step),
        keep,
        list(damaged),
        always,
    )
    return SaveJob(
        str(folder), retry, step, token, rank, world_size, list(STATES), ranges, commit if rank == 0 else None
    ), memory


def save_all(folder: Path | BucketPath, step: int, world_size: int = 2, **more: Any) -> None:
    """A whole save, by every rank's writer; rank 0's last, so that it need not wait."""
    for rank in reversed(range(world_size)):
        work, memory = job(folder, step, rank, world_size, **more)
        try:
            save(work, memory)
        finally:
            os.close(memory)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest_complete(folder: Path) -> str | None:
    return next((path.name for path in Checkpoints(folder).candidates() if verify(path) is None), None)
