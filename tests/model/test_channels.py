"""Models of any channels: what their configuration saves, their arithmetic, and how weights of 8-bit RGB begin on other
images.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.architecture.variants import config_from_dict, configure
from pipeline.base.errors import UserError
from pipeline.model import (
    build,
    create,
    load,
    num_parameters,
    save,
    to_timm,
)
from pipeline.model.convert.layouts import NAMES, write_model
from pipeline.model.files import write_folder
from pipeline.model.weights import with_channels

BANDS = Pixels.full_range(("nir", "red", "green", "blue", "height"), "uint16")
CT = replace(Pixels.full_range(("ct",), "int16"), mean=(0.4,), std=(0.3,), nodata=-2000.0)
MODELS = ("ViT-mu/4", "R+Ti/16", "ViT-mu/1", "BiT-R50x1")


def config_of(name: str, pixels: Pixels):  # type: ignore[no-untyped-def]
    size = 64 if name in ("R+Ti/16", "BiT-R50x1") else 16
    return configure(name, size, 5, pixels=pixels, small_stem=[32, 64] if name == "ViT-mu/1" else None)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pixels", [CT, BANDS], ids=["ct", "bands"])
def test_a_model_of_any_channels_is_built_counted_saved_and_read(name: str, pixels: Pixels, tmp_path: Path) -> None:
    config = config_of(name, pixels)
    assert config_from_dict(config.to_dict()) == config
    model = build(config).eval()
    images = torch.randn(2, pixels.num_channels, *config.image_size)
    with torch.no_grad():
        features = model.features(images)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())
    save(model, tmp_path / "a.safetensors")
    again = load(tmp_path / "a.safetensors").eval()
    assert again.config == config
    assert torch.equal(again.features(images), features)
    with pytest.raises(ValueError, match=str(pixels.num_channels)):
        model(torch.randn(2, 3, *config.image_size))


def test_weights_of_rgb_see_the_same_picture_in_the_same_channels() -> None:
    """With another mean and deviation, which the bias takes up; and a grey image in one channel as in three."""
    model = create("ViT-mu/4", 16, 0, seed=1).eval()
    share = torch.rand(4, 3, 16, 16)
    deeper = replace(Pixels.full_range(RGB8.channels, "uint16"), mean=(0.3, 0.4, 0.5), std=(0.1, 0.2, 0.3))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (deeper.mean, deeper.std))
    new = replace(model.config, pixels=deeper)
    found = build(new).eval()
    found.load_state_dict(with_channels(model.state_dict(), model.config, new)[0])
    assert torch.allclose(found((share - mean) / std), model(2 * share - 1), atol=1e-5)

    grey = replace(model.config, pixels=CT)
    found = build(grey).eval()
    found.load_state_dict(with_channels(model.state_dict(), model.config, grey)[0])
    one = share[:, :1]
    assert torch.allclose(found((one - CT.mean[0]) / CT.std[0]), model(2 * one.expand(-1, 3, -1, -1) - 1), atol=1e-5)


def test_kernels_of_named_channels_are_kept(tmp_path: Path) -> None:
    model = create("ViT-mu/4", 16, 5)
    save(model, tmp_path / "rgb.pt")
    rgb = model.patch_embedding.weight.detach()
    found = load(tmp_path / "rgb.pt", pixels=BANDS).patch_embedding.weight.detach()
    named = {1: rgb[:, 0], 2: rgb[:, 1], 3: rgb[:, 2]}
    for place in range(5):
        assert torch.allclose(found[:, place], named.get(place, rgb.mean(1)) * 3 / 5, atol=1e-7)
    one = load(tmp_path / "rgb.pt", pixels=Pixels.full_range(("red",), "uint16")).patch_embedding.weight.detach()
    assert torch.allclose(rgb.sum(1, keepdim=True), one, atol=1e-6)


@pytest.mark.parametrize("name", MODELS[1:])
def test_stems_read_other_channels_from_weights_of_rgb(name: str, tmp_path: Path) -> None:
    old = build(config_of(name, RGB8))
    save(old, tmp_path / "rgb.pt")
    found = load(tmp_path / "rgb.pt", pixels=BANDS)
    root, rgb = (model.root if name.startswith("BiT") else model.stem.root for model in (found, old))
    assert torch.allclose(root.weight[:, 1:4], rgb.weight * 3 / 5)


def test_weights_of_other_channels_read_their_own_range_and_no_other_channels(tmp_path: Path) -> None:
    save(build(config_of("ViT-mu/4", BANDS)), tmp_path / "bands.pt")
    data = replace(BANDS, high=(1000.0,) * 5, nodata=0.0)
    assert load(tmp_path / "bands.pt", pixels=data).config.pixels == replace(BANDS, nodata=0.0)
    for other in (RGB8, CT, replace(BANDS, type="int16")):
        with pytest.raises(UserError, match=r"nir.*(red, green, blue\)|\(ct\)|int16)"):
            load(tmp_path / "bands.pt", pixels=other)


def test_weights_of_other_projects_take_the_channels_of_a_data_set_with_their_mean(tmp_path: Path) -> None:
    model = build(config_of("ViT-mu/4", BANDS), seed=1)
    with pytest.raises(UserError, match="cannot hold pixels = 5 channels"):
        to_timm(model, None, {})
    mean, std = (0.1, 0.2, 0.3, 0.4, 0.5), (0.2,) * 5
    config = {"pretrained_cfg": {"mean": mean, "std": std}}
    write_folder(tmp_path / "a", write_model(model.state_dict(), model.config, NAMES["timm"]), {"config.json": config})
    with pytest.raises(UserError, match=r"5 channels.*init\.weights"):
        load(tmp_path / "a")
    with pytest.raises(UserError, match="5 channels"):
        load(tmp_path / "a", pixels=CT)
    data = Pixels.full_range(("a", "b", "c", "d", "e"), "int16", nodata=-1)
    said: list[str] = []
    again = load(tmp_path / "a", pixels=data, say=said.append)
    assert again.config.pixels == replace(data, mean=mean, std=std)
    assert torch.equal(next(again.parameters()), next(model.parameters()))
    assert any("a, b, c, d, e" in line for line in said)
