"""Imports DeepSpeed without MLflow and Inductor, which only unused parts of it need.

This saves every rank 4 of 12 s. Each patch is reverted at once, and if a later DeepSpeed is organised differently, the plain
import happens. To remove the patches, replace this file by `import deepspeed`.
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
# torch warns about the names of collectives that DeepSpeed uses; users cannot change that, and every rank would say it.
_COLLECTIVES = ".*(all_gather_into_tensor|reduce_scatter_tensor)"
warnings.filterwarnings("ignore", message=_COLLECTIVES, category=FutureWarning)


def _import_deepspeed() -> Any:
    with _without_mlflow():
        import deepspeed
    with contextlib.suppress(ImportError, AttributeError), _without_inductor():
        import deepspeed.runtime.zero.muon.original_muon  # Later imports find it here.
    # Set, because DeepSpeed would find out with the compiler which of its operators it can build. It asks for one alone, of
    # tensor-parallel inference, which on a CPU every rank would compile for a minute, to map 66 MiB of /dev/shm under a name
    # that outlives the rank.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    return deepspeed


@contextlib.contextmanager
def _without_mlflow() -> Iterator[None]:
    """Makes `import mlflow` fail: DeepSpeed's autotuner imports it if it is installed."""
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
    """Makes DeepSpeed's `compile` a no-op: Muon's functions are compiled at import, which would import Inductor."""
    from deepspeed.runtime import compiler

    compile_function, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
    try:
        yield
    finally:
        compiler.compile = compile_function


deepspeed = _import_deepspeed()
