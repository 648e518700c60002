import itertools

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom

from pipeline.model import resample_positions


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
    resampled = resample_positions(positions, new, old_grid=old)
    assert torch.equal(resampled[:, 0], positions[:, 0])
    np.testing.assert_allclose(resampled[:, 1:].numpy(), as_the_official_code(positions[:, 1:], old, new), atol=1e-12)


def test_a_table_without_class_row():
    positions = table(9)
    resampled = resample_positions(positions, (5, 4))
    np.testing.assert_allclose(resampled.numpy(), as_the_official_code(positions, (3, 3), (5, 4)), atol=1e-12)


def cubic(distance, a):
    """Keys' kernel (1981)."""
    x = np.abs(distance)
    return np.where(
        x <= 1, (a + 2) * x**3 - (a + 3) * x**2 + 1, np.where(x < 2, a * (x**3 - 5 * x**2 + 8 * x - 4), 0.0)
    )


def cubic_matrix(old, new, antialias):
    """(new, old): interpolation weights by the formulae, with positions at the centres of cells."""
    scale = old / new
    wide = max(scale, 1.0) if antialias else 1.0  # when downsampling, antialiasing widens the kernel
    centres = (np.arange(new) + 0.5) * scale - 0.5
    matrix = np.zeros((new, old))
    for row, centre in enumerate(centres):
        for place in range(int(np.floor(centre - 2 * wide)), int(np.ceil(centre + 2 * wide)) + 1):
            # Without antialias, a = -0.75 and the border repeats; with it, a = -0.5 (as Pillow) and places outside have weight 0.
            weight = cubic((place - centre) / wide, -0.5 if antialias else -0.75)
            if not antialias or 0 <= place < old:
                matrix[row, np.clip(place, 0, old - 1)] += weight
    return matrix / matrix.sum(1, keepdims=True)


@pytest.mark.parametrize("kernel", ["bicubic", "bicubic_antialias"])
@pytest.mark.parametrize(
    ("old", "new"), [((14, 14), (24, 24)), ((37, 37), (16, 16)), ((4, 4), (7, 3)), ((3, 5), (5, 3))]
)
def test_bicubic_is_that_of_the_formulae(kernel, old, new):
    positions = table(1 + old[0] * old[1])
    resampled = resample_positions(positions, new, kernel, old)
    rows, columns = (cubic_matrix(*pair, kernel == "bicubic_antialias") for pair in zip(old, new, strict=True))
    expected = np.einsum("yh,xw,hwd->yxd", rows, columns, positions[0, 1:].numpy().reshape(*old, -1))
    assert torch.equal(resampled[:, 0], positions[:, 0])
    np.testing.assert_allclose(resampled[0, 1:].numpy(), expected.reshape(new[0] * new[1], -1), atol=1e-12)


def test_the_kernels_differ():
    positions = table(17)
    grown = [resample_positions(positions, (7, 7), kernel) for kernel in ("zoom", "bicubic", "bicubic_antialias")]
    assert all((a - b).abs().max() > 0.01 for a, b in itertools.combinations(grown, 2))


def test_the_same_grid_is_the_same_table():
    positions = table(17)
    assert resample_positions(positions, (4, 4)) is positions


def test_the_dtype_stays_and_bf16_is_not_computed_in_bf16():
    positions = table(197, torch.bfloat16)
    resampled = resample_positions(positions, (24, 24))
    assert resampled.dtype == torch.bfloat16
    exact = resample_positions(positions.double(), (24, 24))
    assert torch.equal(resampled, exact.bfloat16()) or (resampled.double() - exact).abs().max() < 2**-7


@pytest.mark.parametrize("rows", [3, 8, 12])
def test_a_table_that_is_no_square_needs_its_grid(rows):
    with pytest.raises(ValueError, match=f"position table of {rows} rows .* Give old_grid"):
        resample_positions(table(rows), (2, 2))
    with pytest.raises(ValueError, match="5 x 5"):
        resample_positions(table(rows), (2, 2), old_grid=(5, 5))


def test_an_unknown_kernel():
    with pytest.raises(ValueError, match='"lanczos" is unknown'):
        resample_positions(table(5), (3, 3), "lanczos")
