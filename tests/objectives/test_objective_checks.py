"""What objectives need of a run's settings and of its model."""

from typing import Any

import pytest

from pipeline import objectives
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.architecture.variants import configure
from pipeline.base.errors import UserError
from pipeline.model import build
from pipeline.objectives.mae import check_encodes_kept
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

GIVEN = ["name=a", "data.path=d", "train.length=1 epochs", "model.name=ViT-B/16", "augment.crop=random_resized"]


FOUR = Pixels(("nir", "red", "green", "blue"), "uint16", (0.0,) * 4, (9e3,) * 4, (0.3,) * 4, (0.2,) * 4)


def check(*overrides: str) -> None:
    objectives.check(schema.load(RunConfig, None, [*GIVEN, *overrides]))


@pytest.mark.parametrize(
    ("loss", "wrong", "message"),
    [
        ("mae", "model.image_size=225", "image_size = 225.*patches of 16"),
        ("mae", "objective.mask_share=0.999", "objective.mask_share = 0.999.* 196 patches"),
        ("dino", "objective.local_size=90", "objective.local_size = 90 .* 16 pixels"),
        ("dino", "augment.crop=resize_crop", "augment.crop = resize_crop"),
        ("sigmoid", "objective.width=3", "unknown setting objective.width"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(loss: str, wrong: str, message: str) -> None:
    check(f"train.loss={loss}")
    with pytest.raises(UserError, match=message):
        check(f"train.loss={loss}", wrong)


def test_a_frozen_backbone_needs_factors_to_become_another() -> None:
    begun = ["model.name=null", "init.weights=x", "train.loss=dino", "train.freeze=backbone"]
    with pytest.raises(UserError, match=r"train\.freeze = backbone.*train\.lora_rank"):
        check(*begun)
    check(*begun, "train.lora_rank=8")
    with pytest.raises(UserError, match=r"optimizer\.ema_decay"):
        check(*begun, "train.lora_rank=8", "optimizer.ema_decay=0.9")
    with pytest.raises(UserError, match=r"train\.heads_first = 3 steps .* train\.length"):
        check(*begun, "train.lora_rank=8", "train.heads_first=3 steps")
    with pytest.raises(UserError, match=r"train\.heads_first = 3% needs init\.weights"):
        check("train.heads_first=3%")


def test_the_first_layer_of_other_channels_learns_with_the_heads() -> None:
    given = ["model.name=null", "init.weights=x", "train.loss=lejepa", "train.heads_first=10%"]
    config = schema.load(RunConfig, None, [*GIVEN, *given])
    for pixels, first in ((RGB8, set()), (FOUR, {"patch_embedding.weight", "patch_embedding.bias"})):
        objective = objectives.create(config, build(configure("ViT-mu/8", 32, 0, pixels=pixels)))
        objective.num_steps = 100
        frozen = objective.frozen_steps()
        assert set(frozen.values()) == {10}
        names = {name for name, _ in objective.backbone.named_parameters()}
        assert {name for name in names if f"backbone.{name}" not in frozen} == first


@pytest.mark.parametrize("field", [{"positions": "relative"}, {"pool": "map"}, {"small_stem": (16,)}])
def test_a_backbone_that_cannot_encode_kept_patches_is_refused_by_the_name_of_the_objective(
    field: dict[str, Any],
) -> None:
    check_encodes_kept(configure("ViT-Ti/4", 32, representation=False), "ijepa")
    with pytest.raises(UserError, match=r"train\.loss = ijepa"):
        check_encodes_kept(configure("ViT-Ti/4", 32, representation=False, **field), "ijepa")
