"""Models, batches and the copy of a checkpoint compute on a GPU what they compute on a CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_parts import ALL_PARTS, randomised

from pipeline import model as models
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.checkpoint.saver import Saver
from pipeline.checkpoint.sharded_tensors import RankPart, ShardedTensors
from pipeline.checkpoint.writer import Commit
from pipeline.data.loading.loader import _copy_stream, images_to_device, normalise
from pipeline.data.loading.mix import draw_mixing, mix_images
from pipeline.objectives.parameters.muon import Muon
from pipeline.process.distributed import Ranks, use_exact_arithmetic
from pipeline.settings.run import AugmentConfig
from pipeline.train.zero.engine import compile_blocks

CPU = torch.device("cpu")
# A model of each kind: name, image size, changed settings.
KINDS = {
    "vit": ("ViT-Ti/8", 32, {}),
    "large heads": ("ViT-S/16", 224, {"depth": 2}),
    # More than two blocks of keys, whose parts of a gradient a kernel could add in any order.
    "many tokens": ("ViT-Ti/16", 384, {"depth": 2}),
    "pooled": ("ViT-mu/4", 16, {"pool": "map"}),
    "relative": ("ViT-mu/4", 16, {"positions": "relative"}),
    "registers": ("ViT-mu/4", 16, {"pool": "gap", "registers": 2, "positions": "sincos2d"}),
    "all parts": ("ViT-mu/4", 16, ALL_PARTS),
    "hybrid": ("R+Ti/16", 64, {}),
    "axial": ("Axial-ViT-Ti/8", 32, {"depth": 2}),
    "bit": ("BiT-R50x1", 32, {"width": 32}),
}
# Compiled models: image size, images, changed settings.
COMPILED = {
    "tiny": (16, 6, {"width": 32, "depth": 2, "mlp_width": 64, "num_heads": 2}),
    # More than 5 * 2**20 numbers in a layer: Inductor then computes both reductions of a norm's gradient in one kernel.
    "large": (112, 128, {"width": 256, "depth": 2, "mlp_width": 512, "num_heads": 4}),
}


# On a CPU only the code of the tests is of interest: what would differ from a CPU?
@pytest.fixture(params=[kind for kind in KINDS if torch.cuda.is_available() or kind == "all parts"])
def model(request: pytest.FixtureRequest) -> models.Model:
    """A model with random values everywhere: heads and biases begin as zeros."""
    name, size, changes = KINDS[request.param]
    return randomised(models.create(name, size, 10, **changes), 0.02, seed=0).train()


def step(model: models.Model, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits, gradients) on the CPU, in fp32."""
    model.zero_grad()
    logits = model(images)
    torch.nn.functional.cross_entropy(logits, torch.arange(len(images), device=images.device) % 10).backward()
    # Copies: `model.to` moves gradients, also those that were returned here.
    gradients = {
        n: p.grad.to("cpu", torch.float32, copy=True) for n, p in model.named_parameters() if p.grad is not None
    }
    return logits.detach().cpu().float(), gradients


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert relative_difference(found, expected) < tolerance


def test_logits_and_gradients_are_those_of_the_cpu(model: models.Model, device: torch.device) -> None:
    use_exact_arithmetic(device)
    size = model.config.image_size
    images = torch.rand(4, 3, *size, generator=torch.Generator().manual_seed(1)) * 2 - 1
    expected, gradients = step(model, images)
    found, found_gradients = step(model.to(device), images.to(device))
    assert_close(found, expected, 1e-4)
    assert found_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_close(found_gradients[name], gradient, 2e-3)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("size", "images", "changes"), COMPILED.values(), ids=COMPILED)
