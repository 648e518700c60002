"""Opens MLflow servers and databases by MLflow's public client, and experiments, with their description and the view
of their runs that this project proposes. mlflow is imported only when it is used, because that takes seconds.
"""

import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from pipeline.base.errors import UserError
from pipeline.base.files import create
from pipeline.base.words import on_one_line
from pipeline.monitor.run_page import NOTE, hide_passwords

T = TypeVar("T")

_MAX_REASON = 300
# In the text of an error: MLflow has no code for it.
_TOO_LARGE = "failed with error code 413 "
_SQLITE = re.compile(r"sqlite(?:\+\w+)?://(?:/(?P<path>[^?]*))?(?P<query>\?.*)?", re.DOTALL)
# MLflow keeps saved views as tags of the experiment; they are listed under *Views*, and `?viewStateShareKey=KEY` in an
# address opens one. The fields are those that the page of MLflow 3.17 saves; unknown fields are ignored, missing ones
# have their defaults.
VIEW_KEY = "overview"
_SAVED = 1_764_000_000_000  # Milliseconds since 1970. The page lists views by it; a fixed time keeps the tag the same.
# Columns of the run list, left to right, and their widths in pixels; the important ones first: a window of 1,366 has
# 700 left beside MLflow's menu and the fixed columns. Columns without content in a store are not shown. MLflow sorts by
# metrics, not by tags: so `score` is both. Scores of other kinds than top-1 have columns of their own.
_COLUMNS = {
    "metrics.`score`": 80,
    **{f"metrics.`score_{kind}`": 90 for kind in ("knn", "linear", "miou")},
    "tags.`score`": 180,
    "tags.`dataset`": 120,
    "tags.`model`": 125,
    "tags.`outcome`": 130,
    "tags.`kind`": 90,
    "tags.`progress`": 165,
    "tags.`parent`": 170,
    "attributes.`Models`": 150,
    "attributes.`Source`": 160,
}
# Columns that are always shown, and stay first.
_FIXED = {"attributes.`Run Name`": 180, "attributes.`Created`": 130}
_VIEW = {
    "selectedColumns": list(_COLUMNS),
    "columnOrder": [*_FIXED, *_COLUMNS],
    "columnWidths": _FIXED | _COLUMNS,
    "runsHiddenMode": "FIRST_20_RUNS",
}
# The first chose MLflow's pages for model training before 3.17, where the browser does.
_EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    f"mlflow.sharedViewState.{VIEW_KEY}": json.dumps(
        {"name": "Overview", "createdAt": _SAVED, "updatedAt": _SAVED, "state": json.dumps(_VIEW)}
    ),
    NOTE: (
        """\
Vision Transformers: pre-training, fine-tuning and their scores, one run per run folder.

**How to read it.** `score` is the last score of a run in per cent, of what kind, and on which data; a click on the
number's head sorts by it. Scores that do not compare with top-1 have columns of their own: `score_knn`, `score_linear`
and `score_miou`. `kind` and `model` say what a run is, `outcome` and `progress` how it ended and how far
it came, `parent` from whose weights it began. Metrics are grouped: `eval/` scores on held-out images, `probe/` few-
shot and nearest-neighbour accuracy of the features, `train/` loss and learning rate, `speed/` throughput and where
the time goes, `health/` skipped steps, bad images and retries. To compare runs of different batch or model size, draw
a chart against `train/images_seen` or `train/exaflops` instead of the step.

**Data, code, settings.** *Datasets used* names the data by its fingerprint, *Source* the command and the git
revision. Parameters are the settings that differ from their defaults, and what follows from them; `config.yaml` among
the artifacts has all of them. A run that began from other weights names that run in its description and in the tags
`parent...`.
"""
    ),
}


def sqlite_uri(database: Path) -> str:
    """The tracking URI of a database file, whatever characters its path has."""
    # SQLAlchemy ends the path at a question mark and replaces %20 by a space; it takes every other character as it is.
    return "sqlite:///" + str(database.resolve()).replace("%", "%25").replace("?", "%3F")


def sqlite_file(uri: str) -> Path | None:
    """File of an SQLite database; None for another store. Raises UserError for one in memory, which ends with this
    process.
    """
    found = _SQLITE.fullmatch(uri)
    if found is None:
        return None
    path = unquote(found["path"] or "")
    if not path or ":memory:" in path or "mode=memory" in (found["query"] or ""):
        raise UserError(f"{uri} is a database in memory, which ends with this process. Give sqlite:////PATH/mlflow.db.")
    return Path(path)


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
            return str(client.create_experiment(name, artifact_location, _EXPERIMENT_TAGS))
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
