"""What the forward pass keeps: counted on the meta device, and of real tensors by the same hooks of autograd's."""

from functools import partial
from typing import Any

import pytest
import torch
from live_tensors import operators_of_a_gpu
from model_parts import ALL_PARTS
from torch import Tensor

from pipeline.estimate import memory
from pipeline.estimate.memory import saved_bytes
from pipeline.model import Config, Model, build, configure
from pipeline.objectives import on_meta


def really_saved(model: Model, micro_batch: int, dtype: torch.dtype) -> int:
    """Bytes of the distinct storages that one training forward pass keeps, parameters and images left out."""
    height, width = model.config.image_size
    images = torch.zeros(micro_batch, 3, height, width, dtype=dtype)
    ours = {parameter.untyped_storage()._cdata for parameter in model.parameters()} | {images.untyped_storage()._cdata}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with operators_of_a_gpu(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images, *masks_of(model.config, micro_batch))
    return sum(storage.nbytes() for key, storage in storages.items() if key not in ours)


def masks_of(config: Config, micro_batch: int) -> list[Tensor]:
    """What masked patch prediction reads beside the images, none of it parameters nor kept twice."""
    if not getattr(config, "masked", None):
        return []
    num_patches = config.grid[0] * config.grid[1]
    return [torch.zeros(micro_batch, count, dtype=torch.int64) for count in (num_patches, config.num_corrupted)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "dtype", "changes"),
    [
        ("ViT-Ti/16", 96, torch.float32, {"dropout": 0.1}),
        ("ViT-B/32", 96, torch.float32, {"representation": True}),
        ("ViT-mu/8", 64, torch.bfloat16, {"dropout": 0.1, "pool": "map"}),
        ("ViT-Ti/16", 64, torch.float32, {"drop_path": 0.1, "positions": "sincos2d", "pool": "gap"}),
        ("ViT-Ti/16", 64, torch.float32, {"positions": "relative"}),
        ("ViT-Ti/16", 64, torch.bfloat16, ALL_PARTS),
        ("Axial-ViT-Ti/16", 64, torch.float32, {}),
        ("R+Ti/16", 64, torch.float32, {}),
        ("ViT-Ti/16", 64, torch.float32, {"masked": "small_patch"}),
        ("BiT-R50x1", 64, torch.float32, {"units": (1, 2), "width": 32}),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_saved_bytes(name: str, size: int, dtype: torch.dtype, changes: dict[str, Any], checkpointing: bool) -> None:
    if not name.startswith("BiT"):
        changes = {**changes, "depth": 3}
    config = configure(name, size, 0 if "masked" in changes else 50, **changes)
    model = build(config).to(dtype).train()
    model.activation_checkpointing = checkpointing
    found = saved_bytes(config, 3, dtype, checkpointing)
    assert found.total == pytest.approx(really_saved(model, 3, dtype), rel=0.02)
    assert 0 < found.uses[0].largest <= found.uses[0].block


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ViT-Ti/16", {"dropout": 0.1, "drop_path": 0.2, "pool": "map"}),
        ("ViT-Ti/16", {"positions": "relative", "masked": "small_patch"}),
        ("Axial-ViT-Ti/16", {}),
        ("ViT-mu/8", {"registers": 4, "representation": True}),
        ("ViT-mu/8", ALL_PARTS),
    ],
)
def test_further_blocks_are_like_those_that_are_counted(name: str, changes: dict[str, Any]) -> None:
    """To the byte."""
    config = configure(name, 64, 0 if "masked" in changes else 50, **changes, depth=7)
    assert on_meta.shallow(config)
    counts = [
        partial(memory._count, images=2, dtype=torch.bfloat16, checkpointing=c, frozen="none") for c in (False, True)
    ]
    for count in counts:
        assert on_meta.of_depth(config, count) == count(config)


@pytest.mark.slow
def test_it_grows_with_the_batch() -> None:
    config = configure("ViT-L/16", 384, 1000)
    one = saved_bytes(config, 1, torch.bfloat16, False).total
    assert saved_bytes(config, 8, torch.bfloat16, False).total == pytest.approx(8 * one, rel=1e-4)
    assert saved_bytes(config, 1, torch.float32, False).total == pytest.approx(2 * one, rel=0.02)
    assert saved_bytes(config, 1, torch.bfloat16, True).total < one / 10