def test_a_compiled_model_has_the_gradients_of_the_plain_one(
    device: torch.device, backend: str, size: int, images: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By blocks, in training and after an evaluation of fewer images. aot_eager, which compiles nothing, tells whose
    fault a difference is.
    """
    if device == CPU and (backend, images) != ("aot_eager", 6):
        pytest.skip("needs a GPU: make gpu")  # tests/multiprocess/test_compile.py has Inductor's code for a CPU.
    use_exact_arithmetic(device)
    model = models.create("ViT-Ti/8", size, 10, **changes).to(device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(device)
    batch = (torch.rand(images, 3, size, size, generator=generator) * 2 - 1).to(device)
    expected, gradients = step(model, batch)
    torch._dynamo.reset()
    if backend != "inductor":
        compile_ = torch.compile
        monkeypatch.setattr(
            torch, "compile", lambda block, **given: compile_(block, backend=backend, **given | {"options": None})
        )
    compile_blocks(model.blocks, deterministic=True, device=device)
    for _ in range(2):
        found, found_gradients = step(model, batch)
        with torch.no_grad():
            model(batch[: images // 2])
        assert_close(found, expected, 1e-4)
        wrong = {name: relative_difference(found_gradients[name], gradient) for name, gradient in gradients.items()}
        assert not {name: value for name, value in wrong.items() if value > 2e-3}


def test_two_steps_give_the_same_bits(model: models.Model, device: torch.device) -> None:
    use_exact_arithmetic(device)
    model.to(device, torch.bfloat16)
    images = torch.rand(4, 3, *model.config.image_size, device=device).to(torch.bfloat16)
    (logits, gradients), (again, gradients_again) = step(model, images), step(model, images)
    assert torch.equal(logits, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name


def test_recomputed_activations_give_the_same_bits(device: torch.device) -> None:
    use_exact_arithmetic(device)
    model = models.create("ViT-Ti/8", 32, 10, drop_path=0.5, dropout=0.1).to(device)
    torch.nn.init.normal_(model.head.weight)
    images = torch.rand(4, 3, 32, 32, device=device)
    found = []
    for recompute in (False, True):
        model.activation_checkpointing = recompute
        torch.manual_seed(7)
        found.append(step(model, images))
    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][name]), name


def test_muon_is_that_of_the_cpu(device: torch.device) -> None:
    """Matrices of equal shape are made orthogonal together on a GPU, in bf16; again to the same bits."""
    use_exact_arithmetic(device)

    def updates(where: torch.device) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        kernels = {}
        for number, rows, columns, count in ((0, 192, 64, 3), (1, 64, 192, 1), (2, 64, 64, 1), (3, 64, 192, 1)):
            parameter = torch.nn.Parameter(torch.zeros(rows, columns, device=where))
            parameter.grad = torch.randn(rows, columns, generator=generator).to(where)
            kernels[parameter] = str(number), count
        group = {"params": list(kernels), "matrices": True}
        Muon([group], kernels, lr=1.0).step()
        return [parameter.detach().cpu() for parameter in kernels]

    found = updates(device)
    for one, again, expected in zip(found, updates(device), updates(CPU), strict=True):
        assert torch.equal(one, again)
        assert_close(one, expected, 0.1)


def test_a_batch_is_normalised_and_mixed_as_on_a_cpu(device: torch.device) -> None:
    images = torch.randint(0, 256, (8, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    valid = torch.tensor([True] * 7 + [False])
    config = AugmentConfig(mixup=0.8, cutmix=1.0)
    kinds = set()
    for number in range(4):
        mixing = draw_mixing(config, 32, seed=0, step=number)
        kinds.add(mixing.box is None)
        expected, own = mix_images(normalise(images, CPU, torch.float32, RGB8), valid, mixing)
        found, found_own = mix_images(normalise(images, device, torch.float32, RGB8), valid.to(device), mixing)
        assert found.device.type == device.type
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(found_own.cpu(), own, rtol=0, atol=1e-6)
    assert kinds == {True, False}, "both mixup and CutMix were drawn"


def test_a_checkpoint_holds_what_was_on_the_device_when_it_was_saved(device: torch.device, tmp_path: Path) -> None:
    """Training goes on meanwhile: the tensors change as soon as `save` returns. Twice, the second time with more of
    them.
    """
    saver = Saver(str(tmp_path), Ranks(0, 0, 1, device), 60)
    try:
        for step_number, count in ((1, 1_000_000), (2, 3_000_000)):
            tensors = {
                state: [torch.full((count,), float(step_number * 10 + i), device=device)]
                for i, state in enumerate(("weights", "exp_avg"))
            }
            shapes = {"w": [count]}
            commit = Commit({}, shapes, {}, 2, [], False)
            saver.save(step_number, RankPart([("w", 0, count)], tensors), commit)
            for values in tensors.values():
                values[0].fill_(-1)
        saver.wait()
        saver.check([saver.numbers()])
    finally:
        saver.close()
    for step_number in (1, 2):
        found = ShardedTensors.open(tmp_path / f"step-{step_number:08d}")
        for i, state in enumerate(("weights", "exp_avg")):
            assert np.all(found.full_tensors(state)["w"] == step_number * 10 + i)


def test_images_are_copied_beside_queued_work(device: torch.device) -> None:
    """Copies of several batches end while a kernel of before runs, and what is queued after them reads their values."""
    on_gpu = device.type == "cuda"
    images = [torch.full((64, 64, 64, 3), number, dtype=torch.uint8, pin_memory=on_gpu) for number in range(50)]
    if on_gpu:
        images_to_device(images[0], device)  # Makes the stream.
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # Cycles: a second.
        ended = torch.cuda.Event()
        ended.record()
    sums = []
    for batch in images:  # Each one's memory on the GPU is free as soon as its sum is queued.
        sums.append(images_to_device(batch, device).long().sum())
        if on_gpu and len(sums) == 5:
            _copy_stream(device).synchronize()
            assert not ended.query()
    assert [int(found) for found in sums] == [number * images[0].numel() for number in range(50)]


@pytest.mark.parametrize("kind", ["uint8", "int16", "uint16", "float32"])
def test_images_of_any_type_are_normalised_as_on_a_cpu(kind: str, device: torch.device) -> None:
    ends = {
        "low": (10.0, 0.0, 5.0, 1.0),
        "high": (200.0, 250.0, 180.0, 100.0),
        "mean": (0.3, 0.4, 0.5, 0.6),
        "std": (0.1, 0.2, 0.3, 0.4),
    }
    pixels = Pixels(("a", "b", "c", "d"), kind, **ends)  # type: ignore[arg-type]
    images = (torch.rand(2, 8, 8, 4) * (1 if kind == "float32" else 255)).to(getattr(torch, kind))
    pinned = images.pin_memory() if device.type == "cuda" else images
    found = normalise(pinned, device, torch.float32, pixels).cpu()
    assert torch.allclose(found, normalise(images, CPU, torch.float32, pixels), rtol=1e-6, atol=1e-6)
