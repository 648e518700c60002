"""Names, parameter counts and FLOPs, against published values."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.model import build, configure, forward_macs, num_parameters, training_flops_per_image

# (epochs, exaFLOPs) of pre-training on JFT, 303 M images: ViT paper, Table 6. Its values for ViTs are matched exactly,
# those for ResNets and hybrids within 4 %.
EXAFLOPS = {
    "ViT-B/16": (7, 224),
    "ViT-L/32": (7, 196),
    "ViT-L/16": (14, 1567),
    "ViT-H/14": (14, 4262),
    "BiT-R50x1": (7, 50),
    "BiT-R50x2": (7, 199),
    "BiT-R101x1": (7, 96),
    "BiT-R152x1": (7, 141),
    "BiT-R152x2": (7, 563),
    "BiT-R200x3": (14, 3306),
    "R50+ViT-B/32": (7, 106),
    "R50+ViT-B/16": (7, 274),
    "R50+ViT-L/32": (7, 246),
    "R50+ViT-L/16": (7, 859),
}
# Parameters with 1000 classes at 224 px, exactly as google-research/vision_transformer has them
# (vit_jax/models_test.py); its ViTs without "gap" have a class token, and none has a representation layer.
EXACT = {
    "ViT-Ti/16": 5_717_416,
    "ViT-S/32": 22_878_952,
    "ViT-S/16": 22_050_664,
    "ViT-B/32": 88_224_232,
    "ViT-B/16": 86_567_656,
    "ViT-B/8": 86_576_872,
    "ViT-L/32": 306_535_400,
    "ViT-L/16": 304_326_632,
    "ViT-H/14": 632_045_800,
    "R+Ti/16": 6_337_704,
    "R26+S/32": 36_431_912,
    "R50+ViT-B/16": 98_659_112,
    "R50+ViT-L/32": 328_994_856,
}
EXACT_GAP = {"ViT-B/16": 86_566_120, "ViT-B/32": 88_222_696, "ViT-S/16": 22_049_896, "ViT-S/32": 22_878_184}
# Millions of parameters with 1000 classes: timm, results/benchmark-infer-amp-nchw-pt112-cu113-rtx3090.csv
# (resnetv2_50x1_bitm, ...). R200x3 is not listed there.
BIT_MILLIONS = {
    "BiT-R50x1": 25.55,
    "BiT-R50x3": 217.32,
    "BiT-R101x1": 44.54,
    "BiT-R101x3": 387.93,
    "BiT-R152x2": 236.34,
    "BiT-R152x4": 936.53,
}
# Deeper ResNets have more of the same units: of these, parameters and FLOPs are compared above.
COUNTED = ["ViT-B/16", "Axial-ViT-B/32", "R+Ti/16", "R26+S/32", "R50+ViT-B/16", "BiT-R50x3"]


def shown_as(value, published):
    """Whether a value, rounded to the digits of the published number, equals it."""
    digits = len(str(published).partition(".")[2]) if isinstance(published, float) else 0
    return abs(value - published) <= 0.5 * 10**-digits + 1e-9


def test_parameter_counts_are_those_of_the_official_code():
    assert {name: num_parameters(configure(name)) for name in EXACT} == EXACT
    assert {name: num_parameters(configure(name, pool="gap")) for name in EXACT_GAP} == EXACT_GAP
    published = configure("ViT-B/16", 384, 1000)
    assert num_parameters(configure("R50+ViT-B/16", 384)) / 1e6 == pytest.approx(98.95, abs=0.005)  # timm, as below
    assert num_parameters(published) / 1e6 == pytest.approx(86.86, abs=0.005)


@pytest.mark.parametrize("name", BIT_MILLIONS)
def test_parameter_counts_of_bit(name):
    assert shown_as(num_parameters(configure(name)) / 1e6, BIT_MILLIONS[name])


@pytest.mark.parametrize("name", EXAFLOPS)
def test_training_flops_are_those_of_the_paper(name):
    epochs, published = EXAFLOPS[name]
    tolerance = 0.003 if name.startswith("ViT") else 0.05
    assert training_flops_per_image(configure(name)) * 303e6 * epochs / 1e18 == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in COUNTED),
        ("ViT-S/16", {"positions": "relative", "pool": "gap"}),
        ("Axial-ViT-B/16", {"positions": "relative"}),
        ("ViT-S/16", {"swiglu": True, "rope_base": 100.0, "qkv_bias": "qv", "registers": 4}),
    ],
)
def test_multiply_adds_are_those_that_torch_counts(name, changes):
    """torch counts during a forward pass on the meta device, with a non-square image and no head."""
    config = configure(name, (192, 160), 0, **changes)
    with torch.device("meta"), torch.no_grad():
        model, image = build(config).eval(), torch.empty(1, 3, 192, 160)
        with FlopCounterMode(display=False) as counter:
            model(image)
    assert counter.get_total_flops() == 2 * forward_macs(config)
