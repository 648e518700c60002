"""Values and features of patches on their images: maps between the centres of patches, and principal components
as colours (Oquab et al., DINOv2, arXiv 2304.07193, Figure 1).

Shapes: D width, h x w patches, H x W pixels.
"""

import numpy as np
import torch
from torch import Tensor

from pipeline.architecture.config import Size, ViTConfig

# The ends of the colour scale, in per cent of the patches: a few patches with outlying features would leave the rest
# grey.
_ENDS = (0.01, 0.99)


def between_centres(length: int, centres: Tensor) -> Tensor:
    """Weights of linear interpolation, float32 (length, n): of each pixel 0, 1, ... between the places `centres`, float
    (n,), ascending.
    """
    if len(centres) == 1:
        return torch.ones(length, 1)
    pixels = torch.arange(length, dtype=torch.float64)
    places = centres.double()
    right = torch.searchsorted(places, pixels).clamp(1, len(places) - 1)
    share = ((pixels - places[right - 1]) / (places[right] - places[right - 1])).clamp(0, 1)
    weights = torch.zeros(length, len(places), dtype=torch.float64)
    weights.scatter_(1, right[:, None], share[:, None]).scatter_add_(1, right[:, None] - 1, 1 - share[:, None])
    return weights.float()


def between_patches(config: ViTConfig, size: Size) -> tuple[Tensor, Tensor]:
    """Weights (H, h) and (W, w) by which a map of a model's patches is enlarged: linear between the centres of the
    patches. size: (H, W) of the image as it is drawn, which may have more pixels than the model reads.
    """
    rows, columns = (
        between_centres(side, config.patch_pixels * side / own * (torch.arange(cells) + 0.5) - 0.5)
        for cells, side, own in zip(config.grid, size, config.image_size, strict=True)
    )
    return rows, columns


def enlarge(values: np.ndarray, config: ViTConfig, size: Size) -> np.ndarray:
    """A map of patches, (h, w), on its image, (H, W). config, size: as of `between_patches`."""
    rows, columns = between_patches(config, size)
    return rows.numpy() @ values @ columns.numpy().T


def patch_components(features: Tensor) -> tuple[Tensor, Tensor]:
    """The first three principal components of all patches of some images together. features: (n, h, w, D), on the CPU.

    Returns (their colours, float32 (n, h, w, 3) in [0, 1], a component for each of red, green and blue; shares of the
    variance, (3,)). The same features have the same colour in all n images; the largest weight of a component is
    positive, so that the same features give the same colours.
    """
    patches = features.flatten(0, 2).double()
    centred = patches - patches.mean(0)
    variances, vectors = torch.linalg.eigh(centred.T @ centred)  # Ascending; (D, D), however many patches there are.
    variances, directions = variances.flip(0).clamp(min=0), vectors.T.flip(0)[:3]
    signs = directions.gather(1, directions.abs().argmax(1, keepdim=True)).sign()
    values = centred @ (directions * signs).T
    low, high = (torch.from_numpy(np.quantile(values.numpy(), end, axis=0)) for end in _ENDS)
    # Where nothing varies, the middle of the scale.
    varies = high - low > 1e-9 * patches.abs().max()
    colours = torch.where(varies, (values - low) / torch.where(varies, high - low, 1), 0.5).clamp(0, 1).float()
    shares = variances / variances.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return colours.unflatten(0, features.shape[:3]), shares[:3].float()
