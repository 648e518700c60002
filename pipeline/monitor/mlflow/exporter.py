"""Appends a run to MLflow by its public client: parameters, data sets, tags, points, files, logged models."""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.base.words import counted
from pipeline.monitor.export import Exporter, Scores, Sent, SentModel, warn
from pipeline.monitor.metrics_file import Record
from pipeline.monitor.mlflow.connection import (
    active_run,
    connect,
    experiment_id,
    found_by,
    is_refusal,
    one_line,
)
from pipeline.monitor.page_folder import End, PageFolder, describe
from pipeline.monitor.run_page import (
    NOTE,
    OF_THE_RUN,
    SCORE,
    DatasetFacts,
    ModelFacts,
    RunFacts,
    hide_passwords,
)
from pipeline.settings.run import TrackConfig

T = TypeVar("T")
FindModels = Callable[[bool], list[ModelFacts]]
# Tag of an MLflow run: the key of its run folder.
KEY_TAG = "run_folder"
# MLflow's limits: characters of a parameter's value, and of a tag's; parameters per request.
_MAX_VALUE, _MAX_TAG = 6000, 8000
_MAX_PARAMETERS = 100

WEIGHTS = "model.safetensors"
# MLflow refuses these in the name of a logged model.
_NOT_IN_MODEL_NAMES = re.compile(r"[/:.%\"']")


def _how_to_load(uri: str, shown: dict[str, str]) -> str:
    """Description of a logged model, Markdown. shown: its parameters."""
    return f"""\
**Step {shown["step"]} of `{shown["run"]}`**: `{shown["path"]}`

SHA-256 of `{WEIGHTS}`: `{shown["sha256"]}`

    python launch/evaluate.py weights={uri} data=...
    python launch/finetune.py --config ... init.weights={uri}

    from pipeline.model import load
    from pipeline.monitor.mlflow.weights import weights_path
    model = load(weights_path("{uri}"))

The file is read where the run wrote it, and refused if its SHA-256 is another one."""


