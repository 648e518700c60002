"""Checkpoints of a run as MLflow's logged models, and as versions of a registered model."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.monitor.export import Scores, SentModel, warn
from pipeline.monitor.mlflow.connection import found_by
from pipeline.monitor.mlflow.refusals import RefusableExporter
from pipeline.monitor.run_page import NOTE, ModelFacts, RunFacts, dataset_name
from pipeline.settings.run import TrackConfig

WEIGHTS = "model.safetensors"
_REGISTERED = (
    "Vision Transformers of this pipeline. Alias `last`: of the run that ended last; `best`: the highest score so far."
)
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

The file is read where the run wrote it, and refused if its SHA-256 is another one; uploaded weights are downloaded."""


class LoggedModels(RefusableExporter):
    """The part of `MlflowExporter` that shows checkpoints.

    find_models: returns those to show, during the run (False) or after its end (True). config: whether weights are
    uploaded, and the name of a registered model.
    """

    experiment_id: str
    facts: RunFacts
    config: TrackConfig
    find_models: Callable[[bool], list[ModelFacts]]

    def show_models(self, scores: Scores, ended: bool) -> None:
        """Create the logged models of new checkpoints, bring known ones up to date, and delete those of removed
        ones.
        """
        present = {model.sha256: model for model in self.find_models(ended)}
        for sha256 in self.sent.models.keys() - present.keys():
            found_by(partial(self.client.delete_logged_model, self.sent.models[sha256].model_id))
            self.update(models={key: model for key, model in self.sent.models.items() if key != sha256})
        name = self.config.register
        for model in sorted(present.values(), key=lambda model: model.step):
            known, of_step = self.sent.models.get(model.sha256), scores.get(model.step, {})
            is_registered = not name or (known and known.version is not None)
            if (
                known
                and (known.roles, known.num_scores) == (model.roles, len(of_step))
                and (is_registered or not ended)
            ):
                continue
            show = partial(self._show, model, of_step)
            if self.allows(f"the logged model of {model.path}", show, optional=True) and name:
                version = f"{model.path} as a version of the registered model {name}"
                self.allows(version, partial(self._register, model, of_step))

    def _show(self, model: ModelFacts, scores: dict[str, tuple[float, int]]) -> None:
        """Show a model, and the scores of its step as measured on the data of the evaluation."""
        from mlflow.entities import Metric

        shown = self.sent.models.get(model.sha256) or SentModel(self._create(model), model.roles)
        if shown.roles != model.roles:
            self.client.set_logged_model_tags(shown.model_id, {"roles": ", ".join(model.roles)})
        data = self.facts.dataset("evaluation")
        where = {"dataset_name": dataset_name(data), "dataset_digest": data.digest[:36]} if data else {}
        if linked := [
            Metric(self.facts.sent_name(name), value, at, model.step, shown.model_id, **where)
            for name, (value, at) in scores.items()
        ]:
            self.client.log_batch(self.sent.run_id, metrics=linked)
        self._remember(model, replace(shown, roles=model.roles, num_scores=len(scores)))

    def _remember(self, model: ModelFacts, shown: SentModel) -> None:
        self.update(models={**self.sent.models, model.sha256: shown})

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
        file = Path(model.path, WEIGHTS)
        if self.config.upload_weights and file.is_file():  # It may just have been removed, or be in a bucket.
            self.allows(str(file), partial(client.log_model_artifact, made.model_id, str(file)))
        return str(made.model_id)

    def _register(self, model: ModelFacts, scores: dict[str, tuple[float, int]]) -> None:
        """Make the model a version; set `last` if it is the last of its run, `best` if it has the highest score so
        far.
        """
        client, shown, name, of = self.client, self.sent.models[model.sha256], self.config.register, self.facts.score
        data = self.facts.dataset("evaluation")
        measured = {"score_name": of, "score_data": data.digest if data else ""}
        score = scores.get(of, (math.nan, 0))[0]
        tags = {"run": self.facts.name, "step": str(model.step), "sha256": model.sha256, "model_id": shown.model_id}
        if math.isfinite(score):
            tags |= {"score": repr(score), **measured}
        version = shown.version or self._version(name, shown.model_id)
        for tag, text in tags.items():
            client.set_model_version_tag(name, version, tag, text)
        if "last" in model.roles:
            client.set_registered_model_alias(name, "last", version)
        if math.isfinite(score):
            found = found_by(partial(client.get_model_version_by_alias, name, "best"))
            best, sign = found.tags if found else measured, self.facts.metric(of).sign
            if any(best.get(key) != text for key, text in measured.items()):
                warn(
                    f"registered model {name}: `best` stays at {best.get('run')}, whose score ({best.get('score_name')}"
                    f" on data {best.get('score_data')}) cannot be compared with {of} on {measured['score_data']}."
                )
            elif not sign * score <= sign * float(best.get("score", "nan")):
                client.set_registered_model_alias(name, "best", version)
        # Last: after a kill before this, the next sender sets the aliases.
        self._remember(model, replace(shown, version=version))

    def _version(self, name: str, model_id: str) -> str:
        """Register a logged model; returns the version. One of a killed sender is used again."""
        client, run_id = self.client, self.sent.run_id
        if found_by(partial(client.get_registered_model, name)) is None:
            client.create_registered_model(name, description=_REGISTERED)
        of_run = client.search_model_versions(f"run_id = '{run_id}'")
        if found := next((one for one in of_run if one.name == name and one.tags.get("model_id") == model_id), None):
            return str(found.version)
        # A server looks up models:/, and the client of a database would do so in the default store.
        location = client.get_logged_model(model_id).artifact_location
        source = f"models:/{model_id}" if self.config.uri.startswith("http") else location
        made = client.create_model_version(name, source, run_id, {"model_id": model_id}, model_id=model_id)
        # Also set by `mlflow.register_model`: the logged model's page shows its version by this tag.
        versions = json.dumps([{"name": name, "version": made.version}])
        client.set_logged_model_tags(model_id, {"mlflow.modelVersions": versions})
        return str(made.version)
