from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom

from pipeline.base.errors import UserError
from pipeline.model import build, create, resample_positions, resample_state


def table(rows, dtype=torch.float64, width=6):
    return torch.randn(1, rows, width, generator=torch.Generator().manual_seed(rows), dtype=dtype)


def as_the_official_code(patches, old, new):
    """google-research/vision_transformer, checkpoint.py, interpolate_posembed: zoom of order 1."""
    image = patches.numpy().reshape(*old, -1)
    factors = (new[0] / old[0], new[1] / old[1], 1)
    return zoom(image, factors, order=1).reshape(1, new[0] * new[1], -1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(((14, 14), new) for new in ((24, 24), (32, 32), (7, 7), (1, 5))),
        *(((16, 16), (37, 37)), ((2, 5), (4, 3)), ((3, 3), (3, 7)), ((1, 1), (2, 2))),
    ],
)
def test_zoom_is_scipys(old, new):
    positions = table(1 + old[0] * old[1])
    resampled = resample_positions(positions, new, "zoom", old)
    assert torch.equal(resampled[:, 0], positions[:, 0])
    np.testing.assert_allclose(resampled[:, 1:].numpy(), as_the_official_code(positions[:, 1:], old, new), atol=1e-12)


def test_the_dtype_stays_and_bf16_is_not_computed_in_bf16():
    positions = table(197, torch.bfloat16)
    resampled = resample_positions(positions, (24, 24), "zoom", (14, 14))
    assert resampled.dtype == torch.bfloat16
    exact = resample_positions(positions.double(), (24, 24), "zoom", (14, 14))
    assert torch.equal(resampled, exact.bfloat16()) or (resampled.double() - exact).abs().max() < 2**-7


# -------------------------------------------------------------------- views of another size than the model's
@pytest.mark.parametrize("pool", ["token", "gap"])
@pytest.mark.parametrize("positions", ["learned", "learned2d", "sincos2d"])
@pytest.mark.parametrize("kernel", ["bicubic", "bicubic_antialias"])
def test_a_view_of_another_size_is_read_as_by_the_model_loaded_at_that_size(positions, pool, kernel):
    model = create(
        "ViT-mu/4",
        (16, 24),
        0,
        positions=positions,
        positions_at="blocks" if pool == "gap" and positions != "sincos2d" else "stem",
        pool=pool,
        kernel=kernel,
    ).eval()
    images = torch.rand(2, 3, 12, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    config = replace(model.config, image_size=(12, 8))
    there = build(config).eval()
    there.load_state_dict(resample_state(model.state_dict(), model.config, config))
    with torch.no_grad():
        torch.testing.assert_close(model(images, any_size=True), there(images), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.features(images, any_size=True), there(images), rtol=1e-5, atol=1e-5)


def test_positions_learn_from_views_of_another_size():
    model = create("ViT-mu/4", (16, 24), 0, kernel="bicubic_antialias")  # Without it, some columns have no weight.
    model(torch.ones(1, 3, 12, 8), any_size=True)[0, :3].sum().backward()
    assert model.positions.grad[:, 1:].abs().sum(2).all()


def test_only_an_objective_reads_images_of_another_size():
    model, images = create("ViT-mu/4", (16, 24), 0), torch.zeros(1, 3, 12, 8)
    for read in (model, model.features, model.embed):
        with pytest.raises(ValueError, match=r"images are \(1, 3, 12, 8\), but this model reads \(B, 3, 16, 24\)"):
            read(images)
    for change, what in (
        ({"positions": "relative"}, "relative positions"),
        ({"axial": True, "pool": "gap"}, "axial attention"),
    ):
        with pytest.raises(UserError, match=f"{what} of a 4 x 6 grid cannot be used with views of another size"):
            create("ViT-mu/4", (16, 24), 0, **change)(images, any_size=True)
    assert create("BiT-R50x1", 32, 0, units=(1,), width=32)(torch.zeros(1, 3, 24, 16), any_size=True).shape == (1, 128)


def test_masked_patches_are_replaced_by_the_token_and_patch_tokens_are_returned():
    model = create("ViT-mu/4", (16, 24), 0, registers=2).eval()
    images, token = torch.rand(2, 3, 16, 24), torch.randn(1, 1, model.config.width)
    masked = torch.zeros(2, 24, dtype=torch.bool)
    masked[0, 5] = masked[1, 20] = True
    with torch.no_grad():
        output, patches = model(images, masked=(masked, token), with_patches=True)
        embeddings = model.embed(images)
        embeddings[0, 5] = embeddings[1, 20] = token[0, 0]
        tokens = model.encode(embeddings)
        assert torch.equal(patches, tokens[:, 3:])
        assert torch.equal(output, tokens[:, 0])
        assert torch.equal(model(images, with_patches=True)[0], model(images))
