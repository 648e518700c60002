"""Masked patch prediction against independent computations, and in a step of training."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline import model as models
from pipeline.architecture.config import ViTConfig
from pipeline.architecture.pixels import RGB8
from pipeline.data.loading.loader import Batch, normalise
from pipeline.evaluate.loaded_model import load_model
from pipeline.model import MaskedViT, VisionTransformer, build, configure
from pipeline.objectives.masked_patches import MaskedPatches
from pipeline.objectives.objective import mean_of_valid
from pipeline.settings.commands.weights import WeightsConfig

CPU = torch.device("cpu")


def masked(target: str, name: str = "ViT-mu/4", size: int | tuple[int, int] = 16, **changes: object) -> ViTConfig:
    config = configure(name, size, 0, masked=target, **changes)
    return config


def batch_of(images: np.ndarray | Tensor, rows: list[int] | None = None, epoch: int = 0) -> Batch:
    images = torch.as_tensor(images)
    rows = list(range(len(images))) if rows is None else rows
    valid = torch.ones(len(images), dtype=torch.bool)
    return Batch(
        (images[None],),
        torch.zeros(len(images), 1, dtype=torch.int64),
        valid,
        np.array(rows),
        np.full(len(rows), epoch),
    )


def noise(count: int, height: int = 16, width: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


def color(pixels: np.ndarray) -> int:
    """Colour class of a region (h, w, 3), in plain Python."""
    bits = [min(7, int(np.floor(pixels[:, :, c].astype(np.float64).mean() * 8 / 255 + 1e-9))) for c in range(3)]
    return bits[0] * 64 + bits[1] * 8 + bits[2]


@pytest.mark.parametrize("size", [16, (8, 24)])
def test_targets_are_what_the_patches_show(size: int | tuple[int, int]) -> None:
    """Also of a grid that is not square, against a loop over patches in numpy."""
    height, width = (size, size) if isinstance(size, int) else size
    images = noise(3, height, width)
    images[0, :4, :4] = 255  # the last class
    for target in ("mean_color", "small_patch", "pixels"):
        config = masked(target, size=size)
        rows, columns = config.grid
        corrupted = torch.arange(rows * columns).flip(0).expand(3, -1)
        found = MaskedPatches(build(config), 0).targets(torch.from_numpy(images), corrupted)
        for image, of_image in zip(images, found, strict=True):
            for number, of_patch in zip(corrupted[0].tolist(), of_image, strict=True):
                top, left = number // columns * 4, number % columns * 4
                patch = image[top : top + 4, left : left + 4]
                if target == "pixels":
                    expected = patch.transpose(2, 0, 1).ravel() / 127.5 - 1
                    np.testing.assert_allclose(of_patch.numpy(), expected, atol=1e-6)
                elif target == "mean_color":
                    assert of_patch.tolist() == [color(patch)]
                else:  # A patch of 4 x 4 pixels is its own small patch.
                    assert of_patch.tolist() == [color(patch[y : y + 1, x : x + 1]) for y in range(4) for x in range(4)]
    white = torch.full((1, 16, 16, 3), 255, dtype=torch.uint8)
    assert MaskedPatches(build(masked("mean_color")), 0).targets(white, torch.tensor([[3]])).item() == 511


def test_the_small_patch_is_made_of_means() -> None:
    images = noise(1, 16, 16)
    config = masked("small_patch", "ViT-mu/8")
    found = MaskedPatches(build(config), 0).targets(torch.from_numpy(images), torch.tensor([[1]]))
    cells = [images[0, 2 * y : 2 * y + 2, 8 + 2 * x : 10 + 2 * x] for y in range(4) for x in range(4)]
    assert found[0, 0].tolist() == [color(cell) for cell in cells]


def test_half_of_the_patches_are_corrupted_in_three_ways() -> None:
    """Shares of 80, 10 and 10 % within four standard deviations; a replacement is never the same patch."""
    config = masked("mean_color", "ViT-mu/4", 56)  # 14 x 14 patches
    N, count = 196, 400
    batch = batch_of(np.zeros((count, 1, 1, 3), np.uint8))
    sources, corrupted = MaskedPatches(build(config), 5).draw(batch, training=True).values()
    assert sources.shape == (count, N)
    assert corrupted.shape == (count, 98)
    is_corrupted = torch.zeros(count, N, dtype=torch.bool).scatter(1, corrupted, True)
    assert (is_corrupted.sum(1) == 98).all(), "each once"
    own = torch.arange(N).expand(count, -1)
    assert (sources[~is_corrupted] == own[~is_corrupted]).all()
    how = sources[is_corrupted]
    total = count * 98
    for share, found in (
        (0.8, how == N),
        (0.1, (how != N) & (how != own[is_corrupted])),
        (0.1, how == own[is_corrupted]),
    ):
        assert abs(found.float().mean() - share) < 4 * (share * (1 - share) / total) ** 0.5
    others = how[(how != N) & (how != own[is_corrupted])]
    assert len(others.unique()) > 0.99 * N
    often = is_corrupted.float().mean(0)
    assert ((often - 0.5).abs() < 5 * 0.5 / count**0.5).all(), "each place as often"


def test_a_sample_is_corrupted_alike_wherever_it_is() -> None:
    masking = MaskedPatches(build(masked("mean_color")), 1)
    images = noise(4)
    whole = masking.draw(batch_of(images, [3, 9, 27, 81]), True)
    part = masking.draw(batch_of(images[:2], [27, 81]), True)
    assert all(torch.equal(whole[name][2:], values) for name, values in part.items())
    for other in (
        masking.draw(batch_of(images, [3, 9, 27, 81], 1), True),
        MaskedPatches(masking.backbone, 2).draw(batch_of(images, [3, 9, 27, 81]), True),
    ):
        assert not torch.equal(whole["corrupted"], other["corrupted"])


def test_the_model_reads_the_mask_token_another_patch_and_the_patch_itself() -> None:
    """Against the steps of the plain ViT, one image at a time."""
    config = masked("pixels", pool="token")
    model = MaskedViT(config, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) * 0.1
            )
    batch = batch_of(noise(2))
    sources, corrupted = MaskedPatches(build(config), 0).draw(batch, training=True).values()
    images = normalise(batch.images, CPU, torch.float32, RGB8)
    found = model(images, sources, corrupted)
    for i in range(2):
        patches = model.embed(images[i : i + 1])[0]
        given = torch.stack([model.mask_token[0, 0] if at == 16 else patches[at] for at in sources[i].tolist()])
        tokens = model.encode(given[None])[0, 1:]  # behind the class token
        torch.testing.assert_close(found[i], model.head(tokens[corrupted[i]]))


def test_losses_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    for target, outputs in (("mean_color", 512), ("small_patch", 8192)):
        masking = MaskedPatches(build(masked(target)), 0)
        T = outputs // 512
        predictions = torch.randn(3, 8, outputs, generator=generator)
        targets = torch.randint(0, 512, (3, 8, T), generator=generator)
        expected = []
        for i in range(3):
            each = [
                F.cross_entropy(predictions[i, c, 512 * t : 512 * t + 512], targets[i, c, t])
                for c in range(8)
                for t in range(T)
            ]
            expected.append(torch.stack(each).mean())
        torch.testing.assert_close(masking.patch_losses(predictions, targets), torch.stack(expected))
        valid = torch.tensor([True, False, True])
        torch.testing.assert_close(
            mean_of_valid(masking.patch_losses(predictions, targets), valid), (expected[0] + expected[2]) / 3
        )
        right = F.one_hot(targets, 512).flatten(2).float()
        assert masking.color_accuracy(right, targets).tolist() == [1, 1, 1]
        right[0, 0, :512] = torch.eye(512)[(targets[0, 0, 0] + 1) % 512]
        assert masking.color_accuracy(right, targets).tolist() == pytest.approx([1 - 1 / (8 * T), 1, 1])
    pixels = MaskedPatches(build(masked("pixels")), 0)
    predictions, targets = torch.randn(2, 3, 8, 48, generator=generator)
    expected_pixels = [((p - t) ** 2).mean() for p, t in zip(predictions, targets, strict=True)]
    torch.testing.assert_close(pixels.patch_losses(predictions, targets), torch.stack(expected_pixels))


def test_weights_of_it_are_a_plain_vit(tmp_path: Path) -> None:
    model = MaskedViT(masked("mean_color"), seed=1)
    path = tmp_path / "model.pt"
    models.save(model, path, {"classes": ["a"], "loss": "masked_mean_color", "run": "try"})
    config, _, extra = models.read_weights(path)[:3]
    assert config == configure("ViT-mu/4", 16, 0)
    assert extra == {"run": "try"}
    plain = models.load(path, num_classes=10)
    assert type(plain) is VisionTransformer
    assert plain.config.num_classes == 10
    for name, tensor in model.state_dict().items():
        if name != "mask_token" and not name.startswith("head."):
            assert torch.equal(plain.state_dict()[name], tensor)
    assert load_model(WeightsConfig(weights=str(path))).loss_kind == "softmax"
