"""Values and features of patches drawn on their images: maps between the centres of patches, and principal components
as colours (Oquab et al., DINOv2, arXiv 2304.07193, Figure 1).

Shapes: D width, h x w patches, H x W pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from pipeline.architecture.config import Size
from pipeline.base.gallery import Tile, folded, gallery

# The ends of the colour scale, in per cent of the patches: a few patches with outlying features would leave the rest
# grey.
_ENDS = (0.01, 0.99)
_CHANNELS = ("red", "green", "blue")


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


def between_patches(grid: Size, patch: int, read: Size, size: Size) -> tuple[Tensor, Tensor]:
    """Weights (H, h) and (W, w) by which a map of patches is enlarged: linear between the centres of the patches.

    grid: (h, w). patch: side of a patch in the image that the model reads, of the size `read`. size: (H, W) of the
    image as it is drawn, which may have more pixels.
    """
    rows, columns = (
        between_centres(side, patch * side / own * (torch.arange(cells) + 0.5) - 0.5)
        for cells, side, own in zip(grid, size, read, strict=True)
    )
    return rows, columns


def enlarge(values: np.ndarray, patch: int, read: Size, size: Size) -> np.ndarray:
    """A map of patches, (h, w), on its image, (H, W). patch, read, size: as of `between_patches`."""
    rows, columns = between_patches((len(values), values.shape[1]), patch, read, size)
    return rows.numpy() @ values @ columns.numpy().T


@dataclass(frozen=True)
class PatchComponents:
    """The first three principal components of all patches of some images together.

    colours: float32 (n, h, w, 3) in [0, 1], a component for each of red, green and blue; the same features have the
    same colour in all n images. shares: (3,), of the variance.
    """

    colours: Tensor
    shares: Tensor


def patch_components(features: Tensor) -> PatchComponents:
    """Components of the features of patches, (n, h, w, D), on the CPU.

    The largest weight of a component is positive, so that the same features give the same colours.
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
    return PatchComponents(colours.unflatten(0, features.shape[:3]), shares[:3].float())


def draw_components(components: PatchComponents, patch: int, read: Size, inputs: Sequence[Tile]) -> Figure:
    """Each image, and below it the first three principal components of its patches as red, green and blue.

    patch, read: as of `between_patches`.
    """
    colours = [
        Tile(np.dstack([enlarge(of, patch, read, image.pixels.shape[:2]) for of in found.permute(2, 0, 1).numpy()]))
        for image, found in zip(inputs, components.colours, strict=True)
    ]
    shares = ", ".join(
        f"{name} {share:.1%}" for name, share in zip(_CHANNELS, components.shares.tolist(), strict=False)
    )
    note = (
        "The first three principal components of the patches of all these images together: patches with similar"
        f" features have similar colours. Shares of the variance: {shares}."
    )
    return gallery(folded([inputs, colours]), "Patches by their features", note)
