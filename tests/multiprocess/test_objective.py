"""Objectives that add to the backbone: exact after a restart, and on other ranks; DINO, with a frozen parameter, at
every ZeRO stage.
"""

import hashlib
import importlib
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from distillation import FROZEN_STEPS, MOMENTUM, SETTINGS
from forked import Forge
from ranks import STEPS, metrics, settings
from tiny import make_dataset

from pipeline import model as models
from pipeline.architecture.objectives import OBJECTIVES
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.cluster.status_files import RESUME
from pipeline.monitor.page_folder import PageFolder
from pipeline.monitor.run_page import TEACHER_TAG

STAGES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
OF_EACH = ("model.representation=false", "checkpoint.every=1 steps", "checkpoint.keep=9")
OF_RUN = (
    "train.loss=distillation",
    *OF_EACH,
    "optimizer.layer_decay=0.5",
    "optimizer.weight_decay_end=0.5",
    "evaluate.every=3 steps",
    "schedule.decay=constant",
    "model.width=160",
    "optimizer.lr=0.0003",
    *SETTINGS,
)
ADDED = ("centre", "patch_centre", "mixer", "head.last.weight", "mask_token")
# Another objective at a stage of its own, each stopped by SIGTERM in its third step of six. What it logs, and what it
# adds.
OTHERS = {
    "mae": (
        (
            "model.name=ViT-Ti/4",
            "objective.decoder_width=16",
            "objective.decoder_depth=1",
            "objective.decoder_heads=2",
            "engine.zero_stage=3",
        ),
        ("loss", "grad_norm", "val_loss"),
        "mask_token",
    ),
    "distill": (
        ("model.name=ViT-Ti/4", "engine.zero_stage=3"),
        ("loss", "grad_norm", "explained"),
        "patch_head.1.weight",
    ),
    "lejepa": (
        (
            "objective.local_views=2",
            "objective.local_size=8",
            "objective.hidden=32",
            "objective.width=16",
            "train.micro_batch=12",
            "engine.zero_stage=2",
            "engine.precision=bf16",
        ),
        ("loss", "sigreg", "prediction", "grad_norm"),
        "projector.last.weight",
    ),
    "anchored": (
        (
            "train.loss=dino",
            *SETTINGS,
            "objective.gram_weight=5",
            "objective.gram_size=32",
            "augment.crop=random_resized",
            "augment.color_jitter=0.4",
            "engine.zero_stage=3",
        ),
        ("loss", "grad_norm", "gram_loss", "val_loss"),
        "head.last.weight",
    ),
    "simclr": (
        (
            "objective.hidden=32",
            "objective.width=16",
            "train.micro_batch=12",
            "engine.zero_stage=3",
            "probe.every=3 steps",
            "probe.shots=0",
            "probe.neighbours=5",
        ),
        ("loss", "pair_accuracy", "grad_norm", "val_5nn"),
        "projector.last.weight",
    ),
    # Of a data set with numbers.
    "regression": (
        ("model.name=ViT-Ti/4", "engine.zero_stage=2", "augment.mixup=0.2"),
        ("loss", "grad_norm", "val_r2", "val_rmse_blue", "val_loss"),
        "scale.mean",
    ),
}
# In this order in one process: stage 3 replaces torch's linear function for good, by one with other bits in bf16.
RUNS = (
    "lejepa",
    *(f"{stage}-{precision}" for stage, precision in STAGES),
    "mae",
    "distill",
    "anchored",
    "simclr",
    "regression",
)
# The file of weights that is read at each start.
TAUGHT = {"distill": ("teacher.pt", "objective.teacher"), "anchored": ("begun.pt", "init.weights")}


