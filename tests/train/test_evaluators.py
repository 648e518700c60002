"""Which evaluators a run has, and which of their metrics can choose its best checkpoint."""

import contextlib
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import objectives
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.metric import score_of
from pipeline.checkpoint.store import Checkpoints, Kept, step_name
from pipeline.estimate.plan import make_plan
from pipeline.evaluate.classify import ClassificationScores
from pipeline.experiment.spec import ScoresFile
from pipeline.monitor.health import Reports
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker
from pipeline.settings import schema
from pipeline.settings.run import RunConfig, TrackConfig
from pipeline.train.evaluators import Evaluation, SplitEvaluator, evaluators_of, worse_than_first

RUN = ["name=x", "data.path=d", "model.name=ViT-Ti/16", "train.length=100 steps", "evaluate.every=50 steps"]
PROBE = ["probe.every=20 steps", "probe.neighbours=10", "probe.data=s3://bucket/pets/"]


def load(*settings: str) -> RunConfig:
    return schema.load(RunConfig, None, [*RUN, *settings])


def names(config: RunConfig) -> list[str]:
    run: Any = SimpleNamespace(config=config)
    return [evaluator.name for evaluator in evaluators_of(run)]


@pytest.mark.parametrize(
    ("settings", "evaluator"),
    [
        ([], ""),
        (["checkpoint.best=val_top5"], "scores"),
        (["checkpoint.best=pets_10nn", *PROBE], "probe"),
        (["checkpoint.best=pets_5shot", "train.loss=masked_pixels", *PROBE], "probe"),
        (["checkpoint.best=val_color_accuracy", "train.loss=masked_mean_color"], "scores"),
    ],
)
def test_any_metric_of_any_evaluator_chooses_the_best_checkpoint(settings: list[str], evaluator: str) -> None:
    assert objectives.best_from(load(*settings)) == evaluator


def test_five_classes_have_no_top5() -> None:
    best = load("checkpoint.best=val_top5")
    assert objectives.best_from(best, num_classes=6) == "scores"
    with pytest.raises(UserError, match=r"must be one of val_top1, val_loss\.$"):
        objectives.check(best, num_classes=5)
    assert "val_top5" not in objectives.metrics(load(), num_classes=5)["scores"]


def test_checkpoints_are_saved_where_the_chosen_evaluator_is_due() -> None:
    plan = make_plan(load("checkpoint.every=100%", "schedule.warmup=5%", *PROBE), 10_000, 1)
    for best_from, steps in (("", [100]), ("scores", [50, 100]), ("probe", [20, 40, 60, 80, 100])):
        chosen = dataclasses.replace(plan, best_from=best_from)
        assert [step for step in range(1, 101) if chosen.due(step).save] == steps


@pytest.mark.parametrize("done", [True, False])
def test_an_evaluation_after_a_rollback_is_made_up_after_a_kill(tmp_path: Path, done: bool) -> None:
    """scores.json may be of a later step, whose records were removed when the run went back: it was taken for the one
    that is due.
    """
    folder = tmp_path / "x"
    facts = RunFacts("x", "pretrain")
    tracker = Tracker(TrackConfig(enabled=False), tmp_path, folder, facts, start=0)
    tracker.log(90, {"val_top1": 0.5})
    (folder / "scores.json").write_text('{"step": 90}')
    tracker.go_back(20)
    tracker.log(50, {"loss": 1.0})
    if done:
        tracker.log(50, {"val_top1": 0.4})
    tracker.finish("KILLED")
    again = Tracker(TrackConfig(enabled=False), tmp_path, folder, facts, start=50)
    plan = SimpleNamespace(due=lambda step: SimpleNamespace(evaluations=("scores",)))
    run: Any = SimpleNamespace(folder=folder, config=load(), plan=plan, tracker=again)
    assert SplitEvaluator(run).is_missing(50) == (not done)
    again.finish("FINISHED")


