"""What objectives need of weights that exist, before torch is imported."""

import pytest

from pipeline.architecture.variants import configure
from pipeline.base.errors import UserError
from pipeline.settings import schema
from pipeline.settings.objective_checks import check_weights
from pipeline.settings.run import RunConfig


def test_a_small_view_of_any_size_is_told_in_one_line() -> None:
    """One above the largest side was a ValueError with a traceback; the objective's class refuses it."""
    given = ["name=a", "data.path=d", "train.length=1 epochs", "init.weights=w", "augment.crop=random_resized"]
    for loss in ("dino", "lejepa"):
        of = [*given, f"train.loss={loss}"]
        for size in ("99999", "1e9", "-3", "x", "[96]"):
            check_weights(schema.load(RunConfig, None, [*of, f"objective.local_size={size}"]), configure("ViT-B/16"))
        with pytest.raises(UserError, match="Use 80 or 96"):
            check_weights(schema.load(RunConfig, None, [*of, "objective.local_size=90"]), configure("ViT-B/16"))
