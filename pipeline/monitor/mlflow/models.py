"""Requests about logged and registered models."""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.monitor.mlflow.refusals import one_line
from pipeline.monitor.mlflow.store import MlflowStore, found_by
from pipeline.monitor.run_page import NOTE, DatasetFacts, dataset_name, hide_passwords

_REGISTERED = (
    "Vision Transformers of this pipeline. Alias `last`: of the run that ended last; `best`: the highest score so far."
)
_VERSIONS = "mlflow.modelVersions"
WEIGHTS = "model.safetensors"
# Tags of a logged model that its page shows as parameters as well, which it lists in full.
_SHOWN = ("run", "path", "sha256")


def _how_to_load(uri: str, step: int, kind: str, tags: dict[str, str]) -> str:
    """Description of a logged model, Markdown."""
    return f"""\
**Step {step:,} of `{tags["run"]}`**{f", {kind}" if kind else ""}: `{tags["path"]}`

SHA-256 of `{WEIGHTS}`: `{tags["sha256"]}`

    python launch/evaluate.py weights={uri} data=...
    python launch/finetune.py --config ... init.weights={uri}

    from pipeline.model import load
    from pipeline.monitor.mlflow.weights import weights_path
    model = load(weights_path("{uri}"))

The file is read where the run wrote it, and refused if its SHA-256 is another one; uploaded weights are downloaded."""


