"""`import deepspeed` in half the time: without MLflow and Inductor, which only parts that are not used here need.

The import takes 4 s less of every rank's 12 s. Each shortcut is undone at once and may fail: when a later DeepSpeed is
organised differently, it is imported as it is. To remove the shortcuts, replace this file by `import deepspeed`.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
# torch and DeepSpeed disagree on the name of a collective; a user can do nothing about it.
warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*", category=FutureWarning)


def _import_deepspeed() -> Any:
    with _without_mlflow():
        import deepspeed
    with contextlib.suppress(ImportError, AttributeError), _without_inductor():
        import deepspeed.runtime.zero.muon.original_muon  # Later imports find it here.
    # A collective of tensor-parallel inference. On a CPU every rank would compile it for a minute and map 66 MiB of
    # /dev/shm under a name that outlives the rank.
    with contextlib.suppress(AttributeError):
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def _without_mlflow() -> Iterator[None]:
    """Makes `import mlflow` fail: DeepSpeed's autotuner imports it, and does without when it is missing."""
    mlflow = sys.modules.pop("mlflow", None)
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["mlflow"]
        if mlflow is not None:
            sys.modules["mlflow"] = mlflow


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """Makes `torch.compile` a no-op: Muon's functions are compiled where they are defined, which imports Inductor."""
    from deepspeed.runtime import compiler

    compile_function, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
    try:
        yield
    finally:
        compiler.compile = compile_function


deepspeed = _import_deepspeed()
