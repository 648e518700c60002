"""Compares models that we read with the program that wrote them: the numbers in docs/weights.md.

    python tests/measure/measure_weights.py                             # transformers: each family
    pip install --no-deps timm torchvision
    python tests/measure/measure_weights.py 'vit_small*' 'deit3_small*'     # timm: each model whose name fits a pattern

transformers: models of the size of ViT-B/16 with random values; the largest difference of features and patch tokens at
224 x 224 px and at 384 x 256. timm: models of two blocks with random values, saved as timm saves them. Printed are the
largest differences of pooled features, logits and patch tokens as a share of the largest, at the configured size and at
another one, and of the features of timm's model that reads what `to_timm` writes; or the error with which the model is
refused.
"""

import fnmatch
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import families
import torch
from torch import library

from pipeline.base.errors import UserError
from pipeline.model import load, read_weights, to_timm
from pipeline.model.files import write_folder

BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
}


def of_transformers(folder: Path) -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    for name, family in families.FAMILIES.items():
        torch.manual_seed(0)
        ratio = {"mlp_ratio": 4} if "mlp_ratio" in family.config else {}
        theirs = families.random_family(transformers, family, folder / name, 0.02, **BASE | ratio)
        same = families.difference(theirs, load(folder / name), (224, 224))
        other = load(folder / name, image_size=(384, 256))
        print(
            f"{name:24} {same:.1e} {families.difference(theirs, other, (384, 256), **family.any_size or {}):.1e}",
            flush=True,
        )


def of_timm(patterns: list[str], folder: Path) -> None:
    # torchvision's wheel is built for CUDA; without its operators, a CPU's torch can import it only if these are
    # declared.
    operators = library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        operators.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    timm: Any = importlib.import_module("timm")
    for name in timm.list_models():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            print(f"{name:40} {result(timm, name, folder / name)}", flush=True)


def result(timm: Any, name: str, folder: Path) -> str:
    try:
        with torch.device("meta"):
            heads = timm.create_model(name).blocks[0].attn.num_heads  # as it depends on the depth for ours
        theirs = families.randomised(timm.create_model(name, depth=2, num_heads=heads), 0.02)
    except (AttributeError, AssertionError) as error:
        return f"no plain blocks ({error})"
    timm.models.save_for_hf(theirs, folder / "saved")
    try:
        ours = load(folder / "saved")
    except UserError as error:
        return str(error).partition(": ")[2]
    config = ours.config
    found = [difference(theirs, ours, config.image_size)]
    try:
        tensors, description = to_timm(ours, None, read_weights(folder / "saved")[2].get("preprocessing", {}))
        write_folder(folder / "written", tensors, {"config.json": description})
        again = timm.create_model(f"local-dir:{folder / 'written'}", pretrained=True).eval()
        written = f"{difference(again, ours, config.image_size):.1e}"
    except UserError as error:
        written = f"not written: {error}"
    (rows, columns), side = config.grid, config.patch_pixels
    other = (rows + 3) * side, (columns - 2) * side
    theirs.set_input_size(img_size=other)
    found.append(difference(theirs, load(folder / "saved", image_size=other), other))
    return " ".join(f"{number:.1e}" for number in found) + f" {written}"


@torch.no_grad()
def difference(theirs: Any, ours: Any, size: tuple[int, int]) -> float:
    read = ours.config.pixels
    pixels = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(2))
    mean, std = (torch.tensor(theirs.pretrained_cfg[key]).view(-1, 1, 1) for key in ("mean", "std"))
    tokens = theirs.forward_features((pixels - mean) / std)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (read.mean, read.std))
    images = (pixels - mean) / std
    logits, patches = ours.eval()(images, with_patches=True)
    pairs = [
        (logits, theirs.forward_head(tokens)),
        (ours.features(images), theirs.forward_head(tokens, pre_logits=True)),
        (patches, tokens[:, -patches.shape[1] :]),
    ]
    return max(float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs)


with tempfile.TemporaryDirectory() as directory:
    if sys.argv[1:]:
        of_timm(sys.argv[1:], Path(directory))
    else:
        of_transformers(Path(directory))
