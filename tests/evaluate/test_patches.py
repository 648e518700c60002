"""Maps of patches lie on their images; colours of patches are their principal components, shared over images."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline import model as models
from pipeline.base.gallery import Tile
from pipeline.evaluate.patches import enlarge, patch_components
from pipeline.explain.galleries import draw_components
from pipeline.model import VisionTransformer


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    built = models.create("ViT-mu/4", 16, 0, depth=2, registers=1)
    return built.eval()


def test_colours_are_the_components_of_all_images_together(model: VisionTransformer) -> None:
    """Compared with numpy's singular values."""
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = model.patch_features(images)
        tokens = model.encode(model.embed(images))[:, 2:].double().numpy()  # After class token and register.
    colours, shares = patch_components(features)
    patches = tokens.reshape(-1, tokens.shape[2])
    _, sigma, directions = np.linalg.svd(patches - patches.mean(0), full_matrices=False)
    np.testing.assert_allclose(shares, sigma[:3] ** 2 / (sigma**2).sum(), rtol=1e-5)
    for channel, direction in enumerate(directions[:3]):
        positive = direction * np.sign(direction[np.abs(direction).argmax()])
        values = (patches - patches.mean(0)) @ positive
        low, high = np.quantile(values, [0.01, 0.99])
        expected = np.clip((values - low) / (high - low), 0, 1).reshape(5, 4, 4)
        np.testing.assert_allclose(colours[..., channel], expected, atol=1e-4)


def test_patches_that_do_not_differ_are_grey() -> None:
    colours, _ = patch_components(torch.zeros(2, 4, 4, 32))
    assert torch.equal(colours, torch.full((2, 4, 4, 3), 0.5))


def test_colours_lie_where_their_patches_are() -> None:
    features = torch.zeros(4, 8, 32)
    features[:, 4:] = torch.arange(32.0)  # The right half differs.
    for size in ((16, 32), (32, 32)):
        tiles = [Tile(np.zeros((*size, 3), np.uint8), ["image"])] * 2
        config = models.configure("ViT-mu/4", (16, 32), 0)
        figure = draw_components(*patch_components(torch.stack([features] * 2)), config, tiles)
        drawn = [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]
        assert [image.shape[:2] for image in drawn] == [size] * 4
        left, right = drawn[2][:, :14], drawn[2][:, -14:]
        assert np.ptp(left.reshape(-1, 3), axis=0).max() < 1e-6
        assert abs(left.mean(axis=(0, 1)) - right.mean(axis=(0, 1))).max() > 0.9


def test_maps_are_enlarged_to_where_their_patches_lie() -> None:
    values = np.outer([0.0, 1.0, 0.0], [1.0, 2.0, 5.0])  # centres at 4, 12 and 20
    config = replace(models.configure("ViT-mu/8", 24, 0), image_size=(28, 28))
    found = enlarge(values, config, (28, 28))
    at = np.arange(28) + 0.5
    expected = np.outer(np.interp(at, [4, 12, 20], [0, 1, 0]), np.interp(at, [4, 12, 20], [1, 2, 5]))
    np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(enlarge(np.full((3, 3), 7.0), config, (28, 28)), 7)
    # A drawing with twice the model's pixels has the map at the same places.
    larger = enlarge(values, config, (56, 84))
    expected = [
        np.interp((np.arange(side) + 0.5) * 28 / side, [4, 12, 20], row)
        for side, row in ((56, [0, 1, 0]), (84, [1, 2, 5]))
    ]
    np.testing.assert_allclose(larger, np.outer(*expected))
