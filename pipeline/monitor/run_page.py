"""What the MLflow page of a run shows beside its curves: kind, source, data sets, parents. Needs no MLflow."""

import contextlib
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pipeline.base.metric import MAIN, Metric, kind_of, metric_of, title_of
from pipeline.base.trained_on import TRAINED_BY

if TYPE_CHECKING:
    from pipeline.data.dataset.manifest import Dataset

_ROOT = Path(__file__).resolve().parents[2]
# Tag of a run or an experiment: its description, Markdown.
NOTE = "mlflow.note.content"
# Metric that MLflow alone has: a run's score in per cent, with a suffix where it is not top-1. The tag of this name
# says it in words, with the data.
SCORE = "score"
# Tag of a run: the published weights that its objective learns from.
TEACHER_TAG = "teacher"
# Begins a parameter of a training run whose probes read labels, before _ and a data set's name: the number of its
# images that are tested on.
PROBED_IMAGES = "probed_images"
# A password in a URI: between the user and the host, or among the parameters behind the question mark. It may have a
# slash, as in base64; what has at most five digits before one is a port.
_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):(?:[^/\s]*|(?!\d{1,5}/)[^\s@]*)@")
_PASSWORD_PARAMETER = re.compile(r"(?<=[?&])(password|passwd|sslpassword)=[^&\s'\"]*")


def hide_passwords(text: str) -> str:
    """The text with the password of each URI replaced: postgresql://user:***@host/db."""
    return _PASSWORD_PARAMETER.sub(r"\1=***", _PASSWORD.sub(r"\1:***@", text))


# Notes of a data set that belong to a run, not to the data set.
OF_THE_RUN = ("share", TRAINED_BY)


@dataclass(frozen=True)
class DatasetFacts:
    """One split of a data set that a run used.

    source: path or URL. digest: its fingerprint, at most 36 characters. context: "training" or "evaluation". notes:
    more that is known of it, such as copies of test images that were found in it.
    """

    name: str
    source: str
    digest: str
    split: str
    num_samples: int
    num_classes: int
    context: str
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name by which MLflow shows the split."""
        return f"{self.name}:{self.split}"


def split_facts(name: str, dataset: "Dataset", split: str, context: str) -> DatasetFacts:
    """A whole split of a data set. name: that MLflow shows."""
    num_samples = dataset.info["samples"][split]
    return DatasetFacts(name, str(dataset.path), dataset.fingerprint, split, num_samples, dataset.num_classes, context)


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint that MLflow shows as a logged model.

    path: of its folder, or its URL. sha256: of its model.safetensors. roles: "kept", "best" (by the metric of
    checkpoint.best) or "last" (of a run that has ended).
    """

    step: int
    path: str
    sha256: str
    roles: tuple[str, ...]


@dataclass(frozen=True)
class WeightsOrigin:
    """Weights that a run began with, as they were at that moment (`monitor/origin.py`).

    path: of the file. run: name of the run that made them; "" if it is not known. run_id: of its MLflow run, or "".
    step: of that run; None if it is not known. score: what the run scored at that step, as "4.55 % flowers:val"; "" if
    it was not scored.
    """

    path: str
    sha256: str = ""
    run: str = ""
    run_id: str = ""
    step: int | None = None
    score: str = ""

    @property
    def title(self) -> str:
        """Such as "photos-b16, step 200"; without a run, the name of the file."""
        step = "" if self.step is None else f", step {self.step:,}"
        return (self.run or Path(self.path).name) + step

    @property
    def details(self) -> str:
        """Such as "step 200, SHA-256 0123456789abcdef..., which scored 4.55 % flowers:val"."""
        step = "" if self.step is None else f"step {self.step:,}, "
        score = f", which scored {self.score}" if self.score else ""
        return f"{step}SHA-256 {self.sha256[:16]}...{score}"

    def tags(self) -> dict[str, str]:
        """Tags for an MLflow run."""
        return {
            "parent": self.title,
            "parent_checkpoint": self.path,
            "parent_sha256": self.sha256,
            "parent_score": self.score,
        }


