"""MAE's sheet, from weights and from a run's folder."""

from pathlib import Path

import numpy as np
import pytest
import torch
from given_images import images as images_given
from PIL import Image

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.explain import explain
from pipeline.explain.reconstruction import reconstruct
from pipeline.model import read_weights
from pipeline.model.files import write_safetensors
from pipeline.model.layers import patches_of
from pipeline.objectives.mae import Mae, MaeSettings
from pipeline.objectives.objective import stored_name
from pipeline.settings import schema
from pipeline.settings.commands.weights import ExplainConfig

SETTINGS = {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}


def small(**settings: object) -> Mae:
    torch.manual_seed(0)
    return Mae(models.create("ViT-mu/8", 32, 0, positions="sincos2d_mae"), MaeSettings(**SETTINGS | settings)).eval()


def save(model: Mae, path: Path, extra: dict) -> None:
    tensors = {stored_name(name): tensor for name, tensor in model.state_dict().items()}
    write_safetensors(tensors, path, models.safetensors_metadata(model.backbone.config, extra))


def draw(weights: Path, images: Path, out: Path, *more: str) -> dict:
    settings = [
        f"weights={weights}",
        images_given(images),
        f"out={out}",
        "device=cpu",
        "draw=[reconstruction]",
        "num_drawn=2",
    ]
    return explain.run(schema.load(ExplainConfig, None, [*settings, *more]))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize("pixels", ["half", "imagenet"])
@pytest.mark.parametrize("normalise", [True, False])
def test_a_decoder_that_is_right_paints_the_image(
    normalise: bool, pixels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(normalise=normalise, pixels=pixels)

    def right(images: torch.Tensor, kept: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        patches = patches_of(model.as_predicted(images), 8)
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
        return (patches - mean) / (variance + 1e-6).sqrt() if normalise else patches

    monkeypatch.setattr(model, "predict", right)
    bytes_ = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    images = torch.from_numpy(bytes_).permute(0, 3, 1, 2) / 127.5 - 1
    masked, painted, losses = reconstruct(model, images, np.array([4, 0, 9]), seed=1, batch=2)
    assert np.abs(painted.astype(int) - bytes_).max() <= 1
    assert float(losses.max()) < 1e-8
    grey = (masked == 128).all(3).reshape(3, 4, 8, 4, 8).all((2, 4))
    assert (grey.sum((1, 2)) == 12).all()
    assert (np.where(grey.repeat(8, 1).repeat(8, 2)[..., None], bytes_, masked) == bytes_).all()
    alone, *_ = reconstruct(model, images[2:], np.array([9]), seed=1, batch=2)
    assert np.array_equal(alone[0], masked[2])


def test_the_sheet_is_drawn_from_weights_and_runs(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file says what its decoder is, unless it comes from elsewhere."""
    model = small(normalise=False)
    save(model, tmp_path / "mae.safetensors", model.extra() | {"classes": ["of", "the data set"]})
    draw(tmp_path / "mae.safetensors", photos, tmp_path / "out")
    assert "taken as" not in capsys.readouterr().out
    assert np.asarray(Image.open(tmp_path / "out" / "reconstruction.png").convert("RGB")).std() > 5
    models.save(model.backbone, tmp_path / "lejepa.safetensors")
    assert Mae.from_weights(read_weights(tmp_path / "lejepa.safetensors"), print) is None
    save(model, tmp_path / "elsewhere.safetensors", {})
    draw(tmp_path / "elsewhere.safetensors", photos, tmp_path / "assumed")
    assert "a decoder of 16 heads, which predicts normalised pixels" in capsys.readouterr().out


def test_other_weights_have_none(photos: Path, tmp_path: Path) -> None:
    models.save(small().backbone, tmp_path / "plain.pt")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="these weights hold no decoder of MAE"):
        draw(tmp_path / "plain.pt", photos, tmp_path / "out")
    model = small()
    save(model, tmp_path / "mae.safetensors", model.extra())
    with pytest.raises(UserError, match="its decoder paints images of 32 px"):
        draw(tmp_path / "mae.safetensors", photos, tmp_path / "out", "image_size=64")
