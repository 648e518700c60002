"""Export of MAE with its decoder, compared with the target program by its reconstruction and loss; used by
export.py.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.model import VisionTransformer, ViTConfig, files, read_weights
from pipeline.model.convert.mae import to_facebook, to_huggingface
from pipeline.objectives import mae
from pipeline.objectives.mae import Mae, as_places

FORMATS = ("mae", "huggingface_mae")
NUM_IMAGES = 4


def write(model: Mae, form: str, path: Path, view: dict[str, Any]) -> None:
    """Write `path` as form = mae (a .pth) or huggingface_mae (a folder). Raises UserError for a model that it cannot
    hold.
    """
    vit = model.backbone
    assert isinstance(vit, VisionTransformer)
    decoder = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("backbone.")}
    if form == "mae":
        files.write_torch(path, {"model": to_facebook(vit, decoder, model.facts)})
        E = model.decoder_embed.out_features
        print(
            f"for models_mae.py: img_size={vit.config.image_size[0]}, patch_size={vit.config.patch_size},"
            f" embed_dim={vit.config.width}, depth={vit.config.depth}, num_heads={vit.config.num_heads},"
            f" decoder_embed_dim={E}, decoder_depth={len(model.decoder_blocks)}, decoder_num_heads={model.num_heads},"
            f" norm_pix_loss={model.normalise}"
        )
        return
    tensors, config, processor = to_huggingface(vit, decoder, model.facts, view)
    files.write_folder(path, tensors, {"config.json": config, "preprocessor_config.json": processor})


@torch.no_grad()
def compare(model: Mae, form: str, path: Path) -> tuple[str, Tensor, Tensor]:
    """Returns (program, our reconstructions, those of the target program, which reads the file)."""
    config = model.backbone.config
    assert isinstance(config, ViTConfig)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand((NUM_IMAGES, 3, *config.image_size), generator=generator) * 2 - 1
    noise = torch.rand((NUM_IMAGES, model.num_patches), generator=generator)
    kept, places = as_places(np.sort(noise.argsort(1)[:, : model.num_kept].numpy(), axis=1), model.num_patches)
    ours = model.predict(images, kept, places)
    if form == "huggingface_mae" and importlib.util.find_spec("transformers"):
        library = importlib.import_module("transformers")
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_error()
        reader = library.ViTMAEForPreTraining.from_pretrained(path, local_files_only=True).eval()
        found = reader(model.as_predicted(images), noise=noise)
        own = mae.loss(model.as_predicted(images), ours, found.mask > 0, config.patch_size, model.normalise)
        print(f"transformers {library.__version__}: loss {float(found.loss):.6g}, ours {float(own):.6g}")
        return f"transformers {library.__version__}", ours, found.logits
    facts = model.facts
    known = {"num_heads": facts.num_heads, "normalise": facts.normalise}
    again = Mae.from_weights(read_weights(path), lambda line: None, **known)
    assert again is not None, "its decoder was just written"
    predicted = again.predict(images, kept, places)
    if not facts.normalise:  # Of a .pth, they are pixels as ImageNet's mean and deviation make them.
        predicted, ours = _as_pixels(predicted, again), _as_pixels(ours, model)
    return "our own reader", ours, predicted


def _as_pixels(predictions: Tensor, model: Mae) -> Tensor:
    """(B, N, 3 P P) of a model -> in [0, 1]."""
    mean, std = (torch.tensor(values).repeat(predictions.shape[2] // 3) for values in (model.mean, model.std))
    return predictions * std + mean
