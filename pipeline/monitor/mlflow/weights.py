"""Weights named by MLflow: models:/ID and runs:/ID, as its pages show them.

python launch/evaluate.py weights=models:/m-5adfe06462174153a4f8cbb493d9510b data=datasets/pets

from pipeline.model import load
from pipeline.monitor.mlflow.weights import weights_path
model = load(weights_path("models:/m-5adfe06462174153a4f8cbb493d9510b"))
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pipeline.base.errors import UserError
from pipeline.base.tracking_uri import sqlite_file
from pipeline.data.storage.checksums import cache_home
from pipeline.monitor.mlflow.connection import connect, found_by, one_line
from pipeline.monitor.mlflow.exporter import WEIGHTS
from pipeline.monitor.run_page import hide_passwords
from pipeline.monitor.tracking import default_uri
from pipeline.process.committed import read_checksums

C = TypeVar("C", bound=Any)  # Settings with a field `weights`.


def is_uri(weights: str) -> bool:
    """Whether these weights are named by MLflow, rather than a path."""
    return weights.startswith(("models:/", "runs:/"))


def weights_path(
    weights: str, tracking_uri: str = "", say: Callable[[str], object] = print, out: str | Path = "runs"
) -> str:
    """The path of weights that MLflow names; any other path as it is.

    tracking_uri: of a run, else MLFLOW_TRACKING_URI. Where neither is set, or a local database that does not have them,
    mlflow.db in the folder of runs `out` and in runs/ are asked. The checkpoint is used where the run wrote it, if it
    has the hash that MLflow shows; else the weights that were uploaded (track.upload_weights) are downloaded to the
    cache, once. say: called with a line that names what was found. Raises UserError if there are none.
    """
    if not is_uri(weights):
        return weights
    uri, model = _find_model(weights, tracking_uri, Path(out))
    path, sha256 = model.params.get("path", ""), model.params.get("sha256", "")
    if not path or not sha256:
        raise UserError(f"{weights} was not logged by this pipeline: it has no parameters path and sha256.")
    checksums = read_checksums(Path(path))
    if checksums and WEIGHTS in checksums and checksums[WEIGHTS].sha256 == sha256:
        say(f"{weights}: {path}")
        return path
    folder = cache_home() / "models" / sha256
    file = folder / WEIGHTS
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            from mlflow.artifacts import download_artifacts

            with tempfile.TemporaryDirectory(dir=folder) as own:  # Another process may download the same.
                there = f"{model.artifact_location}/{WEIGHTS}"
                os.replace(download_artifacts(there, dst_path=own, tracking_uri=uri), file)
        except Exception as error:  # Whatever the server, its client or the disk raises.
            raise UserError(
                f"{weights}: its weights, of step {model.params.get('step')}, are not in {path}, and were not"
                " uploaded, or cannot be downloaded. Run this where that folder is, or train with"
                f" track.upload_weights=true. MLflow: {one_line(error)}"
            ) from None
    with open(file, "rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != sha256:
            file.unlink()
            raise UserError(f"{weights}: the download was damaged ({file}, removed). Try again.")
    say(f"{weights}: {file}, downloaded from MLflow")
    return str(file)


def _find_model(weights: str, tracking_uri: str, out: Path) -> tuple[str, Any]:
    """(tracking URI, MLflow's logged model) in the first store that has it."""
    from mlflow.exceptions import MlflowException

    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    setting = "track.uri or " if tracking_uri else ""
    # A run below a grid or a study is given their default database: the server comes before that.
    given = [server, tracking_uri] if tracking_uri == default_uri(out.parent) else [tracking_uri or server]
    uris = [uri for uri in given if uri]
    if not uris or sqlite_file(uris[-1]):
        uris = list(dict.fromkeys([*uris, default_uri(out), default_uri(Path("runs"))]))
    for uri in uris:
        if (database := sqlite_file(uri)) and not database.is_file():  # MLflow would create it.
            if uri in given and uri != default_uri(out.parent):
                raise UserError(f"{weights}: there is no MLflow database {database}. Set {setting}MLFLOW_TRACKING_URI.")
            continue
        try:
            client = connect(uri)
            if model := found_by(lambda: client.get_logged_model(_model_id(client, weights))):  # noqa: B023  (called here)
                return uri, model
        except MlflowException as error:
            raise UserError(f"{weights}: MLflow at {hide_passwords(uri)} does not answer: {one_line(error)}") from None
    places = ", nor at ".join(hide_passwords(uri) for uri in uris)
    raise UserError(f"{weights} is not found in MLflow at {places}. Set {setting}MLFLOW_TRACKING_URI to another store.")


def _model_id(client: Any, uri: str) -> str:
    """ID of a logged model: models:/ID, or runs:/ID (its best, else newest)."""
    scheme, _, name = uri.partition(":/")
    name = name.strip("/")
    if scheme == "runs":
        experiment = client.get_run(name).info.experiment_id
        found = client.search_logged_models([experiment], f"source_run_id = '{name}'")
        if not found:
            raise UserError(f"{uri} has no logged model: only kept, best and last checkpoints are.")
        return max(
            found, key=lambda model: ("best" in model.tags.get("roles", ""), int(model.params.get("step", 0)))
        ).model_id
    return name


def with_local_weights(config: C) -> C:
    """A command's settings with the path of the weights, where they are named by MLflow."""
    return replace(config, weights=weights_path(config.weights)) if is_uri(config.weights) else config
