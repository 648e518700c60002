"""MAE against transformers' ViTMAEForPreTraining, and its masks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from loaded import inputs_of
from model_parts import ALL_PARTS
from torch import Tensor

from pipeline.architecture.config import ViTConfig
from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.data.loading.loader import Batch
from pipeline.model import DecoderFacts, build, configure, read_weights, rope
from pipeline.model.convert.layouts import NAMES, Layout, write_model
from pipeline.model.convert.mae import _NAMES, read_decoder, split
from pipeline.model.position import sincos2d
from pipeline.objectives import mae
from pipeline.objectives.mae import Mae, MaeSettings, as_places

SMALL = MaeSettings(decoder_width=32, decoder_depth=2, decoder_heads=4)


def small(pool: str = "token", size: int = 32, settings: MaeSettings = SMALL, **changes: object) -> Mae:
    torch.manual_seed(0)
    return Mae(build(configure("ViT-mu/8", size, 0, pool=pool, positions="sincos2d_mae", **changes)), settings)


def batch_of(rows: list[int], epoch: int = 0, size: int = 32) -> Batch:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, len(rows), size, size, 3), np.uint8))
    valid = torch.ones(len(rows), dtype=torch.bool)
    labels = torch.zeros(len(rows), 1, dtype=torch.int64)
    return Batch((images,), labels, valid, np.array(rows), np.full(len(rows), epoch))


def given(objective: Mae, batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return inputs_of(objective, batch)


def test_masks_are_drawn_from_seed_epoch_and_sample() -> None:
    objective = small()
    facts = given(objective, batch_of([3, 7, 5]))[1]
    kept, places = facts["kept"], facts["places"]
    assert kept.shape == (3, 4)
    assert ((places < 4).sum(1) == 4).all()
    assert torch.equal(places.gather(1, kept), torch.arange(4).expand(3, -1))
    alone = given(objective, batch_of([7]))[1]
    assert torch.equal(alone["kept"][0], kept[1])
    assert not torch.equal(given(objective, batch_of([3, 7, 5], epoch=1))[1]["kept"], kept)
    assert len({tuple(row.tolist()) for row in kept}) > 1


def test_a_step_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader's threads have drawn the masks."""
    objective, batch = small(), batch_of([3, 7, 5])
    batch.drawn.update(objective.draw(batch, training=True))
    for name in ("bits", "uniform", "draws", "splitmix"):
        monkeypatch.setattr(random_numbers, name, None)
    before = torch.get_rng_state()
    objective.loss(*objective.inputs(batch, torch.device("cpu"), None))[0].backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_an_unreadable_image_contributes_nothing(pool: str) -> None:
    objective = small(pool, registers=2)
    views, facts = given(objective, batch_of([0, 1, 2]))
    valid = facts | {"valid": torch.tensor([True, False, True])}
    expected = objective.measure(views, facts)["loss"]
    found = objective.loss(views, valid)[0]
    torch.testing.assert_close(found, (expected[0] + expected[2]) / 3)
    found.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in objective.parameters())


def test_the_loss_of_a_batch_is_that_of_the_pure_function() -> None:
    objective = small()
    views, facts = given(objective, batch_of([0, 1, 2]))
    predictions = objective.predict(views[0], facts["kept"], facts["places"])
    expected = mae.loss(views[0], predictions, facts["places"] == objective.num_kept, 8, normalise=True)
    torch.testing.assert_close(objective.loss(views, facts)[0], expected)


def test_kept_patches_keep_their_places_with_rope_and_the_decoder_is_the_papers() -> None:
    objective = small(**{name: value for name, value in ALL_PARTS.items() if name not in ("pool", "positions")})
    assert "decoder_blocks.0.attention.out.scale" not in objective.state_dict()
    vit = objective.backbone
    views, facts = given(objective, batch_of([0, 1]))
    everything = torch.arange(objective.num_patches).expand(2, -1)
    objective.num_kept, part = objective.num_patches, objective.num_kept
    torch.testing.assert_close(vit.encode(vit.embed(views[0]), kept=everything), vit.encode(vit.embed(views[0])))
    objective.num_kept, rotation = part, vit.rotation(views[0].device)
    for table, some in zip(rotation, rope.of_patches(rotation, facts["kept"], 3), strict=True):
        assert torch.equal(some[1, 0], torch.cat([table[:3], table[3:][facts["kept"][1]]]))
    objective.loss(views, facts)[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in objective.parameters())


