"""Prints the table of docs/weights.md: the largest difference of each family's features and patch tokens from transformers'.

Models of the size of ViT-B/16 with random values, read at 224 x 224 px and at 384 x 256.

    python tests/measure/measure_families.py
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
import transformers
from families import FAMILIES, difference, random_family

from pipeline.model import load

BASE = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "image_size": 224, "patch_size": 16,
}  # fmt: skip

transformers.utils.logging.set_verbosity_error()
for name, family in FAMILIES.items():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        ratio = {"mlp_ratio": 4} if "mlp_ratio" in family.config else {}
        theirs = random_family(transformers, family, Path(folder), 0.02, **BASE | ratio)
        same = difference(theirs, load(folder), (224, 224))
        other = difference(theirs, load(folder, image_size=(384, 256)), (384, 256), **family.any_size or {})
    print(f"{name:24} {same:.1e} {other:.1e}", flush=True)
