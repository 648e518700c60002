"""Positions and filters, against known values and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from pipeline import model as models
from pipeline.explain.parameters import position_similarity, principal_filters
from pipeline.model import ResNetConfig


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_similarity_of_known_positions(pool: str) -> None:
    """Each row of patches has a direction of its own, and every second column the opposite sign."""
    model = models.create("ViT-mu/4", (8, 12), 3, pool=pool)
    with torch.no_grad():
        model.positions[:] = 7.0
        patches = model.positions[0, -6:]
        patches[:] = 0
        for i in range(2):
            for j in range(3):
                patches[3 * i + j, i] = (j + 1) * (-1) ** j
    similarity = position_similarity(model)
    assert similarity.shape == (1, 2, 3, 2, 3)
    expected = [[[1, -1, 1], [0, 0, 0]], [[-1, 1, -1], [0, 0, 0]]]
    np.testing.assert_allclose(similarity[0, 0, :2], expected, atol=1e-6)
    np.testing.assert_allclose(similarity[0, 1, 2], [[0, 0, 0], [1, -1, 1]], atol=1e-6)


def test_similarity_of_other_positions() -> None:
    apart = position_similarity(models.create("ViT-mu/4", 16, 3, depth=2, positions="learned2d", positions_at="blocks"))
    assert apart.shape == (2, 4, 4, 4, 4)
    assert not torch.allclose(apart[0], apart[1])
    turned = position_similarity(models.create("ViT-mu/4", 16, 3, positions="none", rope_base=100.0, registers=2))[0]
    angles = math.pi * 100 ** -(np.arange(4) / 4)  # of a step of one of 4 columns on [-1, 1], by period
    assert turned[0, 0, 0, 1] == pytest.approx((4 + np.cos(angles).sum()) / 8, abs=1e-5)
    assert torch.allclose(turned, turned.permute(1, 0, 3, 2), atol=1e-5)


def test_filters_are_scikit_learns_components() -> None:
    model = models.create("ViT-mu/4", 16, 3, width=64)
    components, shares, _ = principal_filters(model)
    kernel = model.patch_embedding.weight.detach().flatten(1).double().numpy()
    expected = PCA(28).fit(kernel)
    flat = components.flatten(1).numpy()
    assert components.shape == (28, 3, 4, 4)
    np.testing.assert_allclose(np.abs((flat * expected.components_).sum(1)), 1, atol=1e-5)
    np.testing.assert_allclose(shares, expected.explained_variance_ratio_, atol=1e-6)
    largest = np.abs(flat).argmax(1)
    assert (flat[range(28), largest] > 0).all()
    # Filters with the opposite sign give the same components.
    with torch.no_grad():
        model.patch_embedding.weight.neg_()
    assert torch.allclose(principal_filters(model)[0], components, atol=1e-5)


def test_filters_of_resnets_are_the_roots() -> None:
    """Kernels are standardised, so scaling and shifting them changes nothing."""
    model = models.build(ResNetConfig((1,), 32, (32, 32), 3))
    components, _, num_filters = principal_filters(model)
    assert (components.shape, num_filters) == ((28, 3, 7, 7), 32)
    with torch.no_grad():
        model.root.weight.mul_(torch.arange(1, 33).view(-1, 1, 1, 1)).add_(3)
    assert torch.allclose(principal_filters(model)[0], components, atol=1e-3)
    assert principal_filters(models.create("R+Ti/16", 64, 3, depth=1))[0].shape == (28, 3, 7, 7)


def test_filters_have_no_component_of_rounding_errors() -> None:
    """Standardised kernels of 27 values have 26 directions; the sheet had a blank 27th."""
    assert len(principal_filters(models.create("ViT-mu/1", 16, 3, small_stem=(32, 32)))[0]) == 26
