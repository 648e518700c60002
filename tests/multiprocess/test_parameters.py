"""Frozen blocks on two ranks: nothing of them is in the optimizer at any ZeRO stage, and a restart changes no bit."""

from pathlib import Path

import numpy as np
import pytest
from forked import Forge
from ranks import STEPS, metrics, settings
from test_objective import after_3, begin_again, tensors

from pipeline import model as models

STAGES = [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32")]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which stage 3 partitions the kernels."""
    file = tmp_path_factory.mktemp("weights") / "start.pt"
    models.save(models.create("ViT-Ti/8", 16, 7, depth=2, mlp_width=192, seed=5), file)
    return file


@pytest.fixture(scope="module")
def frozen(forge: Forge, dataset: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each stage with one of two blocks frozen, and each again from its third step."""
    out = tmp_path_factory.mktemp("frozen")

    def given(stage: int, precision: str, name: str = "") -> list[str]:
        run = [text for text in settings(dataset, out, f"{stage}{name}") if not text.startswith("model.")]
        return [*run, f"init.weights={weights}", "init.new_head=true", "model.image_size=16", "train.freeze=1 block",
                "checkpoint.every=1 steps", "checkpoint.keep=9", f"engine.zero_stage={stage}", f"engine.precision={precision}"]  # fmt: skip

    forge.start(2, *(given(*stage) for stage in STAGES)).finish()
    for stage, _ in STAGES:
        begin_again(out / f"{stage}", out / f"{stage}-cut")
    forge.start(2, *(given(*stage, "-cut") for stage in STAGES)).finish()
    return out


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_frozen_blocks_stay_and_have_no_state(frozen: Path, weights: Path, stage: int, precision: str) -> None:
    run, start = frozen / f"{stage}", models.load(weights).state_dict()
    found = tensors(run, STEPS, "weights")
    assert found.keys() == start.keys()
    for name, array in found.items():
        stays = not name.startswith(("blocks.1", "norm", "head"))
        value = start[name].bfloat16().float() if precision == "bf16" else start[name]
        assert array.shape != value.shape if name.startswith("head") else np.array_equal(array, value) == stays, name
    state = frozen / f"{stage}/checkpoints/step-{STEPS:08d}"
    size = sum(file.stat().st_size for file in state.glob("rank-*.bin"))
    moving = sum(array.size for name, array in found.items() if name.startswith(("blocks.1", "norm", "head")))
    assert size == 4 * (sum(array.size for array in found.values()) + 2 * moving)  # Two moments of what is trained.


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_a_restart_of_a_frozen_run_changes_no_bit(frozen: Path, stage: int, precision: str) -> None:
    whole, cut = frozen / f"{stage}", frozen / f"{stage}-cut"
    assert after_3(metrics(whole)) == metrics(cut)
    assert max(metrics(cut)) == STEPS
    for state in ("weights", "exp_avg"):
        expected, found = tensors(whole, STEPS, state), tensors(cut, STEPS, state)
        assert all(np.array_equal(array, found[name]) for name, array in expected.items())
    if precision == "fp32":
        np.testing.assert_allclose(list(metrics(whole).values()), list(metrics(frozen / "0").values()), rtol=1e-5)
