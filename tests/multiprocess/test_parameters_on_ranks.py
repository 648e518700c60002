"""Frozen blocks and Muon on two ranks: the same at every ZeRO stage that has them, and a restart changes no bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forge
from ranks import STEPS, metrics, settings
from test_objective import after_3, begin_again, tensors

from pipeline import model as models

STAGES = [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32")]
BY_MUON = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (1, "bf16"), (2, "bf16"), (2, "fp16")]


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
        return [
            *run,
            f"init.weights={weights}",
            "init.new_head=true",
            "model.image_size=16",
            "train.freeze=1 block",
            "checkpoint.every=1 steps",
            "checkpoint.keep=9",
            f"engine.zero_stage={stage}",
            f"engine.precision={precision}",
        ]

    lora = ["train.freeze=backbone", "train.lora_rank=2", "train.lora_layers=[qkv]"]
    forge.start(2, *(given(*stage) for stage in STAGES), [*given(3, "fp32", "-lora"), *lora]).finish()
    for name in ("0", "1", "2", "3", "3-lora"):
        begin_again(out / name, out / f"{name}-cut")
    forge.start(2, *(given(*stage, "-cut") for stage in STAGES), [*given(3, "fp32", "-lora-cut"), *lora]).finish()
    return out


@pytest.fixture(scope="module")
def muon(forge: Forge, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each stage by Muon, each again from its third step, and one of stages 1 and 2 from there with one rank;
    a step is skipped.
    """
    out = tmp_path_factory.mktemp("muon")

    def given(stage: int, precision: str, name: str = "") -> list[str]:
        return settings(
            dataset,
            out,
            f"{stage}-{precision}{name}",
            "optimizer.name=muon",
            "checkpoint.every=1 steps",
            "checkpoint.keep=9",
            "optimizer.lr=0.003",
            f"engine.zero_stage={stage}",
            f"engine.precision={precision}",
        )

    forge.start_work(
        2, "distillation:train_losing", {"skipped": 4, "runs": [given(*stage) for stage in BY_MUON]}
    ).finish()
    for stage, precision in BY_MUON:
        for name in ("cut", "elsewhere"):
            begin_again(out / f"{stage}-{precision}", out / f"{stage}-{precision}-{name}")
    again = [[given(*stage, name) for stage in BY_MUON[first:]] for name, first in (("-cut", 0), ("-elsewhere", 1))]
    for world_size, runs in zip((2, 1), again, strict=True):
        forge.start_work(world_size, "distillation:train_losing", {"skipped": 4, "runs": runs}).finish()
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


def test_factors_of_low_rank_resume_and_are_in_the_weights(frozen: Path, weights: Path) -> None:
    whole, cut = frozen / "3-lora", frozen / "3-lora-cut"
    assert after_3(metrics(whole)) == metrics(cut)
    expected, found = (models.load(run).state_dict() for run in (whole, cut))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    start, stored = models.load(weights).state_dict(), tensors(whole, STEPS, "weights")
    changed = {
        name
        for name, tensor in start.items()
        if not torch.equal(tensor, expected[name]) and not name.startswith("head")
    }
    assert changed == {"blocks.0.attention.qkv.weight", "blocks.1.attention.qkv.weight"}
    name, factors = "blocks.1.attention.qkv.weight", "objective.lora.blocks/1/attention/qkv"
    change = stored[f"{factors}.scale"] * stored[f"{factors}.up"] @ stored[f"{factors}.down"]
    np.testing.assert_allclose(expected[name] - start[name], change, atol=1e-6)
    assert np.abs(change).max() > 1e-4


@pytest.mark.parametrize(("stage", "precision"), BY_MUON)
def test_a_restart_by_muon_changes_no_bit(muon: Path, stage: int, precision: str) -> None:
    whole, cut = muon / f"{stage}-{precision}", muon / f"{stage}-{precision}-cut"
    assert after_3(metrics(whole, "grad_norm")) == metrics(cut, "grad_norm")
    for state in ("weights", "exp_avg", "exp_avg_sq"):
        expected, found = tensors(whole, STEPS, state), tensors(cut, STEPS, state)
        assert all(np.array_equal(array, found[name]) for name, array in expected.items())
    second = tensors(whole, STEPS, "exp_avg_sq")
    assert {name for name, array in second.items() if not array.any()} >= {
        "blocks.0.attention.qkv.weight",
        "blocks.1.mlp.up.weight",
    }
    assert second["head.weight"].any()


@pytest.mark.parametrize(("stage", "precision"), BY_MUON)
def test_a_step_that_is_skipped_changes_nothing(muon: Path, stage: int, precision: str) -> None:
    for state in ("weights", "exp_avg"):
        before, after, end = (tensors(muon / f"{stage}-{precision}", step, state) for step in (4, 5, 6))
        assert all(np.array_equal(array, after[name]) for name, array in before.items())
        assert not np.array_equal(end["blocks.0.mlp.up.weight"], after["blocks.0.mlp.up.weight"])


@pytest.mark.parametrize(("stage", "precision"), BY_MUON[1:])
def test_stages_and_numbers_of_ranks_are_the_same_but_for_rounding(muon: Path, stage: int, precision: str) -> None:
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    expected, found = metrics(muon / "0-fp32"), metrics(muon / f"{stage}-{precision}")
    np.testing.assert_allclose(
        [found[n] for n in (1, 2, 3, 4, 6)], [expected[n] for n in (1, 2, 3, 4, 6)], rtol=tolerance
    )
    elsewhere = metrics(muon / f"{stage}-{precision}-elsewhere")
    np.testing.assert_allclose([elsewhere[n] for n in (4, 6)], [found[n] for n in (4, 6)], rtol=tolerance)