class ModelStore(MlflowStore):
    """A store with requests about models. Methods raise what MLflow raises."""

    def create_model(
        self, experiment_id: str, run_id: str, name: str, step: int, kind: str, tags: dict[str, str]
    ) -> str:
        """Show a checkpoint of a run as a logged model; returns its ID. One of a killed sender is used again.

        tags: also the parameters of its page, with the step. kind: of the architecture. Its description says how to load it.
        Does not ask for the run, which takes longer the more models it has.
        """
        from mlflow.entities import LoggedModelOutput

        mine = f"source_run_id = '{run_id}' AND name = '{name}'"
        alike = self.client.search_logged_models([experiment_id], mine)
        found = next((model for model in alike if model.tags.get("sha256") == tags["sha256"]), None)
        parameters = {"step": str(step), "model": kind, **{key: tags[key] for key in _SHOWN}}
        parameters = {key: text for key, text in parameters.items() if text}
        model = found or self.client.create_logged_model(experiment_id, name, run_id, tags, parameters, kind)
        self.client.set_logged_model_tags(model.model_id, {NOTE: _how_to_load(model.model_uri, step, kind, tags)})
        with tempfile.TemporaryDirectory() as folder:
            facts = {"uri": model.model_uri, "step": step, **tags}
            (Path(folder) / "weights.json").write_text(json.dumps(facts, indent=1))
            self.client.log_model_artifacts(model.model_id, folder)
        self.client.finalize_logged_model(model.model_id, "READY")
        outputs = self.client.get_run(run_id).outputs.model_outputs if found else ()
        if model.model_id not in (output.model_id for output in outputs):
            self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
        return model.model_id

    def delete_model(self, model_id: str) -> None:
        """Delete a logged model if it exists."""
        found_by(partial(self.client.delete_logged_model, model_id))

    def delete_models(self, run_id: str) -> None:
        """Delete all logged models of a run, also one that a sender created before it was killed."""
        for model in self.logged_models(self.client.get_run(run_id).info.experiment_id, run_id):
            self.delete_model(model.model_id)

    def scores(self, run_id: str) -> tuple[str, dict[int, list[Any]]]:
        """(ID of the run's experiment, its scores: step -> MLflow's points of evaluations and probes)."""
        run = self.client.get_run(run_id)
        points: dict[int, list[Any]] = {}
        for name in run.data.metrics:
            if name.startswith(("eval/", "probe/")):
                for point in self.client.get_metric_history(run_id, name):
                    points.setdefault(point.step, []).append(point)
        return run.info.experiment_id, points

    def link_scores(self, run_id: str, model_id: str, points: list[Any], data: DatasetFacts | None) -> None:
        """Show scores of a run at a logged model, as measured on the data of the evaluation."""
        from mlflow.entities import Metric

        where = {"dataset_name": dataset_name(data), "dataset_digest": data.digest[:36]} if data else {}
        if points:
            linked = [Metric(p.key, p.value, p.timestamp, p.step, model_id, **where) for p in points]
            self.client.log_batch(run_id, metrics=linked)

    def register(self, name: str, run_id: str, model_id: str, tags: dict[str, str]) -> str:
        """Register a logged model as a version of the registered model `name`; returns the version. One of a killed sender is used again."""
        self._unless_another_run_did(
            lambda: self.client.create_registered_model(name, description=_REGISTERED),
            lambda: self.client.get_registered_model(name) is not None,
        )
        model = self.client.get_logged_model(model_id)
        # The client of a database would look up models:/ in the default store.
        source = model.model_uri if self.uri.startswith("http") else model.artifact_location
        tags = {**tags, "model_id": model_id}
        of_run = self.client.search_model_versions(f"run_id = '{run_id}'")
        found = next((v for v in of_run if v.name == name and v.tags.get("model_id") == model_id), None)
        made = found or self.client.create_model_version(name, source, run_id, tags, model_id=model_id)
        version = str(made.version)
        # By this tag, which `mlflow.register_model` sets, the page of the logged model names its versions.
        known = json.loads(model.tags.get(_VERSIONS, "[]"))
        if (here := {"name": name, "version": version}) not in known:
            self.client.set_logged_model_tags(model_id, {_VERSIONS: json.dumps([*known, here])})
        return version

    def set_version_tags(self, name: str, version: str, tags: dict[str, str]) -> None:
        for tag, text in tags.items():
            self.client.set_model_version_tag(name, version, tag, text)

    def tags_of_alias(self, name: str, alias: str) -> dict[str, str] | None:
        """Tags of the version that an alias names; None if there is no such alias."""
        version = found_by(partial(self.client.get_model_version_by_alias, name, alias))
        return version.tags if version else None

    def find_model(self, uri: str) -> tuple[str, dict[str, str]] | None:
        """(ID, parameters and tags) of a logged model: models:/ID, models:/NAME@alias, models:/NAME/version, or runs:/ID (its best, else newest).

        None if this store has no such model. Raises UserError for a run without models, and if the store does not answer.
        """
        from mlflow.exceptions import MlflowException

        try:
            model = found_by(lambda: self.client.get_logged_model(self._model_id(uri)))
        except MlflowException as error:
            raise UserError(f"{uri}: MLflow at {hide_passwords(self.uri)} does not answer: {one_line(error)}") from None
        return None if model is None else (model.model_id, {**model.params, **model.tags})

    def _model_id(self, uri: str) -> str:
        scheme, _, name = uri.partition(":/")
        name = name.strip("/")
        if scheme == "runs":
            found = self.logged_models(self.client.get_run(name).info.experiment_id, name)
            if not found:
                raise UserError(f"{uri} has no logged model: only kept, best and last checkpoints are.")
            found.sort(key=lambda model: ("best" in model.tags.get("roles", ""), int(model.params.get("step", 0))))
            return found[-1].model_id
        if "@" in name:
            version = self.client.get_model_version_by_alias(*name.rsplit("@", 1))
        elif "/" in name:
            version = self.client.get_model_version(*name.rsplit("/", 1))
        else:
            return name
        return version.model_id or version.tags.get("model_id", "")

    def download_model_file(self, model_id: str, name: str, folder: Path) -> Path:
        """Download a file of a logged model's artifacts."""
        from mlflow.artifacts import download_artifacts

        location = self.client.get_logged_model(model_id).artifact_location
        return Path(download_artifacts(f"{location}/{name}", dst_path=str(folder), tracking_uri=self.uri))
