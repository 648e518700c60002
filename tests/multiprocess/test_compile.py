"""A compiled model trains as the plain one."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Forge
from ranks import STEPS, metrics, settings
from test_train import plain_losses

from pipeline import model as models
from pipeline.checkpoint.sharded_tensors import ShardedTensors


def without_trials() -> None:
    """In a rank: keep Inductor from starting processes that import torch, one for each core, and from compiling a
    library for each of the processor's instruction sets, to find out whether the compiler and Python can do what the
    kernels then show.

    It tries those of 512 bits in any case, for six CPU seconds: the kernels are of 256.
    """
    from torch._inductor import config

    config.compile_threads, config.cpp.vec_isa_ok, config.cpp.simdlen = 1, True, 256


def train_compiled(runs: list[list[str]]) -> None:
    """In a rank; says how many graphs were made, and which of 64 branches a compiled layer drops."""
    import torch
    from forked import train
    from torch._dynamo.utils import counters
    from torch._inductor import config, graph

    from pipeline.model.vit import DropPath
    from pipeline.train.zero.engine import compile_blocks

    without_trials()
    generate = graph.GraphLowering.codegen

    def generate_and_look(lowering: Any) -> Any:
        assert not config.triton.mix_order_reduction, "Its kernels lose gradients without a word."
        assert config.deterministic, "Kernels are not chosen by timing."
        return generate(lowering)

    graph.GraphLowering.codegen = generate_and_look
    train(runs)
    print("graphs", counters["stats"]["unique_graphs"])
    compile_blocks([layer := DropPath(0.3)], deterministic=True, device=torch.device("cpu"))
    torch.manual_seed(0)
    print("dropped", layer(torch.ones(64, 1, 1)).flatten().tolist())


def train_twice(runs: dict[str, list[str]]) -> None:
    """In a rank: each run as it is, then with blocks that are compiled to operators. Prints how many graphs each has,
    and whose linear layer torch's is in each step.
    """
    import torch
    from forked import train
    from torch._dynamo.utils import counters

    from pipeline.train import loop

    compile_, step = torch.compile, loop.training_step

    def step_and_say(*arguments: Any) -> Any:
        print("linear", torch.nn.functional.linear.__name__)
        return step(*arguments)

    torch.compile = lambda function, **given: compile_(function, backend="aot_eager", **given | {"options": None})
    loop.training_step = step_and_say
    for name, overrides in runs.items():
        train([overrides])
        counters.clear()
        torch._dynamo.reset()
        train([[*overrides, f"name={name}-compiled", "engine.compile=true"]])
        print("graphs", name, counters["stats"]["unique_graphs"], flush=True)


SMALL_VIEWS = ("model.representation=false", "objective.local_views=2", "objective.local_size=8")
DINO = ("train.loss=dino", "objective.prototypes=8", "objective.hidden=16", "objective.bottleneck=8")
FROM_WEIGHTS = tuple(f"model.{name}=null" for name in ("name", "width", "depth", "mlp_width", "num_heads"))
LORA = ("train.freeze=backbone", "train.lora_rank=2", *FROM_WEIGHTS)
DECODER = ("objective.decoder_width=16", "objective.decoder_depth=2", "objective.decoder_heads=2")
MAE = ("train.loss=mae", "model.name=ViT-Ti/4", "model.representation=false", *DECODER)
# The most graphs: their number is that of shapes, not of blocks, in training and in evaluation.
COMPILED = {
    "deep": (3, ("model.depth=24", "engine.activation_checkpointing=true")),
    # The first block, which drops none, has a graph of its own.
    "drops": (3, ("model.depth=24", "model.drop_path=0.3")),
    "parts": (3, ("model.depth=3", "model.rope_base=100", "model.swiglu=true", "model.layer_scale=0.1")),
    "mae": (4, MAE),
    "dino": (
        10,
        (*DINO, *SMALL_VIEWS, "model.depth=5", "probe.every=3 steps", "probe.shots=0", "probe.neighbours=5"),
    ),
    "anchored": (10, (*DINO, *SMALL_VIEWS[1:], *FROM_WEIGHTS, "objective.gram_weight=5", "objective.gram_size=32")),
    "lejepa": (
        4,
        ("train.loss=lejepa", *SMALL_VIEWS, "objective.hidden=32", "objective.width=16", "train.micro_batch=12"),
    ),
    "lora": (4, LORA),
    "frozen": (6, ("train.freeze=1 block", *FROM_WEIGHTS)),
    "hybrid": (4, ("model.name=R+Ti/16", "model.image_size=64", "model.pool=map", "model.positions=sincos2d")),
    "small stem": (4, ("model.name=ViT-Ti/1", "model.small_stem=[16,32]")),
    "stage 3": (3, ("model.depth=5", "engine.zero_stage=3")),
    "stage 3, mae": (4, (*MAE, "engine.zero_stage=3")),
    "stage 3, dino": (10, (*DINO, *SMALL_VIEWS, "engine.zero_stage=3", "engine.activation_checkpointing=true")),
}


@pytest.mark.slow
@pytest.mark.ranks
def test_every_objective_is_that_of_its_plain_run_in_few_graphs(forge: Forge, dataset: Path, tmp_path: Path) -> None:
    """On two ranks: what rounds otherwise is Inductor's code alone. torch 2.11 loses gradients when it compiles the
    linear layer that DeepSpeed puts into torch at stage 3, for all later runs too.
    """
    begun = tmp_path / "begun.pt"
    models.save(models.build(models.configure("ViT-mu/8", 16, 10, width=48, depth=3)), begun)
    runs = {
        name: settings(
            dataset, tmp_path, name, *more, *([f"init.weights={begun}"] if "model.name=null" in more else [])
        )
        for name, (_, more) in COMPILED.items()
    }
    said = forge.start_work(2, "test_compile:train_twice", runs).finish()
    linear = [line for line in said.splitlines() if line.startswith("linear")]
    assert linear[-2 * STEPS :] == ["linear zero3_linear_wrap"] * STEPS + ["linear linear"] * STEPS
    graphs = dict(
        line.removeprefix("graphs ").rsplit(" ", 1) for line in said.splitlines() if line.startswith("graphs")
    )
    for name, (most, _) in COMPILED.items():
        for metric in ("loss", "grad_norm") if name != "drops" else ():  # Compiled code draws other paths.
            expected, found = (metrics(tmp_path / run, metric) for run in (name, f"{name}-compiled"))
            np.testing.assert_allclose([found[s] for s in expected], list(expected.values()), rtol=2e-5)
        assert 2 <= int(graphs[name]) <= most, (name, graphs[name])


@pytest.mark.slow
def test_a_compiled_run_equals_plain_pytorch_and_resumes_to_the_same_bits_with_an_empty_cache(
    forge: Forge, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process compiles everything again, for what is on its way: the resumed one begins with another shape. One
    block, because a kernel takes the compiler two seconds.
    """
    more = ["engine.compile=true", "train.micro_batch=24", "model.depth=1"]
    plain = settings(dataset, tmp_path, "compiled", *more, "evaluate.every=100%")
    dropping = [*more, "model.dropout=0.1"]
    whole = settings(dataset, tmp_path, "whole", *dropping, "evaluate.every=1 steps")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    said = forge.start_work(1, "test_compile:train_compiled", [plain, whole]).finish()
    assert int(said.split("graphs ")[1].split()[0]) >= 3, "both were compiled"
    found = metrics(tmp_path / "compiled")
    expected = plain_losses(settings(dataset, tmp_path, "plain", "model.depth=1"))
    np.testing.assert_allclose([found[s] for s in sorted(found)], expected, rtol=2e-5)
    # As a kill after step 3 leaves it, begun again by another process.
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step-{STEPS:08d}")
    (tmp_path / "cut" / "metrics.jsonl").unlink()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "empty"))
    resumed = settings(dataset, tmp_path, "cut", *dropping, "evaluate.every=1 steps")
    said_again = forge.start_work(1, "test_compile:train_compiled", [resumed]).finish()
    assert "resumed from" in said_again
    dropped, dropped_again = (text.split("dropped ")[1].splitlines()[0] for text in (said, said_again))
    assert dropped_again == dropped
    assert sorted(set(json.loads(dropped))) == pytest.approx([0, 1 / 0.7])
    for name in ("loss", "grad_norm", "val_loss"):
        of_whole, of_cut = metrics(tmp_path / "whole", name), metrics(tmp_path / "cut", name)
        assert [of_cut[step] for step in (4, 5, 6)] == [of_whole[step] for step in (4, 5, 6)]
    ends = [ShardedTensors.open(tmp_path / run / "checkpoints" / f"step-{STEPS:08d}") for run in ("whole", "cut")]
    for state in ends[0].states:
        one, other = (end.full_tensors(state) for end in ends)
        assert all(np.array_equal(one[name], other[name]) for name in one), state
