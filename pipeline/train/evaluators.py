"""Evaluators that run during training: scores on the held-out split, and probes of the features.

Each writes its last result to a file of the run folder. A restarted run compares it with its checkpoint, to make up an
evaluation that was due but did not finish.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import write_text
from pipeline.checkpoint.saver import Saver
from pipeline.data.dataset.split import Split
from pipeline.data.loading.loader import BadBudget, Batch
from pipeline.estimate.plan import Plan
from pipeline.evaluate.classify import ClassificationScores, predict, score
from pipeline.evaluate.measured import Means, means
from pipeline.evaluate.probes.probe import RunProbe, probe_metrics
from pipeline.evaluate.split_reader import SplitReader
from pipeline.lifecycle.stop import Stop
from pipeline.monitor.tracking import Tracker
from pipeline.monitor.watchdog import Watchdog
from pipeline.process.console import Console
from pipeline.process.distributed import Ranks
from pipeline.settings.run import RunConfig
from pipeline.train.drawing import Drawing

if TYPE_CHECKING:
    from pipeline.train.zero.engine import Engine


class Evaluator(Protocol):
    """An evaluation repeated during training. name: its name in `Plan.due`."""

    name: str

    def is_missing(self, start: int) -> bool:
        """Whether the evaluation due at step `start` is missing, because the run ended between checkpoint and evaluation."""

    def evaluate_on_all_ranks(self, step: int) -> None:
        """Score the model after `step`; report and store the result. Raises Stopped on all ranks when they agree to stop."""


@dataclass(frozen=True)
class _PeriodicEvaluator:
    """Base of both evaluators. every: interval in steps, 0 is never. tracker: rank 0 only."""

    config: RunConfig
    plan: Plan
    ranks: Ranks
    stop: Stop
    engine: "Engine"
    watchdog: Watchdog
    console: Console
    tracker: Tracker | None
    folder: Path

    name = ""
    file = ""

    @property
    def every(self) -> int:
        raise NotImplementedError

    def is_missing(self, start: int) -> bool:
        if not start or not self.every or (start % self.every and start < self.plan.steps):
            return False
        try:
            return json_record.read(self.folder / self.file, _LastResult).step < start
        except (FileNotFoundError, UserError):
            return True

    def _report(self, step: int, line: str, metrics: dict[str, float], content: dict[str, Any]) -> None:
        self.console.say(f"step {step:,}: {line}")
        if self.tracker:
            self.tracker.log(step, metrics)
            write_text(self.folder / self.file, json.dumps({"step": step, **content}))


@dataclass(frozen=True)
class SplitEvaluator(_PeriodicEvaluator):
    """Scores the held-out split; the scores select the best checkpoint. drawing: rank 0 only.

    Classes are scored as by launch/evaluate.py; otherwise the scores are what the objective measures.
    """

    split: Split
    saver: Saver
    drawing: Drawing | None

    name = "scores"
    file = "scores.json"

    @property
    def every(self) -> int:
        return self.plan.eval_every

    def evaluate_on_all_ranks(self, step: int) -> None:
        config = self.config

        def forward(images: Tensor) -> Tensor:
            self.watchdog.at(step, "evaluation")
            return self.engine.forward(images)

        def measure(batch: Batch) -> dict[str, Tensor]:
            self.watchdog.at(step, "evaluation")
            return self.engine.measure(batch)

        reader = SplitReader(
            self.split, config.model.image_size, config.augment, config.evaluate.batch, config.data.threads, self.ranks,
            stop=self.stop, budget=BadBudget(config.data.max_bad_share),
        )  # fmt: skip
        predictions = None
        with self.engine.averaged():
            if self.engine.objective.predicts_classes:
                predictions = predict(forward, reader, config.train.loss)
                scores: ClassificationScores | Means = score(predictions, self.split)
            else:
                scores = means(measure, reader)
        name = config.data.evaluated_split
        content = scores.to_dict()
        metrics = {f"{name}_{metric}": value for metric, value in content.items()}
        if config.checkpoint.best:
            self.saver.mark_best(step, config.checkpoint.best, metrics[config.checkpoint.best])
        self._report(step, f"{name} {scores}", metrics, content)
        if self.drawing is not None:
            self.drawing.begin(predictions, self.split)


@dataclass(frozen=True)
class ProbeEvaluator(_PeriodicEvaluator):
    """Measures few-shot and nearest-neighbour accuracy of the features."""

    probe: RunProbe

    name = "probe"
    file = "probe.json"

    @property
    def every(self) -> int:
        return self.plan.probe_every

    def evaluate_on_all_ranks(self, step: int) -> None:
        def features(images: Tensor) -> Tensor:
            self.watchdog.at(step, "probe")
            return self.engine.features(images)

        with self.engine.averaged():
            scores = self.probe.scores(features, self.ranks, self.stop)
        metrics = probe_metrics(scores, self.probe.name)
        self._report(step, ", ".join(f"{name} {value:.2%}" for name, value in metrics.items()), metrics, scores)


@dataclass(frozen=True)
class _LastResult:
    step: int
