"""Keeps the artifacts and logged models of an MLflow run equal to its run folder. Used by the sender's thread."""

import contextlib
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.base.words import counted
from pipeline.monitor.mlflow.models import WEIGHTS, ModelStore
from pipeline.monitor.mlflow.refusals import Refusals, one_line
from pipeline.monitor.mlflow.state import SentModel, SyncState
from pipeline.monitor.page_folder import PageFolder
from pipeline.monitor.run_page import DatasetFacts, ModelFacts, RunFacts
from pipeline.settings.run import TrackConfig

# Returns the checkpoints to show, while the run goes on (False) or after its end (True).
FindModels = Callable[[bool], list[ModelFacts]]
# Seconds between looks at the folder and at the checkpoints, and after which a file that keeps changing is uploaded again.
_LOOK, _LOOK_AT_MODELS, _UPLOAD_AGAIN = 10.0, 60.0, 300.0
# After so many files in a row that could not be sent, the server is down: the rest waits.
_MAX_FAILURES = 2
# MLflow refuses these in the name of a logged model.
_NOT_IN_MODEL_NAMES = re.compile(r"[/:.%\"']")


class RunMirror:
    """Mirrors one run folder to one MLflow run.

    config: whether weights are uploaded, and the name of a registered model. find_models: see FindModels. update: sets fields of the
    state and saves it. warn: receives one line.
    """

    def __init__(
        self, folder: Path, facts: RunFacts, find_models: FindModels, config: TrackConfig,
        update: Callable[..., None], warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.page, self.facts, self.find_models, self.config = PageFolder(folder), facts, find_models, config
        self.update, self.warn, self.refusals = update, warn, Refusals(warn)
        self.has_new_scores = False
        self._next_look = self._next_models = 0.0
        self._uploaded_at: dict[str, float] = {}
        self._warned: set[str] = set()

    def look(self, store: ModelStore, state: SyncState, final: bool = False) -> bool:
        """Send what has changed in the folder. final: the run has ended. Returns whether all of it was sent."""
        now = time.monotonic()
        complete = True
        if final or now >= self._next_look:
            complete = self._upload(store, state, final)
            self._next_look = now + _LOOK  # Unless the server is down: then at once, when it is back.
        if final or self.has_new_scores or now >= self._next_models:
            self._show_models(store, state, final)
            self._next_models = now + _LOOK_AT_MODELS
            self.has_new_scores = False
        return complete

    # ---------------------------------------------------------------- artifacts
    def find_lost_files(self, store: ModelStore, state: SyncState) -> None:
        """Send files again that were sent, and that the store no longer has: its folder or bucket was emptied, or restored.

        A store whose files cannot be listed is believed to have them.
        """
        assert state.run_id is not None
        folders = {name.rpartition("/")[0] for name in state.artifacts}
        with contextlib.suppress(Exception):  # Whatever the server or the file system raises.
            present = {file for folder in folders for file in store.list_files(state.run_id, folder)}
            kept = {name: version for name, version in state.artifacts.items() if name in present}
            if lost := len(state.artifacts) - len(kept):
                self.warn(f"MLflow run {state.run_id} has lost {counted(lost, 'file')} that it had: sent again.")
                self.update(state, artifacts=kept)

    def _upload(self, store: ModelStore, state: SyncState, final: bool) -> bool:
        assert state.run_id is not None
        failures = 0
        # Files that could not be sent last, so that they do not keep the others.
        for path, name in sorted(self.page.artifacts(self.facts.artifacts), key=lambda found: found[1] in self._warned):
            version = _version(path)
            waits = not final and time.monotonic() - self._uploaded_at.get(name, -1e9) < _UPLOAD_AGAIN
            if waits or version is None or version == state.artifacts.get(name):
                continue
            try:
                upload = partial(store.log_artifact, state.run_id, path, name.rpartition("/")[0])
                if not self.refusals.allows(store, state.run_id, str(path), upload):
                    continue
            except Exception as error:  # Whatever the server or the file system raises.
                store.is_active(state.run_id)  # Raises if the server is down, which the sender says, once.
                if name not in self._warned:
                    self._warned.add(name)
                    self.warn(f"{path} cannot be sent to MLflow ({one_line(error)}); it is tried again.")
                failures += 1
                if failures == _MAX_FAILURES:
                    return False
                continue
            self._uploaded_at[name] = time.monotonic()
            self.update(state, artifacts={**state.artifacts, name: version})
        return not failures

    # ---------------------------------------------------------------- logged models
    def _show_models(self, store: ModelStore, state: SyncState, final: bool) -> None:
        assert state.run_id is not None
        present = {model.sha256: model for model in self.find_models(final)}
        for sha256 in state.models.keys() - present.keys():  # The checkpoint was removed.
            store.delete_model(state.models[sha256].model_id)
            self.update(state, models={key: sent for key, sent in state.models.items() if key != sha256})
        newest = max((model.step for model in present.values()), default=0)
        fetched: tuple[str, dict[int, list[Any]]] | None = None  # Once a look, and only if a model needs it.
        for sha256, model in sorted(present.items(), key=lambda item: item[1].step):
            known = state.models.get(sha256)
            # A checkpoint is scored right after it is saved: older ones get no more scores.
            awaits_scores = (final or self.has_new_scores) and (
                not known or not known.num_scores or model.step == newest
            )
            # A kill came between showing and registering it.
            is_unregistered = final and self.config.register and known and known.version is None
            if known and known.roles == model.roles and not awaits_scores and not is_unregistered:
                continue
            fetched = fetched or store.scores(state.run_id)
            show = partial(self._show_model, store, state, model, *fetched)
            if self.refusals.allows(store, state.run_id, f"the logged model of {model.path}", show, optional=True):
                register = partial(self._register, store, state, model, fetched[1])
                if self.config.register:
                    version = f"{model.path} as a version of the registered model {self.config.register}"
                    self.refusals.allows(store, state.run_id, version, register)

    def _show_model(
        self, store: ModelStore, state: SyncState, model: ModelFacts, experiment_id: str, points: dict[int, list[Any]]
    ) -> None:
        """Create the logged model of a checkpoint, or bring it up to date. points: the run's scores by step."""
        assert state.run_id is not None
        known = state.models.get(model.sha256)
        sent = known or self._create(store, experiment_id, state.run_id, model)
        if sent.roles != model.roles:
            store.client.set_logged_model_tags(sent.model_id, {"roles": ", ".join(model.roles)})
        of_model = points.get(model.step, [])
        store.link_scores(state.run_id, sent.model_id, of_model, self._evaluation_data())
        sent = replace(sent, roles=model.roles, num_scores=len({point.key for point in of_model}))
        if sent != known:
            self.update(state, models={**state.models, model.sha256: sent})

    def _evaluation_data(self) -> DatasetFacts | None:
        return next((facts for facts in self.facts.datasets if facts.context == "evaluation"), None)

    def _create(self, store: ModelStore, experiment_id: str, run_id: str, model: ModelFacts) -> SentModel:
        file: Path | None = None
        if self.config.upload_weights and "://" not in model.path:
            file = Path(model.path, WEIGHTS)
        tags = {"path": model.path, "sha256": model.sha256, "roles": ", ".join(model.roles), "run": self.facts.name}
        name = f"{_NOT_IN_MODEL_NAMES.sub('_', self.facts.name)}-step-{model.step:08d}"
        kind = self.facts.tags.get("model", "")
        model_id = store.create_model(experiment_id, run_id, name, model.step, kind, tags)
        if file and file.is_file():  # The checkpoint may just have been removed.
            self.refusals.allows(
                store, run_id, str(file), partial(store.client.log_model_artifact, model_id, str(file))
            )
        return SentModel(model_id, model.roles)

    def _register(self, store: ModelStore, state: SyncState, model: ModelFacts, points: dict[int, list[Any]]) -> None:
        """Make the model a version; set `last` if it is the last of its run, `best` if it has the highest score so far."""
        assert state.run_id is not None
        sent, scores = state.models[model.sha256], {point.key: point.value for point in points.get(model.step, [])}
        name = self.config.register
        score = scores.get(self.facts.sent_name(self.facts.score), math.nan)
        evaluated = self._evaluation_data()
        data = evaluated.digest if evaluated else ""
        tags = {"run": self.facts.name, "step": str(model.step), "sha256": model.sha256}
        if math.isfinite(score):
            tags |= {"score": repr(score), "score_name": self.facts.score, "score_data": data}
        version = sent.version or store.register(name, state.run_id, sent.model_id, tags)
        store.set_version_tags(name, version, tags)
        if "last" in model.roles:
            store.client.set_registered_model_alias(name, "last", version)
        if math.isfinite(score):
            best = store.tags_of_alias(name, "best")
            sign = self.facts.metric(self.facts.score).sign
            if best is not None and (best.get("score_name"), best.get("score_data")) != (self.facts.score, data):
                self.warn(
                    f"registered model {name}: `best` stays at {best.get('run')}, whose score ({best.get('score_name')} on data "
                    f"{best.get('score_data')}) cannot be compared with {self.facts.score} on {data}."
                )
            elif best is None or not sign * score <= sign * float(best.get("score", "nan")):
                store.client.set_registered_model_alias(name, "best", version)
        if sent.version is None:  # Last: after a kill before this, the next sender sets the aliases.
            self.update(state, models={**state.models, model.sha256: replace(sent, version=version)})


def _version(path: Path) -> str | None:
    """Size and time of a file, by which a change is noticed; None if it was just removed."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return f"{found.st_size} bytes, {found.st_mtime_ns} ns"
