"""Opens MLflow servers and databases by MLflow's public client. mlflow is imported only when it is used, because that
takes seconds.
"""

import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pipeline.base.errors import UserError
from pipeline.base.files import create
from pipeline.base.tracking_uri import sqlite_file, sqlite_uri
from pipeline.base.words import on_one_line
from pipeline.monitor.run_page import EXPERIMENT_TAGS, hide_passwords

T = TypeVar("T")

_MAX_REASON = 300
# In the text of an error: MLflow has no code for it.
_TOO_LARGE = "failed with error code 413 "


def connect(uri: str) -> Any:
    """An `MlflowClient`. Raises what MLflow raises, and UserError for a database in memory."""
    database = sqlite_file(uri)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # What sends tries again by itself, after it has looked what arrived. MLflow's client would repeat a request that
    # was carried out although its answer was lost (504 of a web server before it): two runs.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Tracebacks of forty lines at each try, which the sender says in one.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # One line for each retry, for hours.
    # With MLFLOW_TRACKING_INSECURE_TLS, two lines for each request.
    warnings.filterwarnings("once", message="Unverified HTTPS request")
    from mlflow.tracking import MlflowClient

    if database and not database.exists():
        # MLflow makes its tables in some fifty steps. Processes that begin together would each make them, and a kill
        # between two leaves a database that MLflow does not open again. So the file appears when it has all of them;
        # the first one wins.
        database.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=database.parent, prefix=".mlflow.") as folder:
            MlflowClient(tracking_uri=sqlite_uri(Path(folder, "new.db"))).search_experiments(max_results=1)
            create(database, Path(folder, "new.db").read_bytes())
    return MlflowClient(tracking_uri=uri)


def experiment_id(client: Any, name: str, artifact_location: str | None) -> str:
    """ID of an experiment, which is created if it is missing, with its description and the project's view.

    Raises UserError if it was deleted: MLflow keeps its name until `mlflow gc`.
    """
    from mlflow.exceptions import MlflowException

    if (experiment := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name, artifact_location, EXPERIMENT_TAGS))
        except MlflowException:  # Another run that began at the same time created it.
            if (experiment := client.get_experiment_by_name(name)) is None:
                raise
    if experiment.lifecycle_stage != "active":
        raise UserError(
            f"has deleted experiment {name!r} (`mlflow experiments restore --experiment-id {experiment.experiment_id}`"
            " restores it; or set track.experiment=...)"
        )
    return str(experiment.experiment_id)


def active_run(client: Any, run_id: str) -> Any:
    """An MLflow run; None if it does not exist or is deleted. A deleted run refuses everything."""
    run = found_by(lambda: client.get_run(run_id)) if run_id else None
    return run if run and run.info.lifecycle_stage == "active" else None


def found_by(request: Callable[[], T]) -> T | None:
    """The answer to a request; None if what it names does not exist. Raises other errors."""
    from mlflow.exceptions import MlflowException

    try:
        return request()
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def is_refusal(error: Exception) -> bool:
    """Whether the store answered that a request is wrong, so that it would refuse it again.

    413 is of a web server before it, with a limit to the size of a request.
    """
    # Requests about artifacts raise HTTPError.
    status = getattr(getattr(error, "response", None), "status_code", 0)
    code = getattr(error, "error_code", "")
    return status in (400, 413) or code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST") or _TOO_LARGE in str(error)


def one_line(error: Exception) -> str:
    """The text of an exception, on one line without passwords.

    SQL statements with their values are left out, and so is the middle of a long text: the reason is often at the
    end.
    """
    text = hide_passwords(on_one_line(error).partition(" [SQL: ")[0])
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON // 2]} ... {text[-_MAX_REASON // 2 :]}"
