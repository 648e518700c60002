"""What objectives need of a model, before torch is imported."""

from typing import Any

import pytest

from pipeline import objectives
from pipeline.architecture.variants import configure
from pipeline.base.errors import UserError
from pipeline.settings import schema
from pipeline.settings.objective_checks import check_encodes_kept
from pipeline.settings.run import RunConfig


def test_a_small_view_of_any_size_is_told_in_one_line() -> None:
    """One above the largest side was a ValueError with a traceback; the objective's class refuses it."""
    given = ["name=a", "data.path=d", "train.length=1 epochs", "model.name=ViT-B/16", "augment.crop=random_resized"]
    for loss in ("dino", "lejepa"):
        for size in ("99999", "1e9", "-3", "x", "[96]"):
            schema.load(RunConfig, None, [*given, f"train.loss={loss}", f"objective.local_size={size}"])


@pytest.mark.parametrize(
    ("loss", "wrong", "message"),
    [
        ("mae", "model.image_size=225", "image_size = 225 is not divisible by patch_size = 16"),
        ("mae", "objective.mask_share=0.999", "objective.mask_share = 0.999 keeps none of 196 patches"),
        ("dino", "objective.local_size=90", "objective.local_size = 90: .* Use 80 or 96"),
        ("lejepa", "model.image_size=100", "image_size = 100 is not divisible by patch_size = 16"),
    ],
)
def test_a_new_model_that_does_not_fit_is_refused_with_the_settings(loss: str, wrong: str, message: str) -> None:
    given = ["name=a", "data.path=d", "train.length=1 epochs", "model.name=ViT-B/16", "augment.crop=random_resized"]
    with pytest.raises(UserError, match=message):
        schema.load(RunConfig, None, [*given, f"train.loss={loss}", wrong])


def test_a_step_of_one_image_is_refused_where_its_samples_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [
        "name=a",
        "data.path=d",
        "train.length=1 epochs",
        "model.name=ViT-B/16",
        "train.loss=masked_pixels",
        "data.streams=1",
    ]
    alone = ["train.global_batch=1", "train.micro_batch=1"]
    schema.load(RunConfig, None, [*given, *alone])
    monkeypatch.setattr("pipeline.settings.objective_checks.OF_WHOLE_BATCH", {"masked_pixels"})
    with pytest.raises(
        UserError,
        match=r"train\.loss = masked_pixels compares all samples of a step: train\.global_batch = 1 must be 2",
    ):
        schema.load(RunConfig, None, [*given, *alone])


def test_a_setting_of_an_objective_without_any_is_refused_with_the_way_out() -> None:
    """It said: Known here: ."""
    given = ["name=a", "data.path=d", "train.length=1 epochs", "model.name=ViT-B/16", "objective.width=3"]
    message = r"train\.loss = sigmoid: unknown setting objective\.width\. There are none here: leave it out\.$"
    with pytest.raises(UserError, match=message):
        objectives.check(schema.load(RunConfig, None, given))


@pytest.mark.parametrize("field", [{"positions": "relative"}, {"pool": "map"}, {"small_stem": (16,)}])
def test_a_backbone_that_cannot_encode_kept_patches_is_refused_by_the_name_of_the_objective(
    field: dict[str, Any],
) -> None:
    check_encodes_kept(configure("ViT-Ti/4", 32, representation=False), "ijepa")
    with pytest.raises(UserError, match=r"train\.loss = ijepa trains a plain ViT"):
        check_encodes_kept(configure("ViT-Ti/4", 32, representation=False, **field), "ijepa")
