"""Evaluators that run during training: scores on the held-out split, and probes of the features.

What each measures is declared in `objectives.metrics`, so checkpoint.best can be checked before a run starts. Each
writes its last result to a file of the run folder. A restarted run compares it, and its records, with its checkpoint,
to make up an evaluation that was due but did not finish.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from pipeline import objectives
from pipeline.base import json_record
from pipeline.base.files import write_text
from pipeline.base.metric import probed_data
from pipeline.base.trained_on import TRAINED_BY
from pipeline.data.dataset.split import Split
from pipeline.evaluate.classify import ClassificationScores, Means, Predictions, means, predict, score
from pipeline.evaluate.intervals import of_samples
from pipeline.evaluate.multilabel import mean_average_precision
from pipeline.evaluate.probes.probe import metrics_in_words, probe_metrics
from pipeline.evaluate.probes.rankme import collapse
from pipeline.evaluate.regression import RegressionScores, TargetPredictions, predict_targets, score_targets
from pipeline.evaluate.split_reader import SplitReader
from pipeline.objectives.regression import Regression
from pipeline.train.bookkeeping import TrainingRun


@dataclass(frozen=True)
class Evaluation:
    """A result. metrics: for metrics.jsonl. content: of the evaluator's file. line: for the log. predictions: of
    classes or numbers.

    collapse: what it shows to have collapsed, "" for nothing. worse: what is worse than in the weights that the run
    began with.
    """

    metrics: dict[str, float]
    content: dict[str, Any]
    line: str
    predictions: Predictions | TargetPredictions | None = None
    collapse: str = ""
    worse: str = ""


@dataclass(frozen=True)
class Evaluator:
    """An evaluation repeated during training. name: "scores", or in `RunConfig.evaluators`; NAME.json is its last
    result.
    """

    run: TrainingRun

    name: ClassVar[str]
    is_due_at_start: ClassVar[bool] = False  # Also before the first step.

    def measure_on_all_ranks(self, step: int) -> Evaluation:
        """Measure the model as it is in evaluations, after `step`. Raises Stopped on all ranks when they agree to
        stop.
        """
        raise NotImplementedError

    def is_missing(self, start: int) -> bool:
        """Whether the evaluation due at step `start` is missing, because the run ended between checkpoint and
        evaluation.
        """
        has_first = self.is_due_at_start or self.run.config.init.fit_head
        if not (self.name in self.run.plan.due(start).evaluations if start else has_first):
            return False
        last = json_record.read_or_none(self.run.folder / f"{self.name}.json", _LastResult)
        tracker = self.run.tracker
        # The file is of a step that will run again, for example after a rollback: ask the records.
        if last and last.step > start and tracker:
            return all(tracker.value_at_start(name) is None for name in objectives.metrics(self.run.config)[self.name])
        return last is None or last.step < start

    def _is_saved(self, step: int) -> bool:
        """Whether there is a checkpoint of a step that is evaluated: of step 0 only with a fitted head."""
        return step > 0 or self.run.config.init.fit_head

    def evaluate_on_all_ranks(self, step: int) -> None:
        """Measure the model after `step`; report and store the result, and keep the checkpoint if it is the best."""
        run = self.run
        with run.engine.averaged():
            found = self.measure_on_all_ranks(step)
        self._mark_best(step, found.metrics.get)
        run.console.say(
            f"step {step:,}: {found.line}",
            *run.collapses.changed(self.name, step, found.collapse),
            *run.worse.changed(self.name, step, found.worse),
        )
        if run.tracker:
            run.tracker.log(step, found.metrics)
            write_text(
                run.folder / f"{self.name}.json", json.dumps(json_record.without_nan({"step": step, **found.content}))
            )
        if self._is_saved(step) and run.drawing:
            run.drawing.begin(found.predictions, run.data.evaluation)

    def watched(self, step: int, where: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A function of a batch whose calls the watchdog sees."""

        def call(batch: Any) -> Any:
            self.run.watchdog.at(step, where)
            return function(batch)

        return call

    def mark_best_again(self, start: int) -> None:
        """Keep the checkpoint of step `start` if its recorded result is the best: a kill may come between that record
        and kept.json.
        """
        if tracker := self.run.tracker:
            self._mark_best(start, tracker.value_at_start)

    def _mark_best(self, step: int, value_of: Callable[[str], float | None]) -> None:
        """value_of: a metric after this step, None if it was not measured."""
        best = self.run.config.checkpoint.best
        if self._is_saved(step) and self.run.plan.best_from == self.name and (value := value_of(best)) is not None:
            declared = objectives.metrics(self.run.config)[self.name][best]
            self.run.saver.mark_best(step, best, value, declared.better == "lower")


