"""BiT and the hybrid stem, against the formulae of their authors' code in numpy."""

import numpy as np
import pytest
import torch

from pipeline.model import create
from pipeline.model.resnet import PostActivationUnit, SameStdConv, StdConv


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.eval()


def image(channels, height, width, seed=1):
    return torch.randn((1, channels, height, width), generator=torch.Generator().manual_seed(seed))


def convolve(x, kernel, stride, before, after):
    """(C, h, w), kernel (D, C, k, k) -> (D, h', w'), with `before` and `after` zeros at the ends of each side;
    float64.
    """
    x = np.pad(x, ((0, 0), (before, after), (before, after)))
    size = kernel.shape[2]
    rows = range(0, x.shape[1] - size + 1, stride)
    columns = range(0, x.shape[2] - size + 1, stride)
    return np.array(
        [[np.einsum("chw,dchw->d", x[:, r : r + size, c : c + size], kernel) for c in columns] for r in rows]
    ).transpose(2, 0, 1)


def group_norm(x, scale, bias, eps, groups=32):
    groups = x.reshape(groups, -1)
    normal = (groups - groups.mean(1, keepdims=True)) / np.sqrt(groups.var(1, keepdims=True) + eps)
    return normal.reshape(x.shape) * scale[:, None, None] + bias[:, None, None]


def bit_kernel(kernel):
    centred = kernel - kernel.mean((1, 2, 3), keepdims=True)
    return centred / np.sqrt((centred**2).mean((1, 2, 3), keepdims=True) + 1e-10)


def hybrid_kernel(kernel):
    return (kernel - kernel.mean((1, 2, 3), keepdims=True)) / (kernel.std((1, 2, 3), keepdims=True) + 1e-5)


def arrays(module):
    return {name: p.detach().double().numpy() for name, p in module.named_parameters()}


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_kernels_are_standardised_each_in_its_own_way(scale):
    """On tiny kernels the epsilons differ: one is added to the variance, the other to the deviation."""
    for conv, standard, (before, after) in ((StdConv, bit_kernel, (1, 1)), (SameStdConv, hybrid_kernel, (0, 1))):
        module = filled(conv(3, 4, 3, stride=2))
        module.weight *= scale
        x = image(3, 6, 8)
        expected = convolve(x[0].double().numpy(), standard(arrays(module)["weight"]), 2, before, after)
        np.testing.assert_allclose(module(x)[0], expected, rtol=1e-4, atol=1e-4)
        assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize(("stride", "inputs"), [(1, 128), (2, 64)])
def test_the_hybrids_unit(stride, inputs):
    shapes = [(inputs, 32, 1, 1), (32, 32, 3, stride), (32, 128, 1, 1)]
    unit = filled(PostActivationUnit(shapes, is_small=False))
    w, x = arrays(unit), image(inputs, 4, 6)

    def norm(y, name):
        return group_norm(y, w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    start = x[0].double().numpy()
    y = np.maximum(norm(convolve(start, hybrid_kernel(w["conv1.weight"]), 1, 0, 0), "norm1"), 0)
    before = 1 if stride == 1 else 0  # padding "SAME" of an even side
    y = np.maximum(norm(convolve(y, hybrid_kernel(w["conv2.weight"]), stride, before, 1), "norm2"), 0)
    y = norm(convolve(y, hybrid_kernel(w["conv3.weight"]), 1, 0, 0), "norm3")
    if stride == 2:
        start = norm(convolve(start, hybrid_kernel(w["shortcut.weight"]), 2, 0, 0), "shortcut_norm")
    np.testing.assert_allclose(unit(x)[0], np.maximum(start + y, 0), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_small_stem():
    """He et al., arXiv 1512.03385, section 4.2: 3 x 3 convolutions, halved where channels grow, with BiT's kernels."""
    model = create("ViT-Ti/1", (6, 8), 3, small_stem=(16, 16, 32), width=8, depth=1, mlp_width=8, num_heads=1)
    assert (model.config.reduction, model.config.grid) == (2, (3, 4))
    filled(model.stem)
    x, w = image(3, 6, 8)[0].double().numpy(), arrays(model.stem)

    def layer(x, name, stride=1):
        y = convolve(
            x, bit_kernel(w[f"{name[0]}.weight"]), stride, *((1, 1) if w[f"{name[0]}.weight"].shape[2] == 3 else (0, 0))
        )
        return group_norm(y, w[f"{name[1]}.weight"], w[f"{name[1]}.bias"], 1e-6, groups=len(y) // 16)

    x = np.maximum(layer(x, ("root", "norm")), 0)
    for unit, stride in (("units.0", 1), ("units.1", 1), ("units.2", 2)):
        y = np.maximum(layer(x, (f"{unit}.conv1", f"{unit}.norm1"), stride), 0)
        short = x if stride == 1 else layer(x, (f"{unit}.shortcut", f"{unit}.shortcut_norm"), stride)
        x = np.maximum(short + layer(y, (f"{unit}.conv2", f"{unit}.norm2")), 0)
    np.testing.assert_allclose(model.stem(image(3, 6, 8))[0], x, rtol=1e-3, atol=1e-3)
    model.stem.initialize(torch.Generator().manual_seed(0))
    assert all(not unit.norm2.weight.any() for unit in model.stem.units), "each unit begins as its shortcut"


def test_initial_values():
    stem, again = (create("R26+S/32", 32, 2, stem=(1, 1), depth=1, patch_size=4, seed=3).stem for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(stem.parameters(), again.parameters(), strict=True))
    assert all(not unit.norm3.weight.any() for unit in stem.units), "each unit begins as its shortcut"
    assert (stem.units[0].norm1.weight == 1).all()
    model = create("BiT-R50x1", 32, 5, units=(1,), head_bias=-3.0)
    unit = model.units[0]
    assert unit.conv2.weight.std().item() == pytest.approx((9 * 64) ** -0.5, rel=0.02)
    assert (unit.norm3.weight == 1).all()
    assert not model.head.weight.any()
    assert (model.head.bias == -3).all()