class MlflowExporter(Exporter):
    """An `Exporter` to the MLflow server or database `config.uri`.

    artifacts: URI of those of an experiment that is created here; None leaves the choice to the server. find_models:
    returns the checkpoints to show, during the run (False) or after its end (True). What the store refuses, it would
    refuse again: each item is reported once and skipped.
    """

    name = "mlflow"

    def __init__(
        self, artifacts: str | None, config: TrackConfig, facts: RunFacts, folder: Path, find_models: FindModels
    ) -> None:
        self.destination = hide_passwords(config.uri)
        self.title = f"MLflow at {self.destination}"
        self.artifacts, self.config, self.facts, self.page = artifacts, config, facts, PageFolder(folder)
        self.find_models = find_models
        self.refused = set[str]()  # What will never arrive in this store.
        self.client: Any = None

    def connect(self) -> None:
        sent, update = self.sent, self.update
        if not sent.key:  # Also says which store was tried.
            update(key=uuid.uuid4().hex)
        client = self.client = connect(self.config.uri)
        self.experiment_id = experiment_id(client, self.config.experiment, self.artifacts)
        run = active_run(client, sent.run_id)  # After that: one that is in a deleted experiment is not made again.
        if run is None and sent.run_id:
            warn(f"{self.title} has no run {sent.run_id} (deleted?): all is sent to a new one.")
            update(**vars(Sent(uuid.uuid4().hex)))
        starts = self.page.starts()
        if run is None:
            found = client.search_runs([self.experiment_id], f"tags.{KEY_TAG} = '{sent.key}'", max_results=1)
            started = round(1000 * starts[0].time) if starts else None
            run = (
                found[0]
                if found
                else client.create_run(self.experiment_id, started, {KEY_TAG: sent.key}, self.facts.name)
            )
            update(run_id=run.info.run_id)
        if not sent.is_described:
            self._describe()
            update(is_described=True)
        client.update_run(sent.run_id, status="RUNNING")
        count = {"starts": str(len(starts))} if starts else {}
        tags = {**self.facts.all_tags(), **count, NOTE: describe(self.facts.description, starts)}
        self._set_tags("the tags", tags)

    def _describe(self) -> None:
        """Send parameters, cut to MLflow's limit, and which data the run uses."""
        from mlflow.entities import Param

        items = [Param(name, str(value)[:_MAX_VALUE]) for name, value in self.facts.parameters.items()]
        for first in range(0, len(items), _MAX_PARAMETERS):
            self.send_each(
                items[first : first + _MAX_PARAMETERS],
                lambda param: f"parameter {param.key}",
                lambda some: self.client.log_batch(self.sent.run_id, params=some),
            )
        if inputs := dataset_inputs(self.facts.datasets):
            self.allows("the data sets", lambda: self.client.log_inputs(self.sent.run_id, inputs))

    def _set_tags(self, what: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        set_tags = [RunTag(name, text[:_MAX_TAG]) for name, text in tags.items()]
        self.allows(what, lambda: self.client.log_batch(self.sent.run_id, tags=set_tags))

    def log(self, records: Sequence[Record]) -> None:
        def send(some: Sequence[Record]) -> None:
            from mlflow.entities import Metric, RunTag

            points = [
                Metric(name, value, record.time, record.step)
                for record in some
                for name, value in self.facts.as_sent(record.metrics).items()
            ]
            tags = [RunTag(name, text) for name, text in self._tags_of(some).items()]
            self.client.log_batch(self.sent.run_id, metrics=points, tags=tags)

        self.send_each(records, lambda record: f"the metrics of step {record.step:,}", send)

    def _tags_of(self, records: Sequence[Record]) -> dict[str, str]:
        """The tags that show in the list of runs how far this one is, how good, and whether points follow twice."""
        tags, step = {}, records[-1].step
        if self.facts.steps:
            tags["progress"] = f"{step / self.facts.steps:.0%} ({step:,} of {counted(self.facts.steps, 'step')})"
        for record in records:
            if (name := self.facts.score_among(record.metrics.keys())) in record.metrics:
                tags[SCORE] = self.facts.score_in_words(name, record.metrics[name])
        if back := self.sent.rollbacks:
            tags["rollbacks"] = f"went back to step {', '.join(map(str, back))}: points of later steps follow again"
        return tags

    def upload(self, path: Path, name: str) -> None:
        folder = name.rpartition("/")[0] or None
        self.allows(str(path), lambda: self.client.log_artifact(self.sent.run_id, str(path), folder))

    def finish(self, end: End) -> None:
        self._set_tags("how the run ended", end.tags)
        self.client.set_terminated(self.sent.run_id, end.status)

    def explain(self, error: Exception) -> str:
        return f"{'refused the run' if is_refusal(error) else 'cannot be reached'} ({one_line(error)})"

    # ---------------------------------------------------------------- checkpoints
    def show_models(self, scores: Scores, ended: bool) -> None:
        """Create the logged models of new checkpoints, bring known ones up to date, and delete those of removed
        ones.
        """
        present = {model.sha256: model for model in self.find_models(ended)}
        for sha256 in self.sent.models.keys() - present.keys():
            found_by(partial(self.client.delete_logged_model, self.sent.models[sha256].model_id))
            self.update(models={key: model for key, model in self.sent.models.items() if key != sha256})
        for model in sorted(present.values(), key=lambda model: model.step):
            known, of_step = self.sent.models.get(model.sha256), scores.get(model.step, {})
            if known is None or (known.roles, known.num_scores) != (model.roles, len(of_step)):
                self.allows(f"the logged model of {model.path}", partial(self._show, model, of_step), optional=True)

    def _show(self, model: ModelFacts, scores: dict[str, tuple[float, int]]) -> None:
        """Show a model, and the scores of its step as measured on the data of the evaluation."""
        from mlflow.entities import Metric

        shown = self.sent.models.get(model.sha256) or SentModel(self._create(model), model.roles)
        if shown.roles != model.roles:
            self.client.set_logged_model_tags(shown.model_id, {"roles": ", ".join(model.roles)})
        data = self.facts.dataset("evaluation")
        where = {"dataset_name": data.title, "dataset_digest": data.digest[:36]} if data else {}
        if linked := [
            Metric(self.facts.sent_name(name), value, at, model.step, shown.model_id, **where)
            for name, (value, at) in scores.items()
        ]:
            self.client.log_batch(self.sent.run_id, metrics=linked)
        sent = SentModel(shown.model_id, model.roles, len(scores))
        self.update(models={**self.sent.models, model.sha256: sent})

    def _create(self, model: ModelFacts) -> str:
        """Returns the ID. A model that a killed sender created is used again."""
        from mlflow.entities import LoggedModelOutput

        client, run_id = self.client, self.sent.run_id
        name = f"{_NOT_IN_MODEL_NAMES.sub('_', self.facts.name)}-step-{model.step:08d}"
        # Its page lists parameters in full, tags not.
        shown = {"step": str(model.step), "run": self.facts.name, "path": model.path, "sha256": model.sha256}
        if kind := self.facts.tags.get("model", ""):
            shown["model"] = kind
        alike = client.search_logged_models([self.experiment_id], f"source_run_id = '{run_id}' AND name = '{name}'")
        made = next((one for one in alike if one.params.get("sha256") == model.sha256), None)
        outputs = [output.model_id for output in client.get_run(run_id).outputs.model_outputs] if made else []
        made = made or client.create_logged_model(self.experiment_id, name, run_id, params=shown, model_type=kind)
        note = _how_to_load(made.model_uri, shown)
        client.set_logged_model_tags(made.model_id, {NOTE: note, "roles": ", ".join(model.roles)})
        client.finalize_logged_model(made.model_id, "READY")
        if made.model_id not in outputs:
            client.log_outputs(run_id, [LoggedModelOutput(made.model_id, model.step)])
        return str(made.model_id)

    # ---------------------------------------------------------------- what a store refuses
    def allows(self, name: str, request: Callable[[], object], optional: bool = False) -> None:
        """Make a request for what `name` names, unless it was refused before. Raises other errors than a refusal.

        optional: a store that has no such request refuses it.
        """
        if name not in self.refused and (reason := self._reason(request, optional)):
            self.refused.add(name)
            warn(f"MLflow refused {name} ({reason}): it will never arrive there, and the rest goes on.")

    def send_each(self, items: Sequence[T], name: Callable[[T], str], request: Callable[[Sequence[T]], object]) -> None:
        """Make one request for all items, or one for each if it is refused, so that only what the store refuses is left
        out.
        """
        if self._reason(partial(request, items)):
            for item in items:
                self.allows(name(item), partial(request, [item]))

    def _reason(self, request: Callable[[], object], optional: bool = False) -> str:
        """Why the store refused a request; "" if it did not. Raises other errors."""
        try:
            request()
        except Exception as error:
            # What was deleted is not made again. Older servers have no logged models; a server that does not know the
            # request for metrics is not MLflow.
            missing = ("RESOURCE_DOES_NOT_EXIST", "ENDPOINT_NOT_FOUND")[: 1 + optional]
            is_refused = is_refusal(error) or getattr(error, "error_code", "") in missing
            if not is_refused or not active_run(self.client, self.sent.run_id):  # A deleted run refuses everything.
                raise
            return one_line(error) or type(error).__name__
        return ""


def dataset_inputs(datasets: Iterable[DatasetFacts]) -> list[Any]:
    """Data sets as MLflow shows them; it keeps one that was logged before once."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for facts in datasets:
        kind = facts.source.partition("://")[0] if "://" in facts.source else "local"
        profile = {
            "num_samples": facts.num_samples,
            "num_classes": facts.num_classes,
            "split": facts.split,
            **facts.notes,
        }
        dataset = Dataset(
            facts.title,
            facts.digest[:36],
            kind,
            json.dumps({"uri": facts.source}),
            profile=json.dumps(profile),
        )
        tags = {"mlflow.data.context": facts.context}
        tags |= {name: facts.notes[name] for name in OF_THE_RUN if name in facts.notes}
        inputs.append(DatasetInput(dataset, [InputTag(key, value) for key, value in tags.items()]))
    return inputs
