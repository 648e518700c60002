"""All parts of later ViTs at once, for tests of what knows each part; and models with random values everywhere."""

from typing import Any, TypeVar

import torch

from pipeline.model import create
from pipeline.model.convert.layouts import NAMES, write_model

M = TypeVar("M", bound=torch.nn.Module)

ALL_PARTS = {
    "positions": "none",
    "rope_base": 100.0,
    "registers": 2,
    "layer_scale": 0.5,
    "swiglu": True,
    "qkv_bias": "qv",
    "out_bias": False,
    "mlp_bias": False,
    "embedding_norm": True,
    "qk_norm": True,
    "pool": "both",
}


def overrides(**more: object) -> list[str]:
    """All parts, as settings of a run."""
    found = ALL_PARTS | more
    return [f"model.{name}={str(value).lower()}" for name, value in found.items()]


def randomised(model: M, scale: float = 0.2, seed: int = 1) -> M:
    """The model, in evaluation mode, with noise added to every parameter: heads and biases begin as zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def random_model(name="ViT-mu/4", size=16, classes=5, **changes):
    return randomised(create(name, size, classes, **changes))


def same(model, other):
    """Whether two models have one configuration and the same bits."""
    state, back = model.state_dict(), other.state_dict()
    return model.config == other.config and all(torch.equal(state[name], back[name]) for name in state)


def official(model: Any) -> dict[str, Any]:
    """The arrays of an official .npz of vision_transformer, in its released names, for np.savez."""
    tensors = write_model(model.state_dict(), model.config, NAMES["released"])
    return {key: tensor.numpy() for key, tensor in tensors.items()}


@torch.no_grad()
def logits(model, images):
    """float64 (B, K) of images (B, H, W, 3) in [-1, 1]."""
    return model.eval()(torch.from_numpy(images).float().permute(0, 3, 1, 2)).double().numpy()
