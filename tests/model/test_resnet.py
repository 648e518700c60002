"""BiT and the hybrid stem, against the formulae of their authors' code in numpy."""

import numpy as np
import pytest
import torch

from pipeline.base.errors import UserError
from pipeline.model import create
from pipeline.model.resnet import HybridStem, PostActivationUnit, PreActivationUnit, SameStdConv, StdConv


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.eval()


def image(channels, height, width, seed=1):
    return torch.randn((1, channels, height, width), generator=torch.Generator().manual_seed(seed))


def convolve(x, kernel, stride, before, after):
    """(C, h, w), kernel (D, C, k, k) -> (D, h', w'), with `before` and `after` zeros at the ends of each side; float64."""
    x = np.pad(x, ((0, 0), (before, after), (before, after)))
    size = kernel.shape[2]
    rows = range(0, x.shape[1] - size + 1, stride)
    columns = range(0, x.shape[2] - size + 1, stride)
    return np.array([[np.einsum("chw,dchw->d", x[:, r : r + size, c : c + size], kernel) for c in columns]
                     for r in rows]).transpose(2, 0, 1)  # fmt: skip


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


def pool(x, pad):
    x = np.pad(x, ((0, 0), pad, pad), constant_values=0)
    return np.array([[x[:, r : r + 3, c : c + 3].max((1, 2)) for c in range(0, x.shape[2] - 2, 2)]
                     for r in range(0, x.shape[1] - 2, 2)]).transpose(2, 0, 1)  # fmt: skip


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
def test_bits_unit(stride, inputs):
    unit = filled(PreActivationUnit(inputs, 32, stride))
    w, x = arrays(unit), image(inputs, 4, 6)
    assert ("shortcut.weight" in w) == (stride == 2)

    def act(y, i):
        return np.maximum(group_norm(y, w[f"norm{i}.weight"], w[f"norm{i}.bias"], 1e-5), 0)

    pre = act(x[0].double().numpy(), 1)
    y = convolve(pre, bit_kernel(w["conv1.weight"]), 1, 0, 0)
    y = convolve(act(y, 2), bit_kernel(w["conv2.weight"]), stride, 1, 1)
    y = convolve(act(y, 3), bit_kernel(w["conv3.weight"]), 1, 0, 0)
    shortcut = x[0].numpy() if stride == 1 else convolve(pre, bit_kernel(w["shortcut.weight"]), 2, 0, 0)
    np.testing.assert_allclose(unit(x)[0], y + shortcut, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(("stride", "inputs"), [(1, 128), (2, 64)])
def test_the_hybrids_unit(stride, inputs):
    unit = filled(PostActivationUnit(inputs, 32, stride))
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
def test_the_roots():
    """BiT pads its pooling with zeros; the hybrid's conv pads 2 before and 3 after, its pooling 0 and 1."""
    bit = filled(create("BiT-R50x1", (16, 24), 0, units=(1,), width=32))
    x, seen = image(3, 16, 24), []
    bit.units[0].register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    bit(x)
    root = convolve(x[0].double().numpy(), bit_kernel(arrays(bit)["root.weight"]), 2, 3, 3)
    np.testing.assert_allclose(seen[0], pool(root, (1, 1)), rtol=1e-4, atol=1e-4)
    assert (pool(root, (1, 1)) == 0).any(), "the zeros count"

    stem = filled(HybridStem(()))
    w = arrays(stem)
    root = convolve(x[0].double().numpy(), hybrid_kernel(w["root.weight"]), 2, 2, 3)
    root = np.maximum(group_norm(root, w["norm.weight"], w["norm.bias"], 1e-6), 0)
    np.testing.assert_allclose(stem(x)[0], pool(root, (0, 1)), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_bit_ends_in_a_norm_a_rectifier_and_the_mean():
    model = filled(create("BiT-R50x1", (16, 24), 3, units=(1,), width=32))
    seen = []
    model.units[-1].register_forward_hook(lambda module, args, out: seen.append(out[0].double().numpy()))
    logits = model(image(3, 16, 24))
    w = arrays(model)
    features = np.maximum(group_norm(seen[0], w["norm.weight"], w["norm.bias"], 1e-5), 0).mean((1, 2))
    np.testing.assert_allclose(model.features(image(3, 16, 24))[0], features, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(logits[0], features @ w["head.weight"].T + w["head.bias"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "channels", "stride", "grid"),
    [("R50+ViT-B/16", 1024, 16, (14, 24)), ("R50+ViT-L/32", 2048, 32, (7, 12)), ("R26+S/32", 2048, 32, (7, 12)),
     ("R+Ti/16", 64, 4, (7, 12))],
)  # fmt: skip
def test_the_hybrids_strides(name, channels, stride, grid):
    """As the paper's section 4.1; R+Ti/16 cuts the output of its stem, which downsamples 4 times, into patches of 8."""
    with torch.device("meta"):
        model = create(name, (224, 384), 10)
        features = model.stem(torch.empty(1, 3, 224, 384))
    assert features.shape == (1, channels, 224 // stride, 384 // stride)
    assert model.config.grid == grid


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


@pytest.mark.parametrize("wrong", [(), (32, 16), (24,), (8192,)])
def test_wrong_channels_of_a_small_stem(wrong):
    with pytest.raises(UserError, match="multiples of 16"):
        create("ViT-Ti/1", 32, 10, small_stem=wrong)
    with pytest.raises(UserError, match="two stems"):
        create("R8+Ti/8", 32, 10, small_stem=(16,))


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
