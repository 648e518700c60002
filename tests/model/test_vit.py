import copy
import subprocess
import sys

import pytest
import torch
from model_parts import official, randomised
from torch.utils.flop_counter import FlopCounterMode

from pipeline.model import create
from pipeline.model.layers import attention, kernel_names, take_tokens
from pipeline.model.vit import PatchEmbedding


def tiny(**changes):
    settings = {"image_size": (8, 12), "num_classes": 5, "width": 24, "depth": 2, "mlp_width": 40, "num_heads": 3}
    return create("ViT-mu/4", **settings | changes)


def random_images(*shape, seed=2):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
@pytest.mark.parametrize("representation", [True, False])
def test_forward_is_the_equations_of_the_paper(equations, gelu, representation):
    model = randomised(tiny(gelu=gelu, representation=representation))
    images = random_images(3, 3, 8, 12)
    expected = equations(official(model), images.permute(0, 2, 3, 1).double().numpy(), gelu)
    with torch.no_grad():
        assert model(images) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("kept", [None, [[0, 3], [5, 1], [2, 4]]])
@pytest.mark.parametrize(
    ("patch", "channels", "size"),
    [(16, 3, (32, 48)), (14, 5, (28, 42)), (4, 1, (8, 12)), (8, 3, (17, 30)), (1, 24, (2, 3))],
)
def test_the_product_that_embeds_patches_is_the_convolution(
    monkeypatch: pytest.MonkeyPatch, patch: int, channels: int, size: tuple[int, int], kept: list, dtype, tolerance
) -> None:
    """Outputs and gradients against float64, relative to their largest value; also where pixels at the edge fill no
    patch.
    """
    layer = PatchEmbedding(channels, tiny(patch_size=patch, image_size=(2 * patch, 3 * patch)).config)
    torch.nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5, generator=torch.Generator().manual_seed(0))
    images = random_images(3, *size, channels).permute(0, 3, 1, 2).to(dtype)
    layer = layer.to(dtype)
    numbers = None if kept is None else torch.tensor(kept)
    gradient = random_images(3, 6 if kept is None else 2, 24, seed=3).to(dtype)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        read, embedding = images.to(dtype).requires_grad_(), copy.deepcopy(layer).to(dtype)
        out = embedding(read, numbers)
        gradients = torch.autograd.grad(out, [read, embedding.weight, embedding.bias], gradient.to(dtype))
        return [out.detach(), *gradients]

    if numbers is not None:
        assert torch.equal(layer(images, numbers), take_tokens(layer(images), numbers))
    expected = results(torch.float64)
    monkeypatch.setattr(PatchEmbedding, "convolved_on", ())
    for of_product, of_convolution in zip(results(dtype), expected, strict=True):
        assert of_product.shape == of_convolution.shape
        assert (of_product - of_convolution).abs().max() <= tolerance * of_convolution.abs().max()


def test_a_gpu_multiplies_and_embeds_kept_patches_alone() -> None:
    """The meta device takes its path. Multiply-adds of one patch: 24 * 3 * 4 * 4."""
    model = tiny().to("meta")
    images, kept = torch.empty(2, 3, 8, 12, device="meta"), torch.zeros(2, 1, dtype=torch.int64, device="meta")
    for numbers, patches in ((None, 12), (kept, 2)):
        with FlopCounterMode(display=False) as counter:
            model.embed(images, kept=numbers)
        counts = counter.get_flop_counts()["Global"]
        assert {str(name): count for name, count in counts.items()} == {"aten.addmm": 2 * patches * 24 * 48}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("relative", [False, True])
def test_gradients_of_attention_of_16_bits_are_only_rounded(dtype: torch.dtype, relative: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 10, 16)] * 4 + [(2, 3, 10, 10)] * relative
    gradient, q, k, v, *logits = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v, *logits)]
    out = attention(*inputs)
    with torch.no_grad():
        assert out.equal(attention(*inputs)), "as without gradients"

    exact = [x.detach().double().requires_grad_() for x in inputs]
    products = exact[0] @ exact[1].transpose(2, 3) / 4
    exact_out = torch.softmax(products + exact[3] if relative else products, dim=3) @ exact[2]
    found = torch.autograd.grad(out, inputs, gradient)
    for mine, expected in zip(found, torch.autograd.grad(exact_out, exact, gradient.double()), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), expected, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(out.double(), exact_out, rtol=0.01, atol=0.01)


