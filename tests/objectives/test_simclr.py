"""SimCLR against a plain loop over pairs of views: the loss, and what it compares."""

import math

import pytest
import torch
from crops_step import step_of_tiny_simclr
from torch import Tensor

from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.objectives.simclr import nt_xent
from pipeline.settings import schema
from pipeline.settings.run import RunConfig


def pair_losses(projections: Tensor, temperature: float, images: list[int]) -> list[float]:
    """Equation 1 of the paper for each view. images: the image of each row."""
    rows = projections.double().tolist()

    def similarity(i: int, j: int) -> float:
        product = sum(a * b for a, b in zip(rows[i], rows[j], strict=True))
        return product / math.hypot(*rows[i]) / math.hypot(*rows[j])

    losses = []
    for i, image in enumerate(images):
        others = {j: math.exp(similarity(i, j) / temperature) for j in range(len(rows)) if j != i}
        (other,) = (j for j in others if images[j] == image)
        losses.append(-math.log(others[other] / sum(others.values())))
    return losses


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_each_view_must_find_the_other_one_of_its_image(temperature: float) -> None:
    torch.manual_seed(0)
    first = torch.randn(5, 7)
    projections = torch.cat([first, first + torch.randn(5, 7)])
    losses, is_found = nt_xent(projections, temperature, torch.ones(10, dtype=torch.bool))
    expected = torch.tensor(pair_losses(projections, temperature, [0, 1, 2, 3, 4] * 2))
    torch.testing.assert_close(losses, expected)
    units = torch.nn.functional.normalize(projections, dim=1)
    nearest = (units @ units.T).fill_diagonal_(-2).argmax(1)
    assert torch.equal(is_found, nearest == torch.arange(10).roll(5))
    assert 0 < is_found.sum() < 10


@pytest.mark.parametrize("unreadable", [(), (2,), (0, 5)])
def test_the_loss_is_of_readable_images(unreadable: tuple[int, ...]) -> None:
    found = step_of_tiny_simclr(0, 1, unreadable)
    objective, valid = found["objective"], found["facts"]["valid"]
    counted = valid.repeat(2)
    with torch.no_grad():
        features = objective.backbone(found["views"][0])[counted]
        of_all = torch.ones(len(features), dtype=torch.bool)
        projections = objective.norm(objective.projector(features, of_all), of_all)
    losses = pair_losses(projections, 0.3, torch.arange(8)[valid].tolist() * 2)
    assert float(found["loss"]) == pytest.approx(sum(losses) / 16, rel=1e-4)
    assert 0 <= float(found["values"]["pair_accuracy"]) <= 1


def test_crops_are_needed() -> None:
    """Without them both views of an image would be the same."""
    needed = ["name=try", "data.path=here", "train.length=10 epochs", "train.loss=simclr", "model.name=ViT-Ti/16"]
    objectives.check(schema.load(RunConfig, None, needed))
    with pytest.raises(UserError, match="needs random crops"):
        objectives.check(schema.load(RunConfig, None, [*needed, "augment.crop=none"]))