@dataclass(frozen=True)
class RunFacts:
    """The facts that an MLflow run shows beside its metrics.

    kind: pretrain, finetune, grid, study, vtab, cell, evaluation, explain or data. parameters: settings that differ
    from their defaults, and what follows from them. description: Markdown. parents: relation -> ID of the MLflow run
    that this one came from.
    steps: planned steps, from which the tag `progress` follows. images_per_step, flops_per_image: for the metrics
    images_seen and exaflops, against which curves can be drawn. All three are 0 for a run without steps, as a report.
    artifacts: files to upload, names in the run folder, each once it exists and again when it has changed.
    score: the metric that says how good the run is, by which registered models are compared; "" for a run without one.
    scored_on: on what; by default the data of the evaluation.
    origin: the weights that the run began with; None for new ones. objective: train.loss; "" if it is not known.
    metrics: what objective and evaluators declare of theirs, the most telling first. model: the model as built, of
    `pipeline.model.config_from_dict`. checkpoint_folder: the setting, for `process/committed.py`.
    """

    name: str
    kind: str
    parameters: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: tuple[DatasetFacts, ...] = ()
    description: str = ""
    parents: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    images_per_step: int = 0
    flops_per_image: float = 0.0
    artifacts: tuple[str, ...] = ()
    score: str = ""
    scored_on: str = ""
    origin: WeightsOrigin | None = None
    objective: str = ""
    metrics: dict[str, Metric] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    checkpoint_folder: str = ""

    def metric(self, name: str) -> Metric:
        """The declaration of a metric of this run."""
        return metric_of(name, self.metrics)

    def dataset(self, context: str) -> DatasetFacts | None:
        """The first data of a context, "training" or "evaluation"."""
        return next((facts for facts in self.datasets if facts.context == context), None)

    def all_tags(self) -> dict[str, str]:
        """The tags of the run when it starts; empty values are left out."""
        origin = self.origin.tags() if self.origin else {}
        tags = {"kind": self.kind, NOTE: self.description, **self.tags, **origin}
        tags |= {f"{relation}_run_id": run_id for relation, run_id in self.parents.items()}
        return {name: hide_passwords(text) for name, text in tags.items() if text}

    def score_among(self, names: Collection[str]) -> str:
        """Which metric is the score: one of MAIN or accuracy, if it is measured, also where the best checkpoint is
        chosen by the loss.
        """
        for score in (*MAIN, "top1"):
            ends = [name for name in names if name.endswith(f"_{score}")]
            if of_split := [name for name in ends if self.score.startswith(name.removesuffix(score))]:
                return max(of_split, key=len)
        return self.score

    def score_in_words(self, name: str, value: float) -> str:
        """A score as the list of runs shows it: "53.67 % top-1 flowers:val", "53.67 % kNN of flowers (k = 20)"."""
        metric = self.metric(name)
        held_out = self.dataset("evaluation")
        if self.scored_on:
            return f"{metric.text(value)} {self.scored_on}"
        if held_out is None:
            return f"{metric.text(value)} {title_of(name)}"
        of_split, of_data = name.removeprefix(f"{held_out.split}_"), name.removeprefix(f"{held_out.name}_")
        if metric.group == "probe" and of_split == name:
            # The probe of a run in training may be of another data set, and is of another split.
            if self.kind != "evaluation":
                return f"{metric.text(value)} {title_of(name)}"
            of_split = of_data
        words = [metric.text(value), "loss" if metric.unit == "loss" else title_of(of_split)]
        return " ".join([*(words[::-1] if metric.unit == "loss" else words), held_out.title])

    def sent_name(self, metric: str) -> str:
        """A metric as MLflow shows it: with its group, if any, and a loss with its objective, "train/loss_sigmoid".

        Losses of different objectives do not compare, and one chart must not mix them.
        """
        declared = self.metric(metric)
        name = f"{declared.group}/{metric}".removeprefix("/")
        has_objective = declared.unit == "loss" and self.objective not in ("", "softmax")
        return f"{name}_{self.objective}" if has_objective else name

    def as_sent(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a step as they are sent: also SCORE, by which the list of runs is sorted, or score_knn, score_r2,
        ...: only scores of one kind sort together.
        """
        sent = {self.sent_name(name): value for name, value in metrics.items()}
        value = metrics.get(name := self.score_among(metrics.keys()), math.nan)
        metric = self.metric(name)
        can_sort = (metric.is_share or kind_of(name) in MAIN) and math.isfinite(value)
        name = str(self.parameters.get("score", name))  # Of a study, that of its runs.
        column = f"{SCORE}_{kind_of(name)}".rstrip("_")
        # A page lists what came first on top.
        return {column: round(100 * value, 2) if metric.is_share else round(value, 4), **sent} if can_sort else sent

    def axes(self, step: int) -> dict[str, float]:
        """Metrics of a step that serve as x axes."""
        images = step * self.images_per_step
        exaflops = self.images_per_step * (step * self.flops_per_image) / 1e18
        return {"images_seen": images, "exaflops": exaflops} if images else {}


def source_tags() -> dict[str, str]:
    """User, command and git revision of this process, as MLflow's own client would set them."""
    words = [word for word in sys.argv if not word.startswith("--local_rank=")]  # Which a launcher adds.
    program = "/".join(Path(sys.argv[0]).resolve().parts[-2:])  # As one would type it: launch/pretrain.py.
    return {
        "mlflow.user": os.environ.get("USER") or psutil.Process().username(),
        "mlflow.source.name": program,  # MLflow shows what follows the last slash, so no arguments.
        "command": hide_passwords(shlex.join(["python", *words])),
        "mlflow.source.type": "LOCAL",
        **_revision(),
    }


@cache  # A sweep and a study make many runs from one process, which runs the code that it has imported.
def _revision() -> dict[str, str]:
    """Tags of the git revision of this code; none outside of git, or without it: a job's working folder, an installed
    package.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(_ROOT), *words], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    # Installed, a repository around it would be another project's.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if (_ROOT / "pyproject.toml").exists():
            return {
                "mlflow.source.git.commit": git("rev-parse", "HEAD"),
                "mlflow.source.git.branch": git("rev-parse", "--abbrev-ref", "HEAD"),
                "mlflow.source.git.dirty": str(bool(git("status", "--porcelain", "--untracked-files=no"))).lower(),
            }
    return {}


def installed_packages() -> list[str]:
    """NAME==VERSION of each installed package, as `pip freeze` lists them, from the names of their folders: that takes
    no time.
    """
    folders = {found.stem for path in sys.path for found in Path(path).glob("*.dist-info")}
    return sorted((folder.replace("-", "==", 1) for folder in folders), key=str.lower)
