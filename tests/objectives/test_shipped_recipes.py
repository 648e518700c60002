"""Each shipped recipe computes its loss and gradients with parameters as the engine has them: of its own precision,
beside buffers in fp32.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from teacher_weights import teacher_for

from data_tools.bench.noise import noise_views
from pipeline import objectives
from pipeline.architecture.config import ViTConfig
from pipeline.base import random_numbers
from pipeline.model import build
from pipeline.objectives import on_meta
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig

# Without those of BiT: a ResNet has no buffers, and no parts of a ViT.
RECIPES = sorted((Path(__file__).parents[2] / "configs/pretrain").glob("[!b]*.yaml"))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_computes_gradients_in_its_precision(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward pass draws no masks: the loader's threads have drawn them."""
    config = schema.load(RunConfig, recipe, teacher_for(recipe, tmp_path, num_classes=5))
    small = {"dino": {"prototypes": 64}, "mae": {"decoder_width": 64, "decoder_depth": 1}}
    config.objective.update(small.get(config.train.loss, {}))
    model = objectives.new_backbone(config, num_classes=5)
    assert isinstance(model, ViTConfig)
    model = replace(model, width=96, depth=2, mlp_width=64, num_heads=3)
    dtype = DTYPES[config.engine.precision]
    objective = on_meta.cast(objectives.create(config, build(model)), dtype)
    shapes = [(group.count, *ImageSize.parse(group.size)) for group in objective.views(config)]
    batch = noise_views(shapes, 2, num_classes=5)
    batch.drawn.update(objective.draw(batch, training=True))
    objective.num_steps = 1
    objective.before_step(0)
    for name in ("bits", "uniform", "draws", "splitmix"):
        monkeypatch.setattr(random_numbers, name, None)
    views, facts = objective.inputs(batch, torch.device("cpu"), None)
    loss, _ = objective(tuple(view.to(dtype) for view in views), facts)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in objective.parameters() if p.grad is not None)
