"""A compiled model trains as the plain one. Beside the other tests of ranks: Inductor takes half a minute of compilers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forked import ENVIRONMENT
from ranks import metrics, settings
from test_train import plain_losses


def train_compiled(overrides: list[str]) -> None:
    """In a process of its own; says how many graphs were made."""
    from forked import train
    from torch._dynamo.utils import counters

    train([overrides])
    print("graphs", counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_losses_of_a_compiled_model_equal_plain_pytorch(dataset: Path, tmp_path: Path) -> None:
    more = ["model.depth=1", "train.micro_batch=24", "evaluate.every=100%", "checkpoint.every=100%"]
    run = settings(dataset, tmp_path, "compiled", "engine.compile=true", *more)
    code = f"import sys; sys.path[:] = {sys.path}; from test_compile import train_compiled; train_compiled({json.dumps(run)})"
    # One thread: otherwise Inductor starts processes that import torch, one for each core. And it would compile a library for each of
    # the processor's instruction sets, to find out whether the compiler and Python can do what the kernels then show.
    inductor = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    environment = {**os.environ, **ENVIRONMENT, **inductor}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split("graphs ")[1]) >= 1, "it was compiled"
    found = metrics(tmp_path / "compiled")
    expected = plain_losses(settings(dataset, tmp_path, "plain", "model.depth=1"))
    np.testing.assert_allclose([found[s] for s in sorted(found)], expected, rtol=2e-5)