def test_positions_are_those_of_mae() -> None:
    """util/pos_embed.py of facebookresearch/mae: half of the channels for columns, then half for rows."""
    config = configure("ViT-mu/8", (24, 32), 0, positions="sincos2d_mae")
    omega = 1 / 10_000 ** (np.arange(config.width // 4) / (config.width / 4.0))
    grid = np.meshgrid(np.arange(4, dtype=np.float32), np.arange(3, dtype=np.float32))
    halves = [np.concatenate([np.sin(o := np.outer(part.ravel(), omega)), np.cos(o)], axis=1) for part in grid]
    expected = np.concatenate([np.zeros((1, config.width)), np.concatenate(halves, axis=1)])
    np.testing.assert_allclose(sincos2d(config)[0], expected, atol=1e-6)


# -------------------------------------------------------------------- transformers' model
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("official", [True, False])
def test_loss_and_reconstruction_are_those_of_transformers(tmp_path: Path, normalise: bool, official: bool) -> None:
    """The same random weights and mask, read from a Hugging Face folder and from a .pth with the names of
    facebookresearch.
    """
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    decoder = {f"decoder_{name}": size for name, size in (sizes | {"hidden_size": 16}).items()}
    theirs = ViTMAEForPreTraining(
        ViTMAEConfig(**sizes, **decoder, image_size=32, patch_size=8, norm_pix_loss=normalise, layer_norm_eps=1e-6)
    ).eval()
    torch.manual_seed(1)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.2)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    weights = read_weights(tmp_path)
    config, state, additions, facts = weights.config, weights.state, weights.added, weights.decoder
    assert facts == DecoderFacts(4, normalise, (0.5,) * 3, (0.5,) * 3)
    if official:
        assert isinstance(config, ViTConfig)
        file = write_model(state, config, NAMES["timm"]) | Layout(_NAMES["timm"]).write(additions)
        encoder, found = split(file)
        assert "patch_embed.proj.weight" in encoder
        assert not set(encoder) & set(found)
        additions = read_decoder(found, config)
    settings = MaeSettings(decoder_width=16, decoder_depth=2, decoder_heads=4, normalise=normalise)
    backbone = build(config)
    backbone.load_state_dict(state)
    objective = Mae(backbone, settings).eval()
    objective.load_additions(additions, facts)
    images, noise = torch.randn(3, 3, 32, 32), torch.rand(3, 16)
    kept, places = as_places(np.sort(noise.argsort(1)[:, :4].numpy(), axis=1), 16)
    with torch.no_grad():
        expected = theirs(images, noise=noise)
        found = objective.predict(images, kept, places)
    torch.testing.assert_close(found, expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        mae.loss(images, found, expected.mask > 0, 8, normalise), expected.loss, atol=1e-5, rtol=1e-5
    )


def decoder_of(objective: Mae) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in objective.state_dict().items() if not name.startswith("backbone.")}


def test_another_decoder_is_refused_with_all_settings_that_fit() -> None:
    saved = small(settings=MaeSettings(decoder_width=16, decoder_depth=1, decoder_heads=2, normalise=False))
    with pytest.raises(UserError) as refused:
        small().load_additions(decoder_of(saved), saved.facts)
    for setting in ("decoder_width=16", "decoder_depth=1", "decoder_heads=2", "normalise=false"):
        assert f"objective.{setting}" in str(refused.value)


def test_a_decoder_of_plain_pixels_is_folded_to_another_mean_and_deviation() -> None:
    plain = replace(SMALL, normalise=False)
    of_half, of_imagenet = small(settings=plain), small(settings=replace(plain, pixels="imagenet"))
    of_imagenet.load_additions(decoder_of(of_half), of_half.facts)
    (images,), facts = given(of_half, batch_of([0, 1]))
    as_images = of_half.predict(images, facts["kept"], facts["places"]).view(2, 16, 8, 8, 3).permute(0, 4, 1, 2, 3)
    found = of_imagenet.predict(images, facts["kept"], facts["places"]).view(2, 16, 8, 8, 3).permute(0, 4, 1, 2, 3)
    expected = of_imagenet.as_predicted(as_images.flatten(2, 3)).view(found.shape)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    torch.testing.assert_close(of_imagenet.as_predicted(images), ((images + 1) / 2 - mean) / std)
