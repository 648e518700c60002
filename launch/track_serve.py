"""Command: show the runs of a database in a browser, by MLflow's server. See `pipeline/monitor/mlflow/server.py`.

Serve MLflow's pages of all runs in a database, and print their addresses: an experiment opens as a table of runs with
score, data, model and outcome.

  python launch/track_serve.py
  python launch/track_serve.py store=runs/demo/mlflow.db port=5001

`make mlflow` is the same.
"""

import sys
from os.path import dirname

sys.path.insert(0, dirname(dirname(__file__)))

from pipeline.process.start import guard

guard(__name__)

from pipeline.settings.command import main
from pipeline.settings.commands.reports import ServeConfig

if __name__ == "__main__":
    main(ServeConfig, "pipeline.monitor.mlflow.server", __doc__)
