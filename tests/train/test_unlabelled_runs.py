"""Runs on a data set without labels or without a held-out split: what they measure, what they refuse, exact resume."""

import dataclasses
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import Forge
from ranks import metrics, settings
from safetensors.numpy import load_file
from tiny import make_dataset

from pipeline import model as models
from pipeline import objectives
from pipeline.architecture.objectives import OBJECTIVES
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import ROWS, SAMPLES_FILE, SHARDS_FILE, Shard, open_dataset, write_dataset
from pipeline.data.mixture.run_data import held_out_split, run_splits
from pipeline.estimate.forecast import make_forecast
from pipeline.estimate.plan import make_plan
from pipeline.evaluate.score_report import run as evaluate
from pipeline.experiment.vtab import _check_dataset as check_of_task
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.settings import schema
from pipeline.settings.commands.operate import PlanConfig
from pipeline.settings.commands.weights import ScoreConfig
from pipeline.settings.run import DataConfig, RunConfig
from pipeline.train.shown_facts import run_facts
from pipeline.train.start import prepare

MASKED = ("train.loss=masked_mean_color", "model.representation=false", "model.name=ViT-Ti/4")
FOUR_STEPS = ("train.length=4 steps", "checkpoint.every=2 steps", "schedule.warmup=1 steps")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 training images without labels, and no other split."""
    return make_dataset(tmp_path_factory.mktemp("photos") / "photos", {"train": 150}, labelled=False)


def load(photos: Path, *more: str) -> RunConfig:
    return schema.load(RunConfig, None, settings(photos, photos.parent / "runs", "x", *more))


def test_the_held_out_split_is_optional_without_labels_or_when_it_is_said(photos: Path, dataset: Path) -> None:
    bare, labelled = open_dataset(photos), open_dataset(dataset)
    usual = DataConfig(path="x")
    assert held_out_split(bare, usual) == ""
    assert run_splits(bare, usual, 0)[1] is None
    assert held_out_split(labelled, usual) == "val"
    assert run_splits(labelled, dataclasses.replace(usual, eval_split=""), 0)[1] is None
    dev = run_splits(bare, dataclasses.replace(usual, dev_share=0.1), 0)[1]
    assert (dev.name, len(dev)) == ("dev", 15)
    with pytest.raises(UserError, match=r"has no split 'vla'. It has: train"):
        run_splits(bare, dataclasses.replace(usual, eval_split="vla"), 0)
    with pytest.raises(UserError, match=r"has no split 'val'. It has: train"):
        run_splits(open_dataset(make_dataset(photos.parent / "labelled", {"train": 9})), usual, 0)


def test_labels_are_wanted_where_there_are_none(photos: Path, dataset: Path) -> None:
    said = "needs labels, and this data set has none"
    with pytest.raises(UserError, match=f"train.loss = softmax {said}") as error:
        prepare(load(photos))
    for loss, facts in OBJECTIVES.items():
        assert (loss in str(error.value).partition("train.loss=")[2]) == (facts.labels == "unread")
    with pytest.raises(UserError, match=said):  # Not that nothing is measured.
        prepare(load(photos, "checkpoint.best=val_top1"))
    with pytest.raises(UserError, match=r"probe.data = .*photos: the images of this data set have no labels"):
        prepare(load(photos, *MASKED, "probe.every=2 steps", f"probe.data={photos}"))
    with pytest.raises(UserError, match=r"probe\.split = test: .* has no split 'test'. It has: train, val"):
        prepare(load(photos, *MASKED, "probe.every=2 steps", f"probe.data={dataset}", "probe.split=test"))
    sweep = SimpleNamespace(datasets={"dtd": open_dataset(photos)}, config=SimpleNamespace(protocol=None))
    with pytest.raises(UserError, match=r"have no labels\. Make it with launch/vtab_prepare\.py"):
        check_of_task(sweep, next(task for task in TASKS if task.name == "dtd"))  # type: ignore[arg-type]
    weights = photos.parent / "weights.safetensors"  # Read first: weights that predict numbers need no labels.
    models.save(models.build(models.configure("ViT-Ti/4", 16, num_classes=4)), weights)
    with pytest.raises(UserError, match=r"have no labels. Scores need some"):
        evaluate(ScoreConfig(weights=str(weights), data=str(photos)))
    line = "must be empty: nothing is measured"
    with pytest.raises(UserError, match=line):
        prepare(load(photos, *MASKED, "checkpoint.best=val_loss"))


def test_a_run_without_a_held_out_split_measures_what_it_can(photos: Path) -> None:
    alone = prepare(load(photos, *MASKED))
    assert objectives.metrics(alone.config) == {"scores": {}, "probe": {}}
    assert alone.plan.evaluate_every == {}
    assert not any(alone.plan.due(step).evaluations for step in range(1, alone.plan.steps + 1))
    held_out = prepare(load(photos, *MASKED, "data.dev_share=0.1", "checkpoint.best=dev_loss"))
    assert "dev_loss" in objectives.metrics(held_out.config)["scores"]
    assert make_plan(load(photos, *MASKED), 150, 1).evaluate_every == {"scores": 3}


@pytest.mark.parametrize("split", [(), ("data.dev_share=0.1",)])
def test_the_score_of_a_run_without_labels_is_that_of_its_neighbours(
    photos: Path, dataset: Path, split: tuple[str, ...]
) -> None:
    """As launch/compare.py ranks it. In MLflow it was the loss, or the few-shot accuracy."""
    pixels = [setting.replace("mean_color", "pixels") for setting in MASKED]
    probe = ("probe.every=2 steps", f"probe.data={dataset}", "probe.shots=[1,5]", "probe.neighbours=5")
    run = prepare(load(photos, *pixels, *probe, *split))
    model = models.build(objectives.new_backbone(run.config, 0))
    of_ranks = {"ranks": SimpleNamespace(device="cpu"), "model": model, "trained_on": ()}
    facts = run_facts(SimpleNamespace(**vars(run), **of_ranks), None)
    assert facts.score == "tiny_5nn"


def test_one_class_is_too_few_to_learn_from(photos: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(photos, tmp_path / "one")
    rows = pq.read_table(photos / SAMPLES_FILE).select(ROWS.names)
    labels = pa.array([[0] if number % 2 else [] for number in range(150)], ROWS.field("labels").type)
    rows = rows.set_column(rows.schema.get_field_index("labels"), ROWS.field("labels"), labels)
    shards = [Shard(**shard) for shard in pq.read_table(photos / SHARDS_FILE).to_pylist()]
    write_dataset(folder, shards, [rows.slice(start, 40) for start in range(0, 150, 40)], ["thing"], {}, {})
    with pytest.raises(UserError, match="softmax needs at least two classes, and this data set has one"):
        prepare(load(folder, "data.eval_split="))
    with pytest.raises(UserError, match="softmax needs at least two classes"):
        make_forecast(schema.load(PlanConfig, None, settings(folder, tmp_path, "x", "data.eval_split=")))
    # Images without the label are of another kind.
    assert prepare(load(folder, "train.loss=sigmoid", "data.eval_split=")).data.dataset.num_classes == 1


@pytest.mark.ranks
def test_a_run_on_images_alone_is_probed_and_resumes_exactly(
    forge: Forge, photos: Path, dataset: Path, tmp_path: Path
) -> None:
    probe = ("probe.every=2 steps", f"probe.data={dataset}", "probe.neighbours=5", "checkpoint.best=tiny_5nn")
    overrides = settings(photos, tmp_path, "whole", *MASKED, *FOUR_STEPS, *probe)
    forge.start(1, overrides).finish()
    whole = tmp_path / "whole"
    assert set(metrics(whole, "tiny_5nn")) == {0, 2, 4}, "also before the first step"
    assert not (whole / "scores.json").exists()
    assert schema.load(RunConfig, str(whole / "config.yaml"), []).data.eval_split == ""
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    shutil.rmtree(cut / "checkpoints/step-00000004")
    said = forge.start(1, [*overrides, "name=cut"]).finish()
    assert "step-00000002 at step 2 of 4" in said
    assert "step 0:" not in said
    by_time = ("train.log_every=900 s",)
    forge.start(1, settings(photos, tmp_path, "unprobed", *MASKED, *FOUR_STEPS, *by_time)).finish()
    lines = re.findall(r" step (\d)/4 ", (tmp_path / "unprobed" / "log.txt").read_text())
    assert lines == ["1", "4"], "after the first step, by the clock, and after the last; every step is recorded"
    assert metrics(whole, "loss") == metrics(tmp_path / "unprobed", "loss"), "a probe changes no bit of the training"
    name = "checkpoints/step-00000004/model.safetensors"
    assert load_file(whole / name).keys() == load_file(cut / name).keys()
    for tensor, value in load_file(whole / name).items():
        assert np.array_equal(value, load_file(cut / name)[tensor]), tensor
    assert metrics(whole, "loss") == metrics(cut, "loss")
