"""Continued weights and Muon on two ranks: the same at every ZeRO stage, and a restart changes no bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forge
from ranks import STEPS, metrics, settings
from test_objective import after_3, begin_again, tensors

from pipeline import model as models
from pipeline.checkpoint.sharded_tensors import ShardedTensors

# Objectives that continue weights, with new heads first: (loss, stage, precision, what is trained then).
OF_DINO = (
    "objective.prototypes=8",
    "objective.hidden=16",
    "objective.bottleneck=8",
    "objective.local_views=1",
    "objective.local_size=8",
    "objective.momentum=0.8",
    "objective.ibot_weight=0.5",
)
OF_LEJEPA = ("objective.local_views=0", "objective.hidden=16", "objective.width=8", "train.micro_batch=12")
OF_MAE = ("objective.decoder_width=16", "objective.decoder_depth=1", "objective.decoder_heads=2")
OF_LOSS = {"dino": OF_DINO, "lejepa": OF_LEJEPA, "mae": OF_MAE}
HEADS_FIRST = 2
WAYS = {
    "lora": ("train.freeze=backbone", "train.lora_rank=2", "train.lora_layers=[qkv]"),
    "block": ("train.freeze=all but 1 block",),
    "whole": ("optimizer.layer_decay=0.5",),
}
CONTINUED = [
    ("lejepa", 2, "bf16", "lora"),
    ("dino", 0, "fp32", "lora"),
    ("dino", 1, "bf16", "block"),
    ("dino", 1, "fp32", "whole"),
    ("dino", 3, "fp32", "lora"),
    ("mae", 3, "fp32", "lora"),
]
BY_MUON = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (1, "bf16"), (2, "bf16"), (2, "fp16")]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which stage 3 partitions the kernels."""
    file = tmp_path_factory.mktemp("weights") / "start.pt"
    models.save(models.create("ViT-Ti/8", 16, 7, depth=2, mlp_width=192, seed=5), file)
    return file


def name_of(loss: str, stage: int, precision: str, way: str) -> str:
    return f"{loss}-{stage}-{precision}-{way}"


@pytest.fixture(scope="module")
def continued(forge: Forge, dataset: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each of `CONTINUED` on two ranks; again from its third step; and again from there on one rank."""
    out = tmp_path_factory.mktemp("continued")

    def given(run: tuple[str, int, str, str], end: str = "") -> list[str]:
        loss, stage, precision, way = run
        return [
            *(text for text in settings(dataset, out, f"{name_of(*run)}{end}") if not text.startswith("model.")),
            f"init.weights={weights}",
            "model.image_size=16",
            f"train.loss={loss}",
            *OF_LOSS[loss],
            *WAYS[way],
            f"train.heads_first={HEADS_FIRST} steps",
            "optimizer.lr=0.003",
            "checkpoint.every=1 steps",
            "checkpoint.keep=9",
            "probe.every=3 steps",
            "probe.shots=0",
            "probe.neighbours=3",
            f"engine.zero_stage={stage}",
            f"engine.precision={precision}",
            *["train.micro_batch=24"] * (loss == "lejepa" and end == "-elsewhere"),
        ]

    forge.start(2, *map(given, CONTINUED)).finish()
    for run in CONTINUED:
        for end in ("-cut", "-elsewhere"):
            begin_again(out / name_of(*run), out / f"{name_of(*run)}{end}")
    forge.start(2, *(given(run, "-cut") for run in CONTINUED)).finish()
    forge.start(1, *(given(run, "-elsewhere") for run in CONTINUED)).finish()
    return out


@pytest.mark.parametrize("run", CONTINUED, ids=lambda run: name_of(*run))
def test_continued_weights_resume_exactly(continued: Path, run: tuple[str, int, str, str]) -> None:
    """The teacher's frozen weights are in no average, and must be those of the checkpoint all the same."""
    whole, cut, elsewhere = (continued / f"{name_of(*run)}{end}" for end in ("", "-cut", "-elsewhere"))
    for name in ("loss", "grad_norm"):
        assert after_3(metrics(whole, name)) == metrics(cut, name)
    for state in ("weights", "exp_avg", *(["ema"] if run[0] == "dino" else [])):
        expected, found = tensors(whole, STEPS, state), tensors(cut, STEPS, state)
        assert all(np.array_equal(array, found[name]) for name, array in expected.items())
    rounding = 3e-2 if run[2] == "bf16" else 1e-5
    np.testing.assert_allclose(list(metrics(elsewhere).values()), list(after_3(metrics(whole)).values()), rtol=rounding)


@pytest.mark.parametrize("run", CONTINUED, ids=lambda run: name_of(*run))
def test_new_heads_learn_first_and_frozen_weights_stay(
    continued: Path, weights: Path, run: tuple[str, int, str, str]
) -> None:
    folder, start = continued / name_of(*run), models.load(weights).state_dict()
    old = [name for name in start if not name.startswith(("head.", "representation."))]
    for step in range(1, STEPS + 1):
        found = tensors(folder, step, "weights")
        first = {name: start[name].bfloat16().float() if run[2] == "bf16" else start[name] for name in old}
        changed = {name for name in old if not np.array_equal(found[name], first[name])}
        factors = [array for name, array in found.items() if name.endswith(".up")]
        if step <= HEADS_FIRST:
            # Only bf16 is rounded in what is trained.
            assert {name for name in old if not np.allclose(found[name], first[name], atol=1e-2)} == set()
            assert not any(array.any() for array in factors)
            assert run[2] == "bf16" or not changed
        elif run[3] == "lora":
            assert not changed
            assert all(array.any() for array in factors)
        else:
            assert {name.startswith(("blocks.1.", "norm.")) for name in changed} == {True} or run[3] == "whole"
            assert "blocks.1.mlp.up.weight" in changed
    index = ShardedTensors.open(folder / "checkpoints" / f"step-{STEPS:08d}").index
    with_moments = {name for ranges in index.files.values() for name, *_ in ranges}
    assert ("blocks.0.mlp.up.weight" in with_moments) == (run[3] == "whole")
    added = {name for name in found if name.startswith("objective.") and name.endswith(("weight", "token"))}
    before = tensors(folder, 1, "weights")
    assert any(not np.array_equal(found[name], before[name]) for name in added)
    assert metrics(folder, "val_3nn").keys() == {0, HEADS_FIRST, 3, STEPS}


def test_stages_agree_with_factors_in_the_teacher(continued: Path) -> None:
    found, expected = (list(metrics(continued / f"dino-{stage}-fp32-lora").values()) for stage in (3, 0))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("loss", "state"), [("mae", "weights"), ("dino", "ema")])
