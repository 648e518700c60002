"""Colours of patches are their principal components, shared over images."""

import numpy as np
import pytest
import torch

from pipeline import model as models
from pipeline.explain.components import patch_components
from pipeline.model import VisionTransformer


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    built = models.create("ViT-mu/4", 16, 0, depth=2, registers=1)
    return built.eval()


def test_colours_are_the_components_of_all_images_together(model: VisionTransformer) -> None:
    """Compared with numpy's singular values; also for one image at a time."""
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = patch_components(model, images, batch=2)
    with torch.no_grad():
        tokens = model.encode(model.embed(images))[:, 2:].double().numpy()  # After class token and register.
    patches = tokens.reshape(-1, tokens.shape[2])
    _, sigma, directions = np.linalg.svd(patches - patches.mean(0), full_matrices=False)
    np.testing.assert_allclose(found.shares, sigma[:3] ** 2 / (sigma**2).sum(), rtol=1e-5)
    for channel, direction in enumerate(directions[:3]):
        positive = direction * np.sign(direction[np.abs(direction).argmax()])
        values = (patches - patches.mean(0)) @ positive
        low, high = np.quantile(values, [0.01, 0.99])
        expected = np.clip((values - low) / (high - low), 0, 1).reshape(5, 4, 4)
        np.testing.assert_allclose(found.colours[..., channel], expected, atol=1e-4)
    assert torch.equal(found.colours, patch_components(model, images, batch=2).colours)


def test_patches_that_do_not_differ_are_grey() -> None:
    model = models.create("ViT-mu/4", 16, 0, depth=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = patch_components(model, torch.ones(2, 3, 16, 16), batch=2)
    assert torch.equal(found.colours, torch.full((2, 4, 4, 3), 0.5))
