"""Checkpoints of a run as MLflow's logged models, and as versions of a registered model."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.monitor.export import Scores, Sent, SentModel, Update, warn
from pipeline.monitor.mlflow.connection import found_by
from pipeline.monitor.mlflow.refusals import Refusals
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


class LoggedModels:
    """Shows the checkpoints of one run. config: whether weights are uploaded, and the name of a registered model."""

    def __init__(
        self, client: Any, experiment_id: str, facts: RunFacts, config: TrackConfig, refusals: Refusals
    ) -> None:
        self.client, self.experiment_id = client, experiment_id
        self.facts, self.config, self.refusals = facts, config, refusals
        self.evaluated = facts.dataset("evaluation")

    def show(self, found: list[ModelFacts], scores: Scores, sent: Sent, update: Update, ended: bool) -> None:
        """Create the logged models of new checkpoints, bring known ones up to date, and delete those of removed
        ones.
        """
        present = {model.sha256: model for model in found}
        for sha256 in sent.models.keys() - present.keys():
            found_by(partial(self.client.delete_logged_model, sent.models[sha256].model_id))
            update(models={key: model for key, model in sent.models.items() if key != sha256})
        for sha256, model in sorted(present.items(), key=lambda item: item[1].step):
            known, of_step = sent.models.get(sha256), scores.get(model.step, {})
            is_unregistered = self.config.register and (known is None or known.version is None)
            if (
                known
                and (known.roles, known.num_scores) == (model.roles, len(of_step))
                and not (ended and is_unregistered)
            ):
                continue
            show = partial(self._show, model, of_step, sent, update)
            if self.refusals.allows(f"the logged model of {model.path}", show, optional=True) and self.config.register:
                version = f"{model.path} as a version of the registered model {self.config.register}"
                self.refusals.allows(version, partial(self._register, model, of_step, sent, update))

    def _show(self, model: ModelFacts, scores: dict[str, tuple[float, int]], sent: Sent, update: Update) -> None:
        known = sent.models.get(model.sha256)
        shown = known or SentModel(self._create(model, sent.run_id), model.roles)
        if shown.roles != model.roles:
            self.client.set_logged_model_tags(shown.model_id, {"roles": ", ".join(model.roles)})
        self._link(model, shown.model_id, scores, sent.run_id)
        shown = replace(shown, roles=model.roles, num_scores=len(scores))
        update(models={**sent.models, model.sha256: shown})

    def _create(self, model: ModelFacts, run_id: str) -> str:
        """Returns the ID. A model that a killed sender created is used again."""
        from mlflow.entities import LoggedModelOutput

        name = f"{_NOT_IN_MODEL_NAMES.sub('_', self.facts.name)}-step-{model.step:08d}"
        kind = self.facts.tags.get("model", "")
        # Its page lists parameters in full, tags not.
        shown = {"step": str(model.step), "run": self.facts.name, "path": model.path, "sha256": model.sha256}
        if kind:
            shown["model"] = kind
        alike = self.client.search_logged_models(
            [self.experiment_id], f"source_run_id = '{run_id}' AND name = '{name}'"
        )
        made = next((one for one in alike if one.params.get("sha256") == model.sha256), None)
        outputs = [output.model_id for output in self.client.get_run(run_id).outputs.model_outputs] if made else []
        made = made or self.client.create_logged_model(self.experiment_id, name, run_id, params=shown, model_type=kind)
        note = _how_to_load(made.model_uri, shown)
        self.client.set_logged_model_tags(made.model_id, {NOTE: note, "roles": ", ".join(model.roles)})
        self.client.finalize_logged_model(made.model_id, "READY")
        if made.model_id not in outputs:
            self.client.log_outputs(run_id, [LoggedModelOutput(made.model_id, model.step)])
        file = Path(model.path, WEIGHTS)
        if self.config.upload_weights and "://" not in model.path and file.is_file():  # It may just have been removed.
            self.refusals.allows(str(file), partial(self.client.log_model_artifact, made.model_id, str(file)))
        return str(made.model_id)

    def _link(self, model: ModelFacts, model_id: str, scores: dict[str, tuple[float, int]], run_id: str) -> None:
        """Show the scores of the model's step, as measured on the data of the evaluation."""
        from mlflow.entities import Metric

        data = self.evaluated
        where = {"dataset_name": dataset_name(data), "dataset_digest": data.digest[:36]} if data else {}
        linked = [
            Metric(self.facts.sent_name(name), value, at, model.step, model_id, **where)
            for name, (value, at) in scores.items()
        ]
        if linked:
            self.client.log_batch(run_id, metrics=linked)

    def _register(self, model: ModelFacts, scores: dict[str, tuple[float, int]], sent: Sent, update: Update) -> None:
        """Make the model a version; set `last` if it is the last of its run, `best` if it has the highest score so
        far.
        """
        shown, name = sent.models[model.sha256], self.config.register
        score, data = scores.get(self.facts.score, (math.nan, 0))[0], self.evaluated.digest if self.evaluated else ""
        tags = {"run": self.facts.name, "step": str(model.step), "sha256": model.sha256, "model_id": shown.model_id}
        if math.isfinite(score):
            tags |= {"score": repr(score), "score_name": self.facts.score, "score_data": data}
        version = shown.version or self._version(name, sent.run_id, shown.model_id)
        for tag, text in tags.items():
            self.client.set_model_version_tag(name, version, tag, text)
        if "last" in model.roles:
            self.client.set_registered_model_alias(name, "last", version)
        if math.isfinite(score):
            found = found_by(partial(self.client.get_model_version_by_alias, name, "best"))
            best, sign = found.tags if found else None, self.facts.metric(self.facts.score).sign
            if best is not None and (best.get("score_name"), best.get("score_data")) != (self.facts.score, data):
                warn(
                    f"registered model {name}: `best` stays at {best.get('run')}, whose score ({best.get('score_name')}"
                    f" on data {best.get('score_data')}) cannot be compared with {self.facts.score} on {data}."
                )
            elif best is None or not sign * score <= sign * float(best.get("score", "nan")):
                self.client.set_registered_model_alias(name, "best", version)
        # Last: after a kill before this, the next sender sets the aliases.
        update(models={**sent.models, model.sha256: replace(shown, version=version)})

    def _version(self, name: str, run_id: str, model_id: str) -> str:
        """Register a logged model; returns the version. One of a killed sender is used again."""
        if found_by(partial(self.client.get_registered_model, name)) is None:
            self.client.create_registered_model(name, description=_REGISTERED)
        of_run = self.client.search_model_versions(f"run_id = '{run_id}'")
        if found := next((one for one in of_run if one.name == name and one.tags.get("model_id") == model_id), None):
            return str(found.version)
        # A server looks up models:/, and the client of a database would do so in the default store.
        location = self.client.get_logged_model(model_id).artifact_location
        source = f"models:/{model_id}" if self.config.uri.startswith("http") else location
        made = self.client.create_model_version(name, source, run_id, {"model_id": model_id}, model_id=model_id)
        # Also set by `mlflow.register_model`: the logged model's page shows its version by this tag.
        versions = json.dumps([{"name": name, "version": made.version}])
        self.client.set_logged_model_tags(model_id, {"mlflow.modelVersions": versions})
        return str(made.version)
