"""Names, parameter counts and FLOPs, against what is published."""

import pytest
import torch

from pipeline.errors import UserError
from pipeline.model import VisionTransformer, configure, forward_macs, num_parameters, training_flops_per_image
from pipeline.model.variants import VARIANTS, parse_name

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
# ExaFLOPs of pre-training on JFT, 303 M images: epochs, ViT paper's Table 6.
EXAFLOPS = {"ViT-B/16": (7, 224), "ViT-L/32": (7, 196), "ViT-L/16": (14, 1567), "ViT-H/14": (14, 4262)}


def shown_as(value, published):
    """Whether a value, rounded to the digits of the published number, is that number."""
    digits = len(str(published).partition(".")[2]) if isinstance(published, float) else 0
    return abs(value - published) <= 0.5 * 10**-digits + 1e-9


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(name):
    cases = zip(((0, False), (1000, False), (21843, True)), PARAMETERS[name], strict=True)
    for (num_classes, representation), published in cases:
        config = configure(name, 224, num_classes, representation=representation)
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in VisionTransformer(config).parameters())
        assert num_parameters(config) == count
        if published is not None:
            assert shown_as(count / 1e6, published), (count, published)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_parameter_formula_is_the_model(variant):
    config = configure(f"ViT-{variant}/16", (64, 32), 7, representation=True)
    with torch.device("meta"):
        assert num_parameters(config) == sum(p.numel() for p in VisionTransformer(config).parameters())


@pytest.mark.parametrize("name", GMACS)
def test_multiply_adds(name):
    largest = 518 if name.endswith("/14") else 512
    for size, published in zip((224, 384, largest), GMACS[name], strict=True):
        if published is not None:
            assert shown_as(forward_macs(configure(name, size)) / 1e9, published), (size, published)


@pytest.mark.parametrize("name", EXAFLOPS)
def test_training_flops_are_those_of_the_paper(name):
    epochs, published = EXAFLOPS[name]
    assert training_flops_per_image(configure(name)) * 303e6 * epochs / 1e18 == pytest.approx(published, rel=0.003)


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
        ({"width": 100}, "width = 100 is not divisible by num_heads = 12. Use 96 or 108 wide"),
        ({"depth": 0}, "depth = 0 must be at least 1"),
        ({"num_classes": -1}, "num_classes = -1"),
        ({"gelu": "exact"}, 'gelu = "exact" is unknown'),
        ({"dropout": 1.0}, "dropout = 1.0 must be in"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_the_way_out(changes, message):
    with pytest.raises(UserError) as error:
        configure("ViT-B/16", **changes)
    assert message in str(error.value)
