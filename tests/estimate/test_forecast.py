"""The plan of a run: figures of the paper, choices that fit, refusals that training makes too."""

import runpy
import sys
from pathlib import Path

import pytest
from forked import Forge
from ranks import ROOT
from teacher_weights import teacher_for

from pipeline.base.errors import UserError
from pipeline.estimate.forecast import HEADROOM, Cluster, choose, describe, make_forecast, run
from pipeline.estimate.memory import rank_memory, refuse_too_large
from pipeline.model import create, save
from pipeline.settings import schema
from pipeline.settings.commands.operate import PlanConfig
from pipeline.settings.run import RunConfig
from pipeline.train import setup
from pipeline.train.start import run_training

L16 = ROOT / "configs/pretrain/vit_l16_imagenet21k.yaml"
BY_HAND = ["samples=14.2e6", "classes=21841"]
# In place of weights that do not exist yet.
NEW = ["init.weights=null", "model.name=ViT-L/16", "model.image_size=384", "train.freeze=none"]
SHIPPED = sorted([*(ROOT / "configs/pretrain").glob("*.yaml"), *(ROOT / "configs/finetune").glob("*.yaml")])


def load(*overrides: str, file: Path = L16) -> PlanConfig:
    return schema.load(PlanConfig, file, [*BY_HAND, *overrides])


def test_the_paper_s_run() -> None:
    forecast = make_forecast(load("cluster=8x8xH100-80GB", "measured=500"))
    assert forecast.plan.steps == 312_012
    # ViT paper, Table 6 counts 783 exaFLOPs for 7 epochs of 303 M images; the file's header says 472 for this run.
    assert forecast.flops / 1e18 == pytest.approx(472, rel=0.003)
    assert forecast.hours == pytest.approx(312_012 * 4096 / (64 * 500) / 3600)
    assert any("312,012 steps" in line for line in describe(forecast))


def test_the_disk_holds_all_checkpoints_that_a_run_keeps() -> None:
    """Those of keep_every and of the best one stay on the disk, too."""
    few = [
        "cluster=8x8xH100-80GB",
        "train.length=100 steps",
        "schedule.warmup=5 steps",
        "checkpoint.every=20 steps",
        "evaluate.every=30 steps",
    ]
    plain, more = (
        make_forecast(load(*few, *settings))
        for settings in ([], ["checkpoint.keep_every=25 steps", "checkpoint.best=val_top1"])
    )
    assert (plain.kept, more.kept) == (2, 2 + 4 + 1)


@pytest.mark.slow
def test_h14_on_imagenet21k_is_made_for_8_nodes_of_8_gpus() -> None:
    file = ROOT / "configs/pretrain/vit_h14_imagenet21k.yaml"
    forecast = make_forecast(load("cluster=8x8xH100-80GB", file=file))
    assert (forecast.plan.micro_batch, forecast.plan.accumulation, forecast.plan.world_size) == (64, 1, 64)
    assert forecast.flops / 1e18 == pytest.approx(1283, rel=0.003)  # Its header.
    assert forecast.choice.overrides == [
        "engine.zero_stage=1",
        "engine.activation_checkpointing=false",
        "train.micro_batch=64",
    ]
    assert forecast.choice.memory.total / 2**30 == pytest.approx(28.2, abs=0.1)  # Its header.


def test_images_that_are_not_square_are_planned() -> None:
    """Twice the width: a bit more than twice the arithmetic and the activations, the same parameters but positions."""
    square, wide = (make_forecast(load(f"model.image_size={size}")) for size in ("224", "224x448"))
    assert wide.model.num_tokens == 1 + 14 * 28
    assert 2 < wide.flops / square.flops < 2.1
    memory = [next(iter(forecast.layouts)).memory for forecast in (square, wide)]
    assert memory[1].inputs == 2 * memory[0].inputs
    assert 1.9 < memory[1].activations / memory[0].activations < 2.1
    assert "ViT-L/16 at 224x448 px" in describe(wide)[0]


def test_the_table_in_the_docs_is_what_the_command_prints() -> None:
    page = (ROOT / "docs/plan.md").read_text()
    printed = describe(make_forecast(load("cluster=8x8xH100-80GB", "measured=500")))
    assert "\n".join(f"    {line}".rstrip() for line in printed) in page


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_run_is_planned_and_its_advice_is_taken(path: Path, tmp_path: Path) -> None:
    more = [*NEW] if path.parent.name == "finetune" else []
    more += teacher_for(path, tmp_path, num_classes=21_841)
    forecast = make_forecast(load("cluster=1x8xA100-40GB", *more, file=path))
    again = make_forecast(load("cluster=1x8xA100-40GB", *more, *forecast.choice.overrides, file=path))
    assert again.choice.overrides == forecast.choice.overrides
    plan = again.plan
    assert plan.micro_batch == forecast.choice.micro_batch
    peak = rank_memory(again.model, again.config, plan.micro_batch, plan.accumulation, plan.world_size)
    assert peak == forecast.choice.memory
    assert peak.total <= HEADROOM * 40e9