def test_a_kill_between_a_record_and_kept_json_does_not_lose_the_best(tmp_path: Path) -> None:
    """The writer process keeps the best one after a save in flight, when the run may have written scores.json
    already.
    """
    folder, facts = tmp_path / "x", RunFacts("x", "pretrain")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.folder.mkdir()
    checkpoints.keep_if_best("step-00000020", "val_top1", 0.3)
    tracker = Tracker(TrackConfig(enabled=False), tmp_path, folder, facts, start=0)
    tracker.log(50, {"val_top1": 0.4})
    (folder / "scores.json").write_text('{"step": 50}')
    tracker.finish("KILLED")

    def mark_best(step: int, *found: Any) -> None:
        checkpoints.keep_if_best(step_name(step), *found)

    for _ in range(2):  # Also where nothing was lost.
        again = Tracker(TrackConfig(enabled=False), tmp_path, folder, facts, start=50)
        plan = SimpleNamespace(due=lambda step: SimpleNamespace(evaluations=("scores",)), best_from="scores")
        run: Any = SimpleNamespace(
            folder=folder,
            config=load("checkpoint.best=val_top1"),
            plan=plan,
            tracker=again,
            saver=SimpleNamespace(mark_best=mark_best),
        )
        evaluator = SplitEvaluator(run)
        assert not evaluator.is_missing(50)
        evaluator.mark_best_again(50)
        again.finish("FINISHED")
        assert checkpoints.kept() == Kept([], "step-00000050", "val_top1", 0.4)


def test_a_result_that_is_no_number_is_no_missing_result(tmp_path: Path) -> None:
    """As of a split of which no image can be read."""
    run: Any = SimpleNamespace(
        folder=tmp_path,
        config=load(),
        plan=SimpleNamespace(due=lambda step: SimpleNamespace(evaluations=("scores",)), best_from=""),
        console=SimpleNamespace(say=lambda *lines: None),
        collapses=Reports("collapse"),
        worse=Reports("loss of features"),
        tracker=SimpleNamespace(log=lambda step, metrics: None),
        drawing=None,
        engine=SimpleNamespace(averaged=contextlib.nullcontext),
    )
    evaluator = SplitEvaluator(run)
    scores = ClassificationScores(0.0, 0.0, math.nan, 37, 37)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitEvaluator, "measure_on_all_ranks", lambda self, step: Evaluation({}, scores.to_dict(), ""))
        assert evaluator.is_missing(50)
        evaluator.evaluate_on_all_ranks(50)
    assert not evaluator.is_missing(50)
    assert json_record.read(tmp_path / "scores.json", ScoresFile) == ScoresFile(None, 37, 0.0, 0.0)


def test_a_probe_below_that_of_the_start_is_named_with_what_to_change() -> None:
    """Beyond the noise of its test images, of which those in groups count less."""
    thousand, fifty = {"val": 1000}, {"val": 50}
    first = {"val_20nn": 0.80, "val_5shot": 0.60, "val_5shot_std": 0.01}
    now = {"val_20nn": 0.70, "val_5shot": 0.59, "val_5shot_std": 0.0}
    told = worse_than_first(now, first, thousand)
    assert "val_20nn" in told
    assert "5shot" not in told
    assert "optimizer.lr" in told
    assert not worse_than_first(now, first, fifty)
    assert not worse_than_first(now | {"val_20nn_effective_images": 50.0}, first, thousand)
    assert not worse_than_first(first, first, thousand)
    assert not worse_than_first(now, {}, thousand), "without a probe before the first step"


def test_the_score_is_that_of_labels_if_asked() -> None:
    config = load("evaluate.mean_ap=true", "checkpoint.best=val_map")
    assert score_of(objectives.metrics(config)["scores"]) == "val_map"
    assert objectives.best_from(config) == "scores"
    assert "val_map" not in objectives.metrics(load())["scores"]
