"""Command track_serve: MLflow's server on a database of runs, with pages that open on the table of runs.

MLflow 3.17 opens an experiment on its pages for language models, whatever the experiment's tags say: each browser
remembers the choice, and the columns of each table, in its local storage. So the server adds a script to MLflow's page
that fills what a browser has not chosen itself. MLflow calls this a plugin, which also other servers can use:
`mlflow server --app-name vit`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.tracking_uri import sqlite_uri
from pipeline.monitor.mlflow.connection import connect, runs_page
from pipeline.monitor.mlflow.view import VIEW_TAG
from pipeline.process.start import dying_with_parent
from pipeline.settings.commands.reports import ServeConfig

_HOST = "127.0.0.1"
# Of MLflow's page: pages for model training; no assistant, no introduction, no notice of telemetry, which is off.
_CHOSEN = {
    "mlflow.workflowType_v1": '"machine_learning"',
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
    "mlflow.home.getting-started.collapsed_v1": "true",
    "mlflow.telemetry.info.alert.dismissed_v1": "true",
}
# The request is synchronous, because MLflow's page reads the local storage as soon as it is loaded. A table whose
# columns are all attributes is one that MLflow has chosen.
_SCRIPT = """
try {
  for (const [key, value] of Object.entries(CHOSEN))
    if (localStorage.getItem(key) === null) localStorage.setItem(key, value)
  const request = new XMLHttpRequest()
  request.open("GET", "ajax-api/2.0/mlflow/experiments/search?max_results=1000", false)
  request.send()
  for (const { experiment_id, tags = [] } of JSON.parse(request.responseText).experiments ?? []) {
    const view = tags.find(tag => tag.key === VIEW_TAG)
    const key = `MLflowLocalStorage-1.1-ExperimentPage-["${experiment_id}"]-ReactComponentState`
    const seen = JSON.parse(localStorage.getItem(key))
    if (view && (seen?.selectedColumns ?? []).every(column => column.startsWith("attributes.")))
      localStorage.setItem(key, JSON.stringify({ ...seen, ...JSON.parse(JSON.parse(view.value).state) }))
  }
} catch (error) { console.warn(error) }
"""


def app() -> Any:
    """The web application of `mlflow server --app-name vit`: MLflow's own, with the script in its page."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.server import app as flask_app
    from mlflow.server.fastapi_app import create_fastapi_app

    script = _SCRIPT.replace("CHOSEN", json.dumps(_CHOSEN)).replace("VIEW_TAG", json.dumps(VIEW_TAG))
    page = Path(str(flask_app.static_folder), "index.html").read_text()
    page = page.replace("<head>", f"<head><script>{script}</script>", 1)
    flask_app.view_functions["serve"] = lambda: page
    return create_fastapi_app(flask_app)


def run(config: ServeConfig) -> None:
    """Serve until Ctrl-C. Raises UserError for a missing database, and a port in use."""
    if not Path(config.store).is_file():
        raise UserError(
            f"store={config.store} does not exist. The first run creates <out>/mlflow.db; `make mlflow STORE=FILE`"
            " shows another database."
        )
    try:
        socket.create_server((_HOST, config.port)).close()
    except OSError as error:
        raise UserError(
            f"port={config.port} cannot be used ({error.strerror}); an earlier server may still run. Another port:"
            f" `make mlflow PORT={config.port + 1}`."
        ) from None
    uri, address = sqlite_uri(Path(config.store)), f"http://{_HOST}:{config.port}"
    print(f"MLflow shows {config.store} at {address} in a few seconds; Ctrl-C ends it.")
    for experiment in connect(uri).search_experiments():
        if VIEW_TAG in experiment.tags:
            print(f"  {experiment.name}: {address}{runs_page(experiment.experiment_id)}")
    sys.stdout.flush()
    # The jobs are for language models. One worker is enough for one person, and starts soonest.
    settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONWARNINGS": "ignore"}
    stores = ["--backend-store-uri", uri, "--registry-store-uri", uri]
    served = ["--app-name", "vit", *stores, "--host", _HOST, "--port", str(config.port)]
    quiet = ["--workers", "1", "--uvicorn-opts", "--log-level warning"]
    # A session of its own: Ctrl-C would reach MLflow's processes twice, and end them with tracebacks.
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", *served, *quiet],
        env=os.environ | settings,
        start_new_session=True,
        preexec_fn=dying_with_parent(signal.SIGTERM),
    )
    try:
        if code := server.wait():
            sys.exit(code)
    except KeyboardInterrupt:
        server.terminate()
        server.wait()
