"""Principal components of the patches' features, as colours (Oquab et al., DINOv2, arXiv 2304.07193, Figure 1).

Shapes: B images, D width, h x w patches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.model import VisionTransformer

# The ends of the colour scale, in per cent of the patches: a few patches with outlying features would leave the rest
# grey.
_ENDS = (0.01, 0.99)


@dataclass(frozen=True)
class PatchComponents:
    """The first three principal components of all patches of B images together.

    colours: float32 (B, h, w, 3) in [0, 1], on the CPU, a component for each of red, green and blue; the same features
    have the same colour in all images. shares: (3,), of the variance.
    """

    colours: Tensor
    shares: Tensor


@torch.no_grad()
def patch_components(model: VisionTransformer, images: Tensor, batch: int) -> PatchComponents:
    """Components of the patch tokens after the last norm. images: (B, 3, height, width), `batch` of them at a time.

    The largest weight of a component is positive, so that the same weights and images give the same colours.
    """
    first = -model.config.num_patches
    tokens = [model.encode(model.embed(part))[:, first:].double().cpu() for part in images.split(batch)]
    patches = torch.cat(tokens).flatten(0, 1)
    centred = patches - patches.mean(0)
    variances, vectors = torch.linalg.eigh(centred.T @ centred)  # Ascending; (D, D), however many patches there are.
    variances, directions = variances.flip(0).clamp(min=0), vectors.T.flip(0)[:3]
    signs = directions.gather(1, directions.abs().argmax(1, keepdim=True)).sign()
    values = centred @ (directions * signs).T
    low, high = values.quantile(values.new_tensor(_ENDS), dim=0)
    # Where nothing varies, the middle of the scale.
    varies = high - low > 1e-9 * patches.abs().max()
    colours = torch.where(varies, (values - low) / torch.where(varies, high - low, 1), 0.5).clamp(0, 1)
    shares = variances / variances.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return PatchComponents(colours.float().unflatten(0, (len(images), *model.config.grid)), shares[:3].float())
