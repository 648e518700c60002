"""Compares our reading of timm's models with timm: a line for each model whose name fits a pattern.

    pip install --no-deps timm torchvision
    python tests/measure/measure_timm.py 'vit_small*' 'deit3_small*'
    python tests/measure/measure_timm.py 'vit_small*' in_chans=4

Models have two blocks and random values, are saved as timm saves them, and read at the size of their configuration and at another
one. Printed are the largest differences of pooled features, logits and patch tokens as a share of the largest, at both sizes, and of
the features of timm's model that reads what `to_timm` writes; or the error with which the model is refused.
"""

import fnmatch
import importlib
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from families import randomised
from torch import library

from pipeline.architecture.pixels import Pixels
from pipeline.base.errors import UserError
from pipeline.model import load, read_weights, to_timm
from pipeline.model.files import write_folder

# torchvision's wheel is built for CUDA; without its operators, a CPU's torch can import it only if these are declared.
operators = library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    operators.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
timm: Any = importlib.import_module("timm")


def main(patterns: list[str]) -> None:
    channels = max(int(given.partition("=")[2] or 3) for given in patterns)
    for name in timm.list_models():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            with tempfile.TemporaryDirectory() as folder:
                print(f"{name:40} {result(name, Path(folder), channels)}", flush=True)


def result(name: str, folder: Path, channels: int) -> str:
    try:
        with torch.device("meta"):
            heads = timm.create_model(name).blocks[0].attn.num_heads  # as it depends on the depth for ours
        theirs = randomised(timm.create_model(name, depth=2, num_heads=heads, in_chans=channels), 0.02)
    except (AttributeError, AssertionError) as error:
        return f"no plain blocks ({error})"
    timm.models.save_for_hf(theirs, folder / "saved")
    try:
        data = None if channels == 3 else Pixels.full_range(tuple(map(str, range(channels))), "uint16")
        ours = load(folder / "saved", pixels=data)
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
    found.append(difference(theirs, load(folder / "saved", image_size=other, pixels=data), other))
    return " ".join(f"{number:.1e}" for number in found) + f" {written}"


@torch.no_grad()
def difference(theirs: Any, ours: Any, size: tuple[int, int]) -> float:
    read = ours.config.pixels
    pixels = torch.rand(2, read.num_channels, *size, generator=torch.Generator().manual_seed(2))
    # timm's own configuration keeps that of three channels.
    known = {"mean": read.mean, "std": read.std} if read.num_channels != 3 else theirs.pretrained_cfg
    mean, std = (torch.tensor(known[key]).view(-1, 1, 1) for key in ("mean", "std"))
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


warnings.filterwarnings("ignore")
main(sys.argv[1:])
