"""Training steps on fake tensors of a GPU: no tensor is on the wrong device, and the host waits only where it is
documented.

Checks what needs neither a GPU nor values: devices, number types, host synchronisations. Streams, events, pinned
memory, kernels and NCCL are not covered.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import TINY

NOISE = ["model.dropout=0.1", "model.drop_path=0.2"]
CHECKPOINTING = ["engine.activation_checkpointing=true"]
MASKED = ["model.representation=false"]
TWO_BLOCKS = ["model.depth=2"]  # The first block drops no paths.
# Every ZeRO stage and precision that the settings allow; each with other models and settings.
CASES = {
    "0-fp32": ["augment.mixup=0.8", "train.label_smoothing=0.1", "optimizer.ema_decay=0.9"],
    "1-fp32": ["augment.cutmix=1", "train.loss=sigmoid", "optimizer.clip=0"],
    "2-fp32": ["optimizer.name=sgd", *NOISE, *TWO_BLOCKS],
    "3-fp32": ["model.pool=map", "model.positions=sincos2d", "optimizer.ema_decay=0.9"],
    "1-bf16": [*NOISE, *TWO_BLOCKS, *CHECKPOINTING, "augment.mixup=0.8", "augment.cutmix=1", "optimizer.ema_decay=0.9"],
    "2-bf16": [*MASKED, "train.loss=masked_pixels", *CHECKPOINTING],
    "3-bf16": ["model.name=R+Ti/16", "model.image_size=64"],  # Its layers are those of BiT.
    "2-fp16": [*MASKED, "train.loss=masked_mean_color", *NOISE],
    "3-fp16": ["model.positions=relative", *CHECKPOINTING, *NOISE],
    "3-bf16-dinov2": [
        "train.loss=dino",
        "objective.local_views=2",
        "objective.local_size=8",
        "objective.prototypes=16",
        "objective.ibot_weight=1",
        "objective.koleo_weight=0.1",
        "objective.centring=sinkhorn",
        *NOISE,
    ],
    "1-bf16-mae": [
        "train.loss=mae",
        "objective.decoder_width=32",
        "objective.decoder_depth=1",
        "objective.pixels=imagenet",
        *CHECKPOINTING,
    ],
    "2-bf16-lejepa": [
        "train.loss=lejepa",
        "objective.local_views=2",
        "objective.local_size=8",
        "objective.hidden=32",
        "objective.width=16",
        "train.micro_batch=4",
    ],
    "3-bf16-simclr": ["train.loss=simclr", "objective.hidden=32", "objective.width=16", "train.micro_batch=4"],
}
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


GUARD = {"read, zero/engine.py:_guard_gradient": 1}
NORM = "read, runtime/utils.py:is_invalid_grad_norm"
STAGE_1_2 = {NORM: 3, "copy to cuda, runtime/utils.py:mask_nan_or_inf_with_val_inplace": 2}
STAGE_1_BF16 = {
    NORM: 1,
    "copy to cuda, runtime/utils.py:mask_nan_or_inf_with_val_inplace": 1,
    "read, runtime/utils.py:clip_tensors_by_global_norm": 1,
}
STAGE_3 = {NORM: 1, "copy to cuda, zero/stage3.py:get_grad_norm_direct": 2}
# Where the host waits in a step of two micro-batches that logs nothing, and how often. docs/performance.md says why.
WAITS = {
    "0-fp32": GUARD,
    "1-fp32": {**STAGE_1_2, NORM: 1},  # Without clipping.
    "2-fp32": STAGE_1_2,
    "3-fp32": STAGE_3,
    "1-bf16": STAGE_1_BF16,
    "2-bf16": {**STAGE_1_2, "read, zero/stage_1_and_2.py:has_overflow": 1},
    "3-bf16": STAGE_3,
    "2-fp16": {**STAGE_1_2, "read, zero/stage_1_and_2.py:has_overflow": 1},
    "3-fp16": {**STAGE_3, "read, zero/stage3.py:has_overflow": 1},
    "3-bf16-dinov2": STAGE_3,
    "1-bf16-mae": STAGE_1_BF16,
    "2-bf16-lejepa": {**STAGE_1_2, "read, zero/stage_1_and_2.py:has_overflow": 1},
    "3-bf16-simclr": STAGE_3,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case found; all in one process of their own."""
    if torch.version.cuda:
        pytest.skip("torch has CUDA here, which the library of fake_gpu.cpp would stand in for")
    library = tmp_path_factory.mktemp("library") / "fake_gpu.so"
    source, of_torch = Path(fake_gpu.__file__).with_suffix(".cpp"), Path(torch.__file__).parent
    includes = [f"-I{of_torch / 'include'}", f"-L{of_torch / 'lib'}"]
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", *includes, "-o", library, source, "-lc10"], check=True)
    cases = {
        name: [*TINY, f"engine.zero_stage={name[0]}", f"engine.precision={name.split('-')[1]}", *more]
        for name, more in CASES.items()
    }
    done = subprocess.run(
        [sys.executable, fake_gpu.__file__, library, json.dumps(cases)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    return dict(json.loads(line.removeprefix("found ")) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_only_where_it_is_documented(name: str, found: dict[str, Any]) -> None:
    assert found[name]["syncs"] == WAITS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_devices_and_number_types_of_a_step(name: str, found: dict[str, Any]) -> None:
    """Dense layers and convolutions compute in the precision of training; loss and optimizer are fp32 on the GPU."""
    # DINO's KoLeo and sums of outputs, the statistics of LeJEPA and SimCLR.
    of_loss = ["torch.float32"] if name.endswith(("dinov2", "lejepa", "simclr")) else []
    assert found[name]["products"] == sorted({DTYPES[name.split("-")[1]], *of_loss})
    assert found[name]["loss"] == ["cuda:0", "torch.float32"]
    assert found[name]["states"] == ["cuda torch.float32"]
    assert found[name]["skipped"] == 0
