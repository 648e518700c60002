"""Appends a run to MLflow by its public client: parameters, data sets, tags, points, files, logged models."""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.base.words import counted
from pipeline.monitor.export import Sent, warn
from pipeline.monitor.metrics_file import Record
from pipeline.monitor.mlflow.connection import active_run, connect, experiment_id
from pipeline.monitor.mlflow.models import LoggedModels
from pipeline.monitor.mlflow.refusals import what_failed
from pipeline.monitor.page_folder import End, PageFolder, describe
from pipeline.monitor.run_page import (
    NOTE,
    OF_THE_RUN,
    SCORE,
    DatasetFacts,
    ModelFacts,
    RunFacts,
    dataset_name,
    hide_passwords,
)
from pipeline.settings.run import TrackConfig

# Returns the checkpoints to show, during the run (False) or after its end (True).
FindModels = Callable[[bool], list[ModelFacts]]
# Tag of an MLflow run: the key of its run folder.
KEY_TAG = "run_folder"
# MLflow's limits: characters of a parameter's value, and of a tag's; parameters per request.
_MAX_VALUE, _MAX_TAG = 6000, 8000
_MAX_PARAMETERS = 100


class MlflowExporter(LoggedModels):
    """An `Exporter` to the MLflow server or database `config.uri`.

    artifacts: URI of those of an experiment that is created here; None leaves the choice to the server.
    """

    name = "mlflow"

    def __init__(
        self, artifacts: str | None, config: TrackConfig, facts: RunFacts, folder: Path, find_models: FindModels
    ) -> None:
        self.destination = hide_passwords(config.uri)
        self.title = f"MLflow at {self.destination}"
        self.artifacts, self.config, self.facts, self.page = artifacts, config, facts, PageFolder(folder)
        self.find_models = find_models
        self.refused = set()
        self._started = round(time.time() * 1000)  # MLflow's import and a fresh store take seconds.

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
            started = round(1000 * starts[0].time) if starts else self._started
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

            shown = [replace(record, metrics=self.facts.as_sent(record.metrics)) for record in some]
            points = [Metric(name, value, r.time, r.step) for r in shown for name, value in r.metrics.items()]
            tags = [RunTag(name, text) for name, text in self._tags_of(some).items()]
            self.client.log_batch(self.sent.run_id, metrics=points, tags=tags)

        self.send_each(records, lambda record: f"the metrics of step {record.step:,}", send)

    def _tags_of(self, records: Sequence[Record]) -> dict[str, str]:
        """The tags that show in the list of runs how far this one is, how good, and whether points follow twice."""
        tags = {}
        if self.facts.steps and records:
            step = max(record.step for record in records)
            tags["progress"] = f"{step / self.facts.steps:.0%} ({step:,} of {counted(self.facts.steps, 'step')})"
        for record in records:
            if (name := self.facts.score_among(record.metrics.keys())) in record.metrics:
                tags[SCORE] = self.facts.score_in_words(name, record.metrics[name])
        if back := self.sent.rollbacks:
            tags["rollbacks"] = (
                f"went back to step {', '.join(f'{step:,}' for step in back)}: points of later steps follow again"
            )
        return tags

    def upload(self, path: Path, name: str) -> None:
        folder = name.rpartition("/")[0] or None
        self.allows(str(path), lambda: self.client.log_artifact(self.sent.run_id, str(path), folder))

    def finish(self, end: End) -> None:
        self._set_tags("how the run ended", end.tags)
        self.client.set_terminated(self.sent.run_id, end.status)

    def explain(self, error: Exception) -> str:
        return what_failed(error)


def dataset_inputs(datasets: Iterable[DatasetFacts]) -> list[Any]:
    """Data sets as MLflow shows them; it keeps one that was logged before once."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for facts in datasets:
        kind = facts.source.partition("://")[0] if "://" in facts.source else "local"
        labels = {"labels": f"int64, {facts.num_classes} classes"} if facts.num_classes else {}
        profile = {
            "num_samples": facts.num_samples,
            "num_classes": facts.num_classes,
            "split": facts.split,
            **facts.notes,
        }
        dataset = Dataset(
            dataset_name(facts),
            facts.digest[:36],
            kind,
            json.dumps({"uri": facts.source}),
            schema=json.dumps({"image": "bytes", **labels}),
            profile=json.dumps(profile),
        )
        tags = {"mlflow.data.context": facts.context}
        tags |= {name: facts.notes[name] for name in OF_THE_RUN if name in facts.notes}
        inputs.append(DatasetInput(dataset, [InputTag(key, value) for key, value in tags.items()]))
    return inputs