@pytest.fixture(scope="module")
def runs(forge: Forge, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each stage on two ranks; each again from its third step; and two from there with one rank."""
    out = tmp_path_factory.mktemp("objective")
    numbers = make_dataset(out / "numbers", {"train": 150, "val": 37}, labelled=False, targets=["red", "blue"])
    for file, _ in TAUGHT.values():
        models.save(models.build(models.configure("ViT-mu/8", 16, 10, width=48)), out / file)

    def given(run: str, name: str = "", *more: str) -> list[str]:
        if run in OTHERS:
            return of_other(numbers if run == "regression" else dataset, out, run, name, *more)
        stage, precision = run.split("-")
        of_stage = (f"engine.zero_stage={stage}", f"engine.precision={precision}")
        return settings(dataset, out, f"{run}{name}", *OF_RUN, *of_stage, *more)

    forge.start_work(2, "distillation:train_planted", list(map(given, RUNS))).finish()
    for run in ("2-fp32", *OTHERS):
        stopped = forge.start_work(2, "distillation:train_stopped", given(run, "-cut"))
        assert stopped.wait() == [RESUME, RESUME], stopped.said()
        assert (stopped.said().count(f"step {STEPS}/"), stopped.said().count("step 3/")) == (0, 1)
    elsewhere = ["1-fp32", "3-fp32", *OTHERS]
    for run in RUNS:
        for name in ["-cut"] * (not (out / f"{run}-cut").exists()) + ["-elsewhere"] * (run in elsewhere):
            begin_again(out / run, out / f"{run}{name}")
    forge.start_work(2, "distillation:train_planted", [given(run, "-cut") for run in RUNS]).finish()
    alone = [given(run, "-elsewhere", *["train.micro_batch=24"] * (run in ("lejepa", "simclr"))) for run in elsewhere]
    forge.start_work(1, "distillation:train_planted", alone).finish()
    return out


def of_other(dataset: Path, out: Path, run: str, name: str = "", *more: str) -> list[str]:
    """Settings of one of OTHERS, which learns what it is called by default."""
    found = settings(dataset, out, f"{run}{name}", *OF_EACH)
    if run in TAUGHT:
        file, setting = TAUGHT[run]
        found.append(f"{setting}={out / file}")
        if setting == "init.weights":
            found = [each for each in found if not each.startswith("model.") or "image_size" in each]
    return [*found, *[f"train.loss={run}"] * (run in OBJECTIVES), *OTHERS[run][0], *more]


def begin_again(run: Path, copy: Path) -> None:
    """A copy of a run as a kill after step 3 leaves it."""
    shutil.copytree(run, copy)
    for step in range(4, STEPS + 1):
        shutil.rmtree(copy / "checkpoints" / f"step-{step:08d}")
    (copy / "metrics.jsonl").unlink()


def first_4(values: dict[int, float]) -> dict[int, float]:
    """Differences of rounding in bf16 grow with each step."""
    return {step: value for step, value in values.items() if step <= 4}


def after_3(values: dict[int, float]) -> dict[int, float]:
    return {step: value for step, value in values.items() if step > 3}


def tensors(run: Path, step: int, state: str) -> dict[str, np.ndarray]:
    return ShardedTensors.open(run / "checkpoints" / f"step-{step:08d}").full_tensors(state)


@pytest.mark.parametrize("run", RUNS)
def test_a_restart_changes_no_bit(runs: Path, run: str) -> None:
    """After a kill, and after SIGTERM (of 2-fp32 and OTHERS)."""
    whole, cut = runs / run, runs / f"{run}-cut"
    _, names, *added = OTHERS.get(run, ((), ("loss", "grad_norm", "teacher_entropy", "ibot_loss", "val_loss"), *ADDED))
    for name in names:
        expected, found = metrics(whole, name), metrics(cut, name)
        assert found == {step: expected[step] for step in found}
        # The evaluation of step 3, which a kill prevents, is made up.
        assert found.keys() >= ({3, STEPS} if name.startswith("val_") else {4, STEPS})
    for state in ("weights", "exp_avg", *(["ema"] if run not in OTHERS or run == "anchored" else [])):
        whole_ones, cut_ones = tensors(whole, STEPS, state), tensors(cut, STEPS, state)
        assert {f"objective.{name}" for name in added} <= whole_ones.keys()
        assert not [name for name in whole_ones if "teacher" in name]
        assert all(np.array_equal(array, cut_ones[name]) for name, array in whole_ones.items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_learns_the_same(runs: Path, stage: int) -> None:
    """The teacher is read in each forward pass, so its losses are equal only if it is refreshed equally."""
    expected, found = metrics(runs / "0-fp32"), metrics(runs / f"{stage}-fp32")
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)
    expected_weights, found_weights = (tensors(runs / f"{s}-fp32", STEPS, "weights") for s in (0, stage))
    for name, array in expected_weights.items():
        if name.endswith("weight"):  # The gradient of a key's bias is rounding alone.
            np.testing.assert_allclose(found_weights[name], array, rtol=1e-3, atol=2e-5, err_msg=name)
    bf16 = first_4(metrics(runs / f"{stage}-bf16"))
    np.testing.assert_allclose(list(bf16.values()), list(first_4(metrics(runs / "1-bf16")).values()), rtol=3e-2)


@pytest.mark.parametrize("run", ["1-fp32", "3-fp32", *OTHERS])
def test_another_number_of_ranks_continues(runs: Path, run: str) -> None:
    found, expected = metrics(runs / f"{run}-elsewhere"), after_3(metrics(runs / run))
    rounding = 3e-2 if run == "lejepa" else 1e-5  # bf16, fp32
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=rounding)


def test_the_teacher_follows_by_its_momentum(runs: Path) -> None:
    run = runs / "1-fp32"
    mean = tensors(run, 1, "ema")
    for step in range(2, STEPS + 1):
        momentum = 1 - (1 - MOMENTUM) * (math.cos(math.pi * (step - 1) / STEPS) + 1) / 2
        weights, found = tensors(run, step, "weights"), tensors(run, step, "ema")
        for name in ("objective.head.mlp.0.weight", "blocks.0.attention.qkv.weight"):
            np.testing.assert_allclose(
                found[name], momentum * mean[name] + (1 - momentum) * weights[name], rtol=1e-5, atol=1e-7
            )
        mean = found


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_frozen_parameters_wait_and_others_learn(runs: Path, stage: int, precision: str) -> None:
    run = runs / f"{stage}-{precision}"
    first = tensors(run, 1, "weights")
    for step in range(2, STEPS + 1):
        weights = tensors(run, step, "weights")
        for head in ("head", "patch_head"):
            name = f"objective.{head}.last.weight"
            assert np.array_equal(weights[name], first[name]) == (step <= FROZEN_STEPS)
        assert np.array_equal(weights["objective.mixer"], first["objective.mixer"])
    assert not np.any(tensors(run, FROZEN_STEPS, "exp_avg")["objective.head.last.weight"])
    for name in ("centre", "patch_centre", "mask_token"):
        assert np.any(tensors(run, STEPS, "weights")[f"objective.{name}"])


def test_the_backbone_alone_is_exported(runs: Path) -> None:
    config, weights = models.read_weights(runs / "1-fp32")[:2]
    assert PageFolder(runs / "1-fp32").read_facts().facts.model["num_classes"] == 0
    assert models.build(config).state_dict().keys() <= weights.keys()
    assert not [name for name in models.read_weights(runs / "simclr")[1] if name.startswith("objective.")]


@pytest.mark.parametrize("taught", TAUGHT)
def test_a_run_is_taught_by_the_same_weights_to_its_end(taught: str, forge: Forge, dataset: Path, runs: Path) -> None:
    """Its checkpoints hold no teacher, so they could not tell that another file is in its place."""
    teacher = runs / TAUGHT[taught][0]
    begin_again(runs / taught, runs / f"{taught}-retaught")
    first = teacher.read_bytes()
    models.save(models.build(models.configure("ViT-mu/8", 16, 10, width=48), seed=1), teacher)
    refused = forge.start(1, of_other(dataset, runs, taught, "-retaught"))
    code = refused.wait()
    teacher.write_bytes(first)
    assert code == [2]
    assert "cannot be continued: the teacher's SHA-256 was" in refused.said()


def test_a_run_tells_what_taught_it(runs: Path) -> None:
    digest = hashlib.sha256((runs / "teacher.pt").read_bytes()).hexdigest()
    tags = PageFolder(runs / "distill").read_facts().facts.tags
    assert f"{runs / 'teacher.pt'}, SHA-256 {digest[:16]}" in tags[TEACHER_TAG]


def test_a_skipped_step_changes_neither_teacher_nor_centre(forge: Forge, dataset: Path, tmp_path: Path) -> None:
    run = settings(dataset, tmp_path, "skips", *OF_RUN)
    forge.start_work(1, "distillation:train_skipping", {"skipped": 4, "runs": [run]}).finish()
    for state in ("weights", "ema", "exp_avg"):
        before, after, end = (tensors(tmp_path / "skips", step, state) for step in (4, 5, 6))
        assert all(np.array_equal(array, after[name]) for name, array in before.items())
        changed = {"blocks.0.attention.qkv.weight"} | ({"objective.centre"} if state == "weights" else set())
        assert not any(np.array_equal(end[name], after[name]) for name in changed)


@pytest.mark.parametrize(
    ("step", "least"),
    [
        ("crops_step:tensors_of_dinov2", 30),
        ("crops_step:tensors_of_lejepa", 25),
        ("crops_step:tensors_of_simclr", 25),
    ],
)
def test_two_ranks_compute_what_one_does_of_the_whole_batch(
    step: str, least: int, forge: Forge, tmp_path: Path
) -> None:
    """DINOv2's recipe, whose Sinkhorn-Knopp and KoLeo compare the images of all ranks, LeJEPA and SimCLR; ranks can
    read different numbers of images.
    """
    forge.start_work(2, "mean_of_ranks:save", (step, str(tmp_path / "found.pt"))).finish()
    module, _, function = step.partition(":")
    found, expected = torch.load(tmp_path / "found.pt"), getattr(importlib.import_module(module), function)(0, 1)
    assert found.keys() == expected.keys()
    assert len(found) > least
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
