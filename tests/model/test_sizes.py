"""Names, parameter counts and FLOPs, against published values."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.architecture.variants import VARIANTS, parse_name
from pipeline.base.errors import UserError
from pipeline.model import build, configure, forward_macs, num_parameters, training_flops_per_image

# Millions of parameters at 224 px: no head; 1000 classes; representation layer and 21843 classes. Computed from the
# sizes in the ViT paper's Table 1, whose own counts are rounded: B 86, L 307, H 632.
PARAMETERS = {
    "ViT-Ti/16": (5.52, 5.72, 9.78),
    "ViT-S/32": (22.49, 22.88, 31.05),
    "ViT-S/16": (21.67, 22.05, 30.22),
    "ViT-B/32": (87.46, 88.22, 104.84),
    "ViT-B/16": (85.80, 86.57, 103.19),
    "ViT-L/32": (305.51, 306.54, 328.95),
    "ViT-L/16": (303.30, 304.33, 326.74),
    "ViT-H/14": (630.76, 632.05, 660.39),
    "ViT-g/14": (1011.2, 1012.6, None),
    "ViT-G/14": (1842.8, 1844.4, None),
}
# Forward GMACs at 224, 384, 512 (518 for patches of 14) computed from the same sizes.
GMACS = {
    "ViT-Ti/16": (1.25, 4.68, 10.43),
    "ViT-S/32": (1.14, 3.44, 6.37),
    "ViT-S/16": (4.60, 15.49, 31.75),
    "ViT-B/32": (4.41, 13.04, 23.65),
    "ViT-B/16": (17.56, 55.48, 107.0),
    "ViT-B/8": (78.15, 294.0, 658.0),
    "ViT-L/32": (15.38, 45.27, 81.66),
    "ViT-L/16": (61.55, 191.1, 362.0),
    "ViT-H/14": (167.3, None, 1016.7),
    "ViT-g/14": (267.0, None, 1595),
    "ViT-G/14": (483.7, None, 2822),
}
# (epochs, exaFLOPs) of pre-training on JFT, 303 M images: ViT paper, Table 6. Its values for ViTs are matched exactly, those
# for ResNets and hybrids within 4 %.
EXAFLOPS = {
    "ViT-B/16": (7, 224), "ViT-L/32": (7, 196), "ViT-L/16": (14, 1567), "ViT-H/14": (14, 4262),
    "BiT-R50x1": (7, 50), "BiT-R50x2": (7, 199), "BiT-R101x1": (7, 96), "BiT-R152x1": (7, 141), "BiT-R152x2": (7, 563),
    "BiT-R200x3": (14, 3306), "R50+ViT-B/32": (7, 106), "R50+ViT-B/16": (7, 274), "R50+ViT-L/32": (7, 246),
    "R50+ViT-L/16": (7, 859),
}  # fmt: skip
# Parameters with 1000 classes at 224 px, exactly as google-research/vision_transformer has them (vit_jax/models_test.py);
# its ViTs without "gap" have a class token, and none has a representation layer.
EXACT = {
    "ViT-Ti/16": 5_717_416, "ViT-S/32": 22_878_952, "ViT-S/16": 22_050_664, "ViT-B/32": 88_224_232,
    "ViT-B/16": 86_567_656, "ViT-B/8": 86_576_872, "ViT-L/32": 306_535_400, "ViT-L/16": 304_326_632,
    "ViT-H/14": 632_045_800, "R+Ti/16": 6_337_704, "R26+S/32": 36_431_912, "R50+ViT-B/16": 98_659_112,
    "R50+ViT-L/32": 328_994_856,
}  # fmt: skip
EXACT_GAP = {"ViT-B/16": 86_566_120, "ViT-B/32": 88_222_696, "ViT-S/16": 22_049_896, "ViT-S/32": 22_878_184}
# Millions of parameters with 1000 classes: timm, results/benchmark-infer-amp-nchw-pt112-cu113-rtx3090.csv
# (resnetv2_50x1_bitm, ...). R200x3 is not listed there; a test below sums the layers' shapes.
BIT_MILLIONS = {
    "BiT-R50x1": 25.55, "BiT-R50x3": 217.32, "BiT-R101x1": 44.54, "BiT-R101x3": 387.93, "BiT-R152x2": 236.34,
    "BiT-R152x4": 936.53,
}  # fmt: skip
# Deeper ResNets have more of the same units: of these, parameters and FLOPs are compared above.
COUNTED = ["ViT-B/16", "Axial-ViT-B/32", "R+Ti/16", "R26+S/32", "R50+ViT-B/16", "BiT-R50x3"]


def shown_as(value, published):
    """Whether a value, rounded to the digits of the published number, equals it."""
    digits = len(str(published).partition(".")[2]) if isinstance(published, float) else 0
    return abs(value - published) <= 0.5 * 10**-digits + 1e-9


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(name):
    cases = zip(((0, False), (1000, False), (21843, True)), PARAMETERS[name], strict=True)
    for (num_classes, representation), published in cases:
        config = configure(name, 224, num_classes, representation=representation)
        if published is not None:
            count = num_parameters(config)
            assert shown_as(count / 1e6, published), (count, published)


def test_parameter_counts_are_those_of_the_official_code():
    assert {name: num_parameters(configure(name)) for name in EXACT} == EXACT
    assert {name: num_parameters(configure(name, pool="gap")) for name in EXACT_GAP} == EXACT_GAP
    published = configure("ViT-B/16", 384, 1000)
    assert num_parameters(configure("R50+ViT-B/16", 384)) / 1e6 == pytest.approx(98.95, abs=0.005)  # timm, as below
    assert num_parameters(published) / 1e6 == pytest.approx(86.86, abs=0.005)


@pytest.mark.parametrize("name", BIT_MILLIONS)
def test_parameter_counts_of_bit(name):
    assert shown_as(num_parameters(configure(name)) / 1e6, BIT_MILLIONS[name])


def test_parameter_count_of_bit_r200x3_by_hand():
    width, count = 192, 7 * 7 * 3 * 192
    inputs = width
    for stage, units in enumerate((3, 24, 36, 3)):
        mid = width * 2**stage
        count += inputs * 4 * mid  # the first unit's shortcut
        for _ in range(units):
            count += inputs * mid + 9 * mid**2 + 4 * mid**2 + 2 * (inputs + mid + mid)
            inputs = 4 * mid
    assert num_parameters(configure("BiT-R200x3")) == count + 2 * inputs + inputs * 1000 + 1000


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_of_any_size_by_hand(variant):
    """(P^2*3*D + D) + D + (N+1)*D + L*(4D^2+4D + 2*D*M+M+D + 4D) + 2D + (D^2+D) + D*K+K"""
    config = configure(f"ViT-{variant}/16", (64, 32), 7, representation=True)
    D, L, M = config.width, config.depth, config.mlp_width
    outside = 16**2 * 3 * D + D + D + 9 * D + 2 * D + D**2 + D + D * 7 + 7
    assert num_parameters(config) == outside + L * (4 * D**2 + 4 * D + 2 * D * M + M + D + 4 * D)


@pytest.mark.parametrize("name", GMACS)
def test_multiply_adds(name):
    largest = 518 if name.endswith("/14") else 512
    for size, published in zip((224, 384, largest), GMACS[name], strict=True):
        if published is not None:
            assert shown_as(forward_macs(configure(name, size)) / 1e9, published), (size, published)


@pytest.mark.parametrize("name", EXAFLOPS)
def test_training_flops_are_those_of_the_paper(name):
    epochs, published = EXAFLOPS[name]
    tolerance = 0.003 if name.startswith("ViT") else 0.05
    assert training_flops_per_image(configure(name)) * 303e6 * epochs / 1e18 == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in COUNTED),
        ("ViT-S/16", {"positions": "relative", "pool": "gap", "patch_stride": 8}),
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


def test_names():
    assert parse_name("ViT-L/16") == (VARIANTS["L"], 16)
    config = configure("ViT-S/4", 32, 10, depth=6)
    assert (config.width, config.depth, config.patch_size, config.grid, config.num_tokens) == (384, 6, 4, (8, 8), 65)
    assert parse_name("ViT-g/14") != parse_name("ViT-G/14")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("vit-l/16", "ViT-L/16"), ("ViT-B16", "ViT-B/16"), ("ViT-Tiny/8", "ViT-Ti/8"), ("ViT-X/14", "ViT-"), ("", "ViT-")],
)
def test_an_unknown_name_gets_the_nearest_known(name, nearest):
    with pytest.raises(UserError, match=f'did you mean "{nearest}'):
        parse_name(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 225}, "225 is not divisible by patch_size = 16. Nearest sizes: 224 or 240"),
        ({"image_size": (224, 10)}, "10 is not divisible by patch_size = 16. Nearest sizes: 16."),
        ({"width": 100}, "width = 100 is not divisible by num_heads = 12. Use width 96 or 108"),
        ({"depth": 0}, "depth = 0 must be from 1 to 1,024"),
        ({"num_classes": -1}, "num_classes = -1 must be from 0"),
        ({"gelu": "exact"}, "gelu = 'exact' must be one of 'tanh', 'erf'"),
        ({"pool": "max"}, "pool = 'max' must be one of 'token', 'gap', 'map', 'mean', 'both', 'attentive'"),
        ({"dropout": 1.0}, "dropout = 1.0 must be at least 0 and below 1"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_a_remedy(changes, message):
    with pytest.raises(UserError) as error:
        configure("ViT-B/16", **changes)
    assert message in str(error.value)
