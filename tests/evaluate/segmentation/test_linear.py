"""The layer: the tokens that it reads, and the crops that it learns from."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from block_pairs import COLOURS, SIDE, Write, settings
from torch.nn.functional import interpolate

from pipeline import model as models
from pipeline.architecture.pixels import RGB8
from pipeline.base import random_numbers
from pipeline.data.dataset.split import BadBudget
from pipeline.evaluate.loaded_model import load_model
from pipeline.evaluate.segmentation import linear
from pipeline.evaluate.segmentation.pairs import NO_CLASS, open_pairs, scan
from pipeline.settings.run import AugmentConfig

VIEW = AugmentConfig()


@pytest.mark.parametrize(
    "changes",
    [{}, {"pool": "gap"}, {"pool": "gap", "pool_norm": True}, {"registers": 3}, {"pool": "gap", "positions": "rope"}],
)
def test_tokens_are_those_of_the_last_norm(changes: dict[str, object], tmp_path: Path) -> None:
    if changes.get("positions") == "rope":
        changes = {"pool": "gap", "positions": "none", "rope_base": 100.0}
    model = models.create("ViT-mu/4", 2 * SIDE, 5, depth=3, **changes).eval()
    models.save(model, tmp_path / "w.pt")
    loaded = load_model(settings("i", "m", f"weights={tmp_path / 'w.pt'}"))
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8))
    seen: list[torch.Tensor] = []
    model.blocks[-1].register_forward_hook(lambda *call: seen.append(call[2]))
    with torch.no_grad():
        model(pixels.permute(0, 3, 1, 2).float() / 127.5 - 1)
        norm = torch.nn.Identity() if changes.get("pool_norm") else model.norm
        expected = norm(seen[0][:, -16:]).transpose(1, 2).reshape(2, 32, 4, 4)
    torch.testing.assert_close(linear.patch_tokens(loaded, pixels), expected)


@pytest.mark.parametrize("size", [(24, 32), (32, 24)])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_pixels_of_a_crop_have_their_classes(
    size: tuple[int, int], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of colours: where a crop has a pure colour, the class is that of the colour; beyond the image there is
    none.
    """
    rng = np.random.default_rng(0)
    classes = np.kron(rng.integers(0, 3, (size[0] // SIDE, size[1] // SIDE)), np.ones((SIDE, SIDE))).astype(np.int16)
    monkeypatch.setattr(linear, "SCALES", (scale, scale))
    outside, seen, config = np.full(3, 127, np.uint8), set(), settings()
    for number in range(80):
        draw = random_numbers.draws(0, linear._CROP, 0, number)
        pixels, found = linear.random_crop(COLOURS[classes], classes, outside, config, VIEW, 24, draw)
        assert pixels.shape == (24, 24, 3)
        inside = found != NO_CLASS
        assert (pixels[~inside] == 127).all()
        assert inside.all() if scale >= 1 else inside.sum() == 12 * 16
        pure = inside & (pixels == COLOURS[found.clip(0)]).all(-1)
        assert pure.sum() > 0.3 * inside.sum()
        # A pure colour that is not the class of its pixel would be a shift of the mask.
        other = [inside & (found != c) & (pixels == COLOURS[c]).all(-1) for c in range(3)]
        assert not np.any(other)
        seen.add(pixels.tobytes())
    assert len(seen) > 5 if scale >= 1 else len(seen) == 2, "of a small image only the mirrored one differs"


def test_crops_depend_on_the_seed_and_the_step_alone(write_pairs: Write, weights: Path) -> None:
    loaded = load_model(settings("i", "m", f"weights={weights}"))
    train, _ = open_pairs(settings(*write_pairs(7), "val_share=0.2"), RGB8)
    classes = scan(settings(), BadBudget(0.001), train)

    def drawn(*more: str) -> list[tuple[bytes, bytes]]:
        found = linear.batches(train, classes, settings("i", "m", *more), loaded, {})
        return [(images.numpy().tobytes(), of_pixels.numpy().tobytes()) for images, of_pixels in found]

    whole = drawn("steps=6", "threads=3")
    assert len(set(whole)) == 6
    assert drawn("steps=4", "threads=1") == whole[:4]
    assert drawn("steps=1", "seed=1") != whole[:1]


def test_logits_are_interpolated_between_the_centres_of_the_patches() -> None:
    """Where patches tile the image, as torch does; else a ramp over the centres stays a ramp in pixels."""
    logits = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    tiled = models.create("ViT-mu/4", 16, 0).config
    expected = interpolate(logits, size=(16, 16), mode="bilinear", align_corners=False)
    torch.testing.assert_close(linear.enlarged(logits, tiled), expected)
    config = replace(tiled, image_size=(18, 18))
    ramp = torch.arange(4) * 4.0
    found = linear.enlarged(ramp.expand(1, 1, 4, 4), config)[0, 0]
    torch.testing.assert_close(found, (torch.arange(18) - 1.5).clamp(0, 12).expand(18, 18))
    assert linear.between_centres(5, torch.tensor([2.0])).tolist() == [[1.0]] * 5