def test_what_fits_is_the_largest_that_does() -> None:
    forecast = make_forecast(load("cluster=8x8xH100-80GB"))
    for layout in forecast.layouts:
        engine = load(
            f"engine.zero_stage={layout.engine.zero_stage}",
            f"engine.activation_checkpointing={str(layout.engine.activation_checkpointing).lower()}",
        )
        assert layout.micro_batch
        fits, not_any_more = (
            rank_memory(forecast.model, engine, layout.micro_batch + more, 2, 64).total for more in (0, 1)
        )
        assert fits <= HEADROOM * 80e9 < not_any_more


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "model", "expected"),
    [
        ("8x8xH100-80GB", "ViT-L/16", (1, False, 64)),  # much room: nothing is given up
        ("1x8xL4", "ViT-H/14", (1, False, 32)),  # 32 images keep 12 GiB of the 22: a smaller part of the 512
        ("1x8xV100-16GB", "ViT-G/14", (2, True, 64)),  # stage 1 keeps all fp32 gradients, 4 x 1.9 GB
        ("2x8xV100-16GB", "ViT-e/14", (3, True, 64)),  # the bf16 weights alone are 7.7 GB
    ],
)
def test_no_more_is_given_up_than_must_be(cluster: str, model: str, expected: tuple[int, bool, int]) -> None:
    config = load(f"cluster={cluster}", f"model.name={model}")
    forecast = make_forecast(config)
    found = forecast.choice
    assert (found.engine.zero_stage, found.engine.activation_checkpointing, found.micro_batch) == expected


@pytest.mark.parametrize("model", ["ViT-L/16", "ViT-H/14", "ViT-g/14"])
def test_stage_3_holds_a_part_of_the_weights_when_memory_is_short(model: str) -> None:
    forecast = make_forecast(load(f"model.name={model}", "cluster=8x8xA100-40GB", "train.micro_batch=16"))
    second, third = (
        layout.memory
        for layout in forecast.layouts
        if layout.engine.activation_checkpointing and layout.engine.zero_stage > 1
    )
    assert third.weights < second.weights / 3
    assert third.total < second.total


def test_a_stage_that_the_optimizer_cannot_use_is_never_advised() -> None:
    """The advice for Muon was stage 3 where the others did not fit, and training refused it."""
    forecast = make_forecast(load("optimizer.name=muon"))
    assert {layout.engine.zero_stage for layout in forecast.layouts} == {1, 2}
    assert load("engine.precision=fp32").zero_stages == (0, 1, 2, 3)
    with pytest.raises(UserError, match=r"even with engine\.zero_stage=2, engine\.activation_checkpointing=true"):
        choose(forecast.config, forecast.model, Cluster.parse("1x1xV100-1GB"))
    stage_2 = load("optimizer.name=muon", "engine.zero_stage=2")
    with pytest.raises(UserError) as error:
        refuse_too_large(stage_2, forecast.plan, forecast.model, 2**20)
    assert "zero_stage" not in str(error.value)


def train_on_a_small_gpu(overrides: list[str]) -> None:
    """In a rank whose device says that it has a gigabyte."""
    setup.device_memory = lambda device: 10**9
    run_training(schema.load(RunConfig, None, overrides))


def test_training_refuses_what_the_plan_refuses(
    forge: Forge, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        f"data.path={dataset}",
        f"out={tmp_path}",
        "train.micro_batch=512",
        "train.global_batch=512",
        "name=large",
        "model.name=ViT-S/16",
        "train.length=10 steps",
        "schedule.warmup=1%",
        "engine.activation_checkpointing=true",
        "track.enabled=false",
    ]
    with pytest.raises(UserError) as planned:
        run(schema.load(PlanConfig, None, [*overrides, "cluster=1x1xV100-1GB"]))
    assert "Peak memory of a rank" in capsys.readouterr().out
    assert "a rank needs" in str(planned.value)
    rank = forge.start_work(1, "test_forecast:train_on_a_small_gpu", overrides)
    assert rank.wait() == [2], rank.said()
    assert rank.said().splitlines()[-1] == f"error: {planned.value}"


def test_weights_that_training_refuses(tmp_path: Path) -> None:
    """The plan took any: training then ended, as BiT has no dropout."""
    save(create("BiT-R50x1", 64, 5, units=(1,), width=32), tmp_path / "bit.pt")
    tuned = ROOT / "configs/finetune/imagenet_384px.yaml"
    with pytest.raises(UserError, match=r"bit\.pt: is a ResNet, which has no dropout\. Leave it out"):
        make_forecast(load(f"init.weights={tmp_path}/bit.pt", file=tuned))
    found = make_forecast(load(f"init.weights={tmp_path}/bit.pt", "model.dropout=0", file=tuned)).model
    assert (found.num_classes, found.image_size) == (21841, (384, 384))


def test_the_command_prints_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(ROOT / "launch/plan.py"), "--config", str(L16), "cluster=8x8xH100-80GB"]
    monkeypatch.setattr(sys, "argv", [*command, *BY_HAND])
    runpy.run_path(command[0], run_name="__main__")
    printed = capsys.readouterr().out
    assert "engine.zero_stage=1 engine.activation_checkpointing=false train.micro_batch=64" in printed
