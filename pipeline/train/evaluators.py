"""Evaluators that run during training: scores on the held-out split, and probes of the features.

Each writes its last result to a file of the run folder. A restarted run compares it with its checkpoint, to make up an
evaluation that was due but did not finish.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from pipeline import objectives
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import write_text
from pipeline.checkpoint.saver import Saver
from pipeline.data.loading.loader import BadBudget, Batch
from pipeline.evaluate.classify import Scores, predict, score
from pipeline.evaluate.measured import Means, means
from pipeline.evaluate.probes.probe import RunProbe, probe_metrics
from pipeline.evaluate.split_reader import SplitReader
from pipeline.train.training_run import Monitoring, RunContext

if TYPE_CHECKING:
    from pipeline.train.zero.engine import Engine


class Evaluator(Protocol):
    """An evaluation repeated during training. name: its name in `Plan.due`."""

    name: str

    def is_owed(self, start: int) -> bool:
        """Whether the evaluation due at step `start` is missing, because the run ended between checkpoint and evaluation."""

    def evaluate_on_all_ranks(self, step: int) -> None:
        """Score the model after `step`; report and store the result. Raises Stopped on all ranks when they agree to stop."""


@dataclass(frozen=True)
class _Evaluator:
    """Base of both evaluators. every: interval in steps, 0 is never."""

    context: RunContext
    engine: "Engine"
    monitoring: Monitoring
    saver: Saver

    name = ""
    file = ""

    @property
    def every(self) -> int:
        raise NotImplementedError

    def is_owed(self, start: int) -> bool:
        if not start or not self.every or (start % self.every and start < self.context.plan.steps):
            return False
        try:
            return json_record.read(self.context.folder / self.file, _LastResult).step < start
        except (FileNotFoundError, UserError):
            return True

    def _report(self, step: int, line: str, metrics: dict[str, float], content: dict[str, Any]) -> None:
        self.context.console.say(f"step {step:,}: {line}")
        if self.monitoring.tracker:
            self.monitoring.tracker.log(step, metrics)
            write_text(self.context.folder / self.file, json.dumps({"step": step, **content}))


@dataclass(frozen=True)
class SplitEvaluator(_Evaluator):
    """Scores the held-out split; the scores select the best checkpoint.

    Classes are scored as by launch/evaluate.py; otherwise the scores are what the objective measures.
    """

    name = "scores"
    file = "scores.json"

    @property
    def every(self) -> int:
        return self.context.plan.eval_every

    def evaluate_on_all_ranks(self, step: int) -> None:
        config, split, drawing = self.context.config, self.context.prepared.evaluation, self.monitoring.drawing

        def forward(images: Tensor) -> Tensor:
            self.monitoring.watchdog.at(step, "evaluation")
            return self.engine.forward(images)

        def measure(batch: Batch) -> dict[str, Tensor]:
            self.monitoring.watchdog.at(step, "evaluation")
            return self.engine.measure(batch)

        reader = SplitReader(
            split, config.model.image_size, config.augment, config.evaluate.batch, config.data.threads, self.context.ranks,
            stop=self.context.stop, budget=BadBudget(config.data.max_bad_share),
        )  # fmt: skip
        predictions = None
        with self.engine.averaged():
            if self.engine.objective.predicts_classes:
                predictions = predict(forward, reader, config.train.loss)
                scores: Scores | Means = score(predictions, split)
            else:
                scores = means(measure, reader)
        name = config.data.evaluated_split
        content = scores.to_dict()
        metrics = {f"{name}_{metric}": value for metric, value in content.items()}
        if config.checkpoint.best:
            best = config.checkpoint.best
            declared = objectives.metrics(config)[self.name][best]
            self.saver.mark_best(step, best, metrics[best], declared.better == "lower")
        self._report(step, f"{name} {scores}", metrics, content)
        if drawing is not None:
            drawing.begin(predictions, split)


@dataclass(frozen=True)
class ProbeEvaluator(_Evaluator):
    """Measures few-shot and nearest-neighbour accuracy of the features."""

    probe: RunProbe

    name = "probe"
    file = "probe.json"

    @property
    def every(self) -> int:
        return self.context.plan.probe_every

    def evaluate_on_all_ranks(self, step: int) -> None:
        def features(images: Tensor) -> Tensor:
            self.monitoring.watchdog.at(step, "probe")
            return self.engine.features(images)

        with self.engine.averaged():
            scores = self.probe.scores(features, self.context.ranks, self.context.stop)
        metrics = probe_metrics(scores, self.context.config.probe.prefix)
        self._report(step, ", ".join(f"{name} {value:.2%}" for name, value in metrics.items()), metrics, scores)


@dataclass(frozen=True)
class _LastResult:
    step: int
