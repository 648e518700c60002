"""Weights named by MLflow: models:/ID and runs:/ID, as its pages show them.

python launch/evaluate.py weights=models:/m-5adfe06462174153a4f8cbb493d9510b data=datasets/pets

from pipeline.model import load
from pipeline.monitor.mlflow.weights import weights_path
model = load(weights_path("models:/m-5adfe06462174153a4f8cbb493d9510b"))
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pipeline.base.errors import UserError
from pipeline.monitor.mlflow.connection import connect, found_by, one_line, sqlite_file
from pipeline.monitor.mlflow.exporter import WEIGHTS
from pipeline.monitor.origin import find_origin
from pipeline.monitor.run_page import WeightsOrigin, hide_passwords
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

    tracking_uri: of a run, which is asked first; then MLFLOW_TRACKING_URI, and mlflow.db in the folder of runs `out`
    and in runs/. say: called with a line that names what was found. Raises UserError if there are none, or the
    checkpoint is not where the run wrote it, with the hash that MLflow shows.
    """
    if not is_uri(weights):
        return weights
    shown = _find_model(weights, tracking_uri, Path(out)).params
    path, sha256 = shown.get("path", ""), shown.get("sha256", "")
    checksums = read_checksums(Path(path)) or {}
    if WEIGHTS not in checksums or checksums[WEIGHTS].sha256 != sha256:
        raise UserError(
            f"{weights}: its weights, of step {shown.get('step')}, are not in {path}, where the run wrote them. Run"
            " this where that folder is, or copy the weights and name the copy."
        )
    say(f"{weights}: {path}")
    return path


def _find_model(weights: str, tracking_uri: str, out: Path) -> Any:
    """MLflow's logged model, in the first store that has it."""
    from mlflow.exceptions import MlflowException

    named = [tracking_uri, os.environ.get("MLFLOW_TRACKING_URI", ""), default_uri(out), default_uri(Path("runs"))]
    uris = list(dict.fromkeys(filter(None, named)))
    for uri in uris:
        if (database := sqlite_file(uri)) and not database.is_file():  # MLflow would create it.
            continue
        try:
            client = connect(uri)
            if model := found_by(lambda: client.get_logged_model(_model_id(client, weights))):  # noqa: B023
                return model
        except MlflowException as error:
            raise UserError(f"{weights}: MLflow at {hide_passwords(uri)} does not answer: {one_line(error)}") from None
    places = ", nor at ".join(hide_passwords(uri) for uri in uris)
    raise UserError(f"{weights} is not found in MLflow at {places}. Set MLFLOW_TRACKING_URI to another store.")


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


def find_weights(config: C) -> tuple[C, C, WeightsOrigin | None]:
    """(the settings of a command that reports to `config.mlflow`, with the path of their weights; the same with the
    file, which is found once, because a run in training changes its `latest`; what that is, unless MLflow is off).
    """
    from pipeline.model.files import find_file  # Late: imports torch.

    config = with_local_weights(config)
    file = find_file(Path(config.weights))
    return config, replace(config, weights=str(file)), find_origin(file, config.weights) if config.mlflow else None


def with_local_weights(config: C) -> C:
    """A command's settings with the path of the weights, where they are named by MLflow."""
    return replace(config, weights=weights_path(config.weights)) if is_uri(config.weights) else config
