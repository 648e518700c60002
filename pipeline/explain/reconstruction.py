"""MAE's sheet: images, the patches that its encoder sees, and what its decoder paints for the others (arXiv 2111.06377,
Figure 2).

Shapes: B images, N patches, P patch side, H, W image height and width.
"""

import numpy as np
import torch
from torch import Tensor

from pipeline.model import ViTConfig
from pipeline.model.convert.preprocessing import HALF
from pipeline.model.layers import patches_of
from pipeline.objectives.mae import Mae, draw_masks, errors

_GREY = 0.5


@torch.no_grad()
def reconstruct(
    model: Mae, images: Tensor, rows: np.ndarray, seed: int, batch: int
) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Paint the removed patches of images (B, C, H, W), as the model reads them, `batch` of them at a time, on their
    device. Returns (images whose removed patches are grey; as predicted, uint8 (B, H, W, 3) each; losses, float32
    (B,)), on the CPU.

    rows: their numbers, from which, with the seed, the masks are drawn. A decoder of normalised pixels does not predict
    the mean and deviation of a patch: they are the image's own.
    """
    config = model.backbone.config
    assert isinstance(config, ViTConfig), "Mae refuses others"
    masked, painted, losses = [], [], []
    for part, numbers in zip(images.split(batch), np.split(rows, range(batch, len(rows), batch)), strict=True):
        drawn = draw_masks(seed, np.zeros(len(numbers), np.int64), numbers, model.num_patches, model.num_kept)
        kept, places = (tensor.to(part.device) for tensor in drawn)
        removed = (places == model.num_kept)[..., None]
        predicted = model.predict(part, kept, places).float()
        found = errors(model.as_predicted(part), predicted, config.patch_size, model.normalise)
        losses.append((found * removed[..., 0]).sum(1).cpu() / (model.num_patches - model.num_kept))
        patches = patches_of(model.as_predicted(part).float(), config.patch_size)
        if model.normalise:
            variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
            predicted = predicted * (variance + 1e-6).sqrt() + mean
        pixels = config.pixels
        is_as_read = (model.mean, model.std) == (HALF, HALF)
        of = (pixels.mean, pixels.std) if is_as_read else (model.mean, model.std)
        mean, std = (torch.tensor(values, device=part.device).repeat(config.patch_size**2) for values in of)
        grey = _GREY ** (1 / pixels.shown_power)  # as it is shown
        masked.append(_image_of(torch.where(removed, grey, patches * std + mean), config))
        painted.append(_image_of(torch.where(removed, predicted, patches) * std + mean, config))
    return np.concatenate(masked), np.concatenate(painted), torch.cat(losses)


def _image_of(patches: Tensor, config: ViTConfig) -> np.ndarray:
    """(B, N, C P P) in [0, 1] -> uint8 (B, H, W, 3), of `Pixels.shown`."""
    P, (rows, columns) = config.patch_size, config.grid
    cut = patches.view(len(patches), rows, columns, P, P, -1).permute(0, 1, 3, 2, 4, 5)
    pixels = cut.reshape(len(patches), rows * P, columns * P, -1)[..., list(config.pixels.shown)]
    return (pixels.clamp(0, 1) ** config.pixels.shown_power * 255).round().to(torch.uint8).cpu().numpy()