def test_the_factors_are_in_what_is_exported(continued: Path, weights: Path, loss: str, state: str) -> None:
    """With a teacher, their average, which is another one than the last."""
    run, start = continued / f"{loss}-3-fp32-lora", models.load(weights).state_dict()
    exported, last, stored = models.load(run).state_dict(), tensors(run, STEPS, "weights"), tensors(run, STEPS, state)
    changed = {name for name, tensor in exported.items() if not torch.equal(tensor, start[name])}
    assert changed == {"blocks.0.attention.qkv.weight", "blocks.1.attention.qkv.weight"}
    name, factors = "blocks.1.attention.qkv.weight", "objective.lora.blocks/1/attention/qkv"
    change, of_last = (last[f"{factors}.scale"] * of[f"{factors}.up"] @ of[f"{factors}.down"] for of in (stored, last))
    np.testing.assert_allclose(exported[name] - start[name], change, atol=1e-6)
    assert np.abs(change).max() > 1e-4
    assert (np.abs(change - of_last).max() > 1e-5) == (state == "ema")


@pytest.fixture(scope="module")
def muon(forge: Forge, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each stage by Muon, each again from its third step, and one of stages 1 and 2 from there with one
    rank.
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

    forge.start_work(2, "test_train:train_with_fp16", [given(*stage) for stage in BY_MUON]).finish()
    for stage, precision in BY_MUON:
        for name in ("cut", "elsewhere"):
            begin_again(out / f"{stage}-{precision}", out / f"{stage}-{precision}-{name}")
    again = [[given(*stage, name) for stage in BY_MUON[first:]] for name, first in (("-cut", 0), ("-elsewhere", 1))]
    for world_size, runs in zip((2, 1), again, strict=True):
        forge.start_work(world_size, "test_train:train_with_fp16", runs).finish()
    return out


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


@pytest.mark.parametrize(("stage", "precision"), BY_MUON[1:])
def test_stages_and_numbers_of_ranks_are_the_same_but_for_rounding(muon: Path, stage: int, precision: str) -> None:
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    expected, found = metrics(muon / "0-fp32"), metrics(muon / f"{stage}-{precision}")
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=tolerance)
    elsewhere = metrics(muon / f"{stage}-{precision}-elsewhere")
    np.testing.assert_allclose(list(elsewhere.values()), list(after_3(found).values()), rtol=tolerance)