def test_dropout_sits_after_every_dense_layer_but_qkv_and_after_the_positions():
    """ViT paper, B.1. Hooks record where dropout is applied, and to which width."""
    model = tiny(dropout=0.5, depth=1)
    calls = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda m, args, out, name=name: calls.append((name, tuple(out.shape[2:]))))
    model(random_images(2, 3, 8, 12))
    attention, mlp = "blocks.0.attention.dropout", "blocks.0.mlp.dropout"
    assert calls == [("dropout", (24,)), (attention, (24,)), (mlp, (40,)), (mlp, (24,))]


def test_initial_values_are_those_of_the_official_code():
    width, mlp_width = 192, 256
    model = create("ViT-Ti/16", 64, 10, representation=True, head_bias=-10.0, depth=1, mlp_width=mlp_width)
    block = model.blocks[0]

    def xavier(kernel, fan_in, fan_out):
        bound = (6 / (fan_in + fan_out)) ** 0.5
        assert kernel.abs().max() <= bound
        assert kernel.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)

    for kernel in (*block.attention.qkv.weight.chunk(3), block.attention.out.weight):
        xavier(kernel, width, width)
    xavier(block.mlp.up.weight, width, mlp_width)
    xavier(block.mlp.down.weight, mlp_width, width)

    def lecun(kernel, fan_in):
        assert kernel.std().item() == pytest.approx(fan_in**-0.5, rel=0.02)
        assert 1.9 < kernel.abs().max() * fan_in**0.5 * 0.87962566 <= 2.0 + 1e-5

    lecun(model.patch_embedding.weight, 3 * 16 * 16)
    lecun(model.representation.weight, width)

    assert model.positions.std().item() == pytest.approx(0.02, rel=0.05)
    for bias in (block.mlp.up.bias, block.mlp.down.bias):
        assert bias.std().item() == pytest.approx(1e-6, rel=0.2)
    zeros = [model.class_token, model.patch_embedding.bias, block.attention.qkv.bias, block.attention.out.bias]
    norms = [block.attention_norm, block.mlp_norm, model.norm]
    zeros += [model.representation.bias, model.head.weight, *(norm.bias for norm in norms)]
    assert all(not tensor.any() for tensor in zeros)
    assert all((norm.weight == 1).all() and norm.eps == 1e-6 for norm in norms)
    assert (model.head.bias == -10).all()


def test_initial_values_depend_on_the_seed_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = tiny(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again, other = tiny(seed=3).state_dict(), tiny(seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["positions"], other["positions"])


def test_a_head_and_its_size_leave_the_other_values_alone():
    small, large = tiny(num_classes=5).state_dict(), tiny(num_classes=50).state_dict()
    assert all(torch.equal(small[name], large[name]) for name in small if not name.startswith("head."))


def test_kernels_decay_and_nothing_else():
    model = tiny(representation=True)
    kernels = {"patch_embedding.weight", "representation.weight", "head.weight"}
    for i in range(2):
        kernels |= {f"blocks.{i}.{n}.weight" for n in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")}
    assert kernel_names(model) == kernels
    assert kernels <= {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("shape", [(2, 3, 12, 8), (2, 1, 8, 12)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"this model reads \(B, 3, 8, 12\)"):
        tiny()(torch.zeros(shape))


@pytest.mark.slow
def test_importing_the_model_imports_nothing_heavy():
    blocked = (
        "deepspeed ray mlflow pyarrow yaml PIL cv2 simplejpeg scipy pandas sklearn matplotlib webdataset safetensors"
    )
    code = (
        "import sys; from pipeline.model import create, load; create('ViT-mu/8', 16, 2); "
        f"print(*[m for m in {blocked.split()} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


@pytest.mark.parametrize(
    "changes",
    [
        *({"positions": name} for name in ("learned", "learned2d", "sincos2d", "sincos2d_mae", "relative", "none")),
        {"positions": "sincos2d", "positions_at": "blocks"},
        {"positions": "none", "rope_base": 100.0, "width": 48},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_beside_buffers_of_32(changes, dtype):
    """As DeepSpeed casts a model: parameters only."""
    model = tiny(**changes).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    logits = model(random_images(2, 3, 8, 12).to(dtype))
    assert logits.dtype == dtype
    logits.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