class SplitEvaluator(Evaluator):
    """Scores the held-out split. Classes and numbers are scored as by launch/evaluate.py; otherwise the scores are what
    the objective measures.
    """

    name = "scores"

    def measure_on_all_ranks(self, step: int) -> Evaluation:
        evaluated = self.run.data.evaluated.items()
        found = {name: self._scores_on_all_ranks(step, split) for name, split in evaluated}
        scores, predictions = next(iter(found.values()))  # Without a split, objectives.metrics has no scores.
        trained = self.run.data.not_held_out(self.run.trained_on)
        metrics = {f"{of}_{metric}": value for of, (its, _) in found.items() for metric, value in its.to_dict().items()}
        line = "; ".join(f"{of}{' (trained on)' * (of in trained)} {its}" for of, (its, _) in found.items())
        content: dict[str, Any] = scores.to_dict() | {TRAINED_BY: trained.get(next(iter(found)), "")}
        if isinstance(scores, RegressionScores):
            content["per_target"] = scores.records()
        return Evaluation(metrics, content, line, predictions)

    def _scores_on_all_ranks(
        self, step: int, split: Split
    ) -> tuple[ClassificationScores | RegressionScores | Means, Predictions | TargetPredictions | None]:
        config, engine, objective = self.run.config, self.run.engine, self.run.engine.objective
        views = () if objective.predicts else objective.views(config)
        draw = partial(objective.draw, training=False)
        reader = SplitReader.of_run(config, split, self.run.ranks, objective.pixels, self.run.stop, views, draw)
        if not objective.predicts:
            return means(self.watched(step, "evaluation", engine.measure), reader), None
        if isinstance(objective, Regression):
            found = predict_targets(self.watched(step, "evaluation", engine.forward), reader)
            return score_targets(found, config.data.targets, split.groups, objective.losses_of), found
        asked, num_classes = config.evaluate, self.run.data.dataset.num_classes
        forward = self.watched(step, "evaluation", engine.forward)
        predictions = predict(forward, reader, objective.loss_kind, keeps_all=asked.mean_ap)
        scores = score(predictions, split, num_classes, objective.loss_kind)
        if asked.mean_ap:
            of_labels, _ = mean_average_precision(predictions, split, num_classes)
            scores = replace(scores, **of_labels)
        return scores, predictions


class ProbeEvaluator(Evaluator):
    """Measures few-shot and nearest-neighbour accuracy of the backbone's features, and their RankMe."""

    name = "probe"
    is_due_at_start = True

    def measure_on_all_ranks(self, step: int) -> Evaluation:
        run, probe = self.run, self.run.run_probe
        assert probe is not None, "start.prepare opens it where probe.every is set"
        features = self.watched(step, "probe", run.engine.features)
        scores = probe.scores(features, run.ranks, run.stop, run.engine.objective.pixels)
        main, *_ = run.config.probe.tested
        metrics = probe_metrics(scores, main)
        for name, of_another in scores.get("also", {}).items():
            metrics |= probe_metrics(of_another, name)
        # Classes may well collapse to a few directions: of two classes, one is enough. New weights may seem to.
        is_judged = step > 0 and "spread" in scores and not run.config.needs_labels
        found = collapse(scores["spread"]) if is_judged else ""
        trained = probe.trained_by(run.trained_on)
        line = f"{''.join(f'{name} (trained on) ' for name in trained)}{metrics_in_words(metrics)}"
        last = json_record.read_or_none(run.folder / f"{self.name}.json", _LastResult) if step else None
        first, worse = (last.first if last else {}) if step else metrics, ""
        if run.config.init.weights:
            worse = worse_than_first(metrics, first, {one.name: len(one.test) for one in probe.labelled})
        content = scores | {TRAINED_BY: trained, "first": first}
        collapsed = {"probe_collapse": 1} if found else {}
        return Evaluation(metrics | collapsed, content, line, collapse=found, worse=worse)


def worse_than_first(metrics: Mapping[str, float], first: Mapping[str, float], num_images: Mapping[str, int]) -> str:
    """Accuracies of a probe that are below those before the first step, and what to change; "" without any.

    Below: the 95 % interval over test images is. num_images: tested of each data set.
    """
    worse = []
    for name, value in metrics.items():
        count = metrics.get(f"{name}_effective_images", num_images.get(probed_data(name) or ""))
        if name in first and count and of_samples(value, count).high < first[name]:
            worse.append(f"{name} {value:.2%}, {first[name]:.2%} at the start")
    if not worse:
        return ""
    return (
        f"{'; '.join(worse)}: lower optimizer.lr or optimizer.layer_decay, use a longer train.heads_first or"
        " train.lora_rank=8, or train on the old images as well (data.mix)"
    )


def evaluators_of(run: TrainingRun) -> list[Evaluator]:
    """The evaluators of a run: those that measure something of it."""
    measured = objectives.metrics(run.config)
    return [kind(run) for kind in (SplitEvaluator, ProbeEvaluator) if measured[kind.name]]


@dataclass(frozen=True)
class _LastResult:
    """first: metrics of the probe before the first step."""

    step: int
    first: dict[str, float] = field(default_factory=dict)
