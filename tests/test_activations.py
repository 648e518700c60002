"""What the forward pass keeps, counted by autograd's own hooks, against the formula."""

import pytest
import torch
from live_tensors import operators_of_a_gpu
from torch import Tensor

from pipeline import objective
from pipeline.memory import input_bytes, saved_activations
from pipeline.model import VisionTransformer, configure


def saved_bytes(model: VisionTransformer, micro_batch: int, dtype: torch.dtype, loss: str) -> int:
    """Bytes of the distinct storages that one training forward pass keeps, parameters and images left out."""
    height, width = model.config.image_size
    images = torch.zeros(micro_batch, 3, height, width, dtype=dtype)
    ours = {parameter.untyped_storage()._cdata for parameter in model.parameters()} | {images.untyped_storage()._cdata}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with operators_of_a_gpu(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        labels, valid = torch.zeros(micro_batch, 1, dtype=torch.int64), torch.ones(micro_batch, dtype=torch.bool)
        objective.batch_loss(model(images), labels, valid, loss, 0.0)
    return sum(storage.nbytes() for key, storage in storages.items() if key not in ours)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "size", "precision", "checkpointing"),
    [
        ("ViT-Ti/16", 96, "fp32", False),
        ("ViT-Ti/16", 96, "fp32", True),
        ("ViT-S/16", 64, "fp32", False),
        ("ViT-B/32", 96, "fp32", False),
        ("ViT-mu/8", 64, "bf16", False),
        ("ViT-mu/8", 64, "bf16", True),
        ("ViT-Ti/16", 64, "bf16", False),
    ],
)
def test_saved_activations(name: str, size: int, precision: str, checkpointing: bool, dropout: float) -> None:
    config = configure(name, size, 50, representation=True, dropout=dropout, depth=3)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = VisionTransformer(config).to(dtype)
    model.activation_checkpointing = checkpointing
    found = saved_bytes(model, 2, dtype, "softmax")
    assert saved_activations(config, 2, precision, checkpointing) == pytest.approx(found, rel=0.05)  # type: ignore[arg-type]


def test_it_grows_with_the_batch_alone() -> None:
    config = configure("ViT-L/16", 384, 1000)
    one = saved_activations(config, 1, "bf16", False)
    assert saved_activations(config, 8, "bf16", False) == 8 * one
    assert saved_activations(config, 1, "fp32", False) == pytest.approx(2 * one, rel=0.02)
    assert saved_activations(config, 1, "bf16", True) < one / 10
    assert input_bytes(config, 2, "fp32") == 2 * 3 * 384 * 384 * 4
