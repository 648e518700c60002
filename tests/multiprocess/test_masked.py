"""Masked patch prediction and images that are not square, through the whole of `pipeline.train` on real ranks."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forge
from ranks import STEPS, metrics, settings

from pipeline import model as models
from pipeline import schema
from pipeline.config import AugmentConfig, RunConfig
from pipeline.data.loader import Loader, normalise, train_requests, train_view
from pipeline.data.manifest import open_dataset
from pipeline.data.order import SampleOrder
from pipeline.distributed import Ranks
from pipeline.evaluate.masked import score_masked
from pipeline.masking import Masking
from pipeline.model import MaskedViT, VisionTransformer
from pipeline.plan import new_model_config
from pipeline.schedule import learning_rate

CPU = torch.device("cpu")
MASKED = (
    "train.loss=masked_mean_color",
    "model.representation=false",
    "model.name=ViT-Ti/4",
    "schedule.decay=constant",
)


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with Forge(tmp_path_factory.mktemp("forge")) as forge:
        yield forge


@pytest.fixture(scope="module")
def masked(forge: Forge, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, two micro-batches: a whole run, and one that goes on with another stage after half of it."""
    out = tmp_path_factory.mktemp("masked")
    for name, more in (("whole", []), ("cut", ["train.length=3 steps"]), ("cut", [])):
        run = forge.start(2, settings(dataset, out, name, *MASKED, *more))
        assert run.wait() == [0, 0], run.said()
    return out


def test_losses_are_those_of_one_process_and_one_batch(dataset: Path, masked: Path) -> None:
    """In plain PyTorch: the same corruption, loss and evaluation whatever the number of ranks and micro-batches."""
    config = schema.load(RunConfig, None, settings(dataset, masked, "plain", *MASKED))
    data = open_dataset(dataset)
    split = data.split("train")
    model = MaskedViT(new_model_config(config.model, 4, config.train.masked), seed=config.seed)
    masking = Masking(model.config, config.seed)
    decayed = model.weight_decay_mask()
    optimizer = torch.optim.AdamW(
        [{"params": [p for n, p in model.named_parameters() if (n in decayed) is flag], "weight_decay": decay}
         for flag, decay in ((True, config.optimizer.weight_decay), (False, 0.0))],
    )  # fmt: skip
    order = SampleOrder(split.shard_sizes, config.seed, 24, config.data.streams, config.data.window)
    expected = []
    with Loader(split, train_view(config.augment, config.seed), 16, 1, 1, 0.0) as loader:
        for step, batch in enumerate(loader.batches(train_requests(order, 0, STEPS, 24, 0, 1))):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.schedule, config.optimizer.lr, step, STEPS, 2)
            sources, corrupted = masking.inputs(batch, CPU)
            predictions = model(normalise(batch.images, CPU, torch.float32), sources, corrupted)
            loss = masking.batch_loss(predictions, masking.targets(batch.images, corrupted), batch.valid)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
            optimizer.step()
            expected.append(loss.item())
    found = metrics(masked / "whole")
    np.testing.assert_allclose([found[s] for s in sorted(found)], expected, rtol=2e-5)
    assert expected[0] == pytest.approx(np.log(512), abs=1e-5), "a head of zeros knows nothing"
    assert expected[-1] < 0.85 * expected[0], "it learns"

    with torch.no_grad():
        forward = lambda images, *masks: model.eval()(normalise(images, CPU, torch.float32), *masks)  # noqa: E731
        scores = score_masked(forward, masking, data.split("val"), 16, AugmentConfig(), 37, 1, Ranks(0, 0, 1, CPU))
    written = json.loads((masked / "whole" / "scores.json").read_text())
    assert written["loss"] == pytest.approx(scores.loss, rel=1e-4)
    assert written["color_accuracy"] == pytest.approx(scores.color_accuracy, abs=0.01)
    assert metrics(masked / "whole", "val_num_samples")[STEPS] == 37
    assert scores.color_accuracy > 1 / 512


def test_it_resumes_bit_for_bit(masked: Path) -> None:
    assert metrics(masked / "cut") == metrics(masked / "whole")
    assert metrics(masked / "cut", "grad_norm") == metrics(masked / "whole", "grad_norm")


def test_it_is_fine_tuned_from(forge: Forge, dataset: Path, masked: Path) -> None:
    """With classes, at another size: the mask token stays behind, and that is said; with its own loss it is refused."""
    tuned = [
        setting for setting in settings(dataset, masked, "tuned", f"init.weights={masked / 'whole'}", "model.image_size=24")
        if setting.startswith("model.image_size=24") or not setting.startswith("model.")
    ]  # fmt: skip
    run = forge.start(1, [*tuned, "engine.zero_stage=3"])
    assert run.wait() == [0], run.said()
    assert "its mask token and its head are left out" in run.said()
    model = models.load(masked / "tuned")
    assert type(model) is VisionTransformer
    assert (model.config.image_size, model.config.grid, model.config.num_classes) == ((24, 24), (6, 6), 4)
    found = metrics(masked / "tuned")
    assert found[STEPS] < found[1]

    other = forge.start(1, settings(dataset, masked, "whole", *MASKED, "train.loss=masked_pixels"))
    assert other.wait() == [2]
    assert "train.loss was masked_mean_color, is masked_pixels" in other.said()
