"""Command: export run folders to MLflow afterwards. See `pipeline/review/sync.py`.

Send to MLflow what it lacks of finished, stopped or killed runs: metrics, figures, settings, logged models, how they
ended.

Runs send themselves; this is for those that could not (no network, track.enabled=false, a kill), and for a second
server.

  python launch/track_sync.py runs=[runs/vit_l16]
  python launch/track_sync.py runs=[runs] uri=http://mlflow.example.org:5000

A run in progress is skipped. Sending twice changes nothing.
"""

from _repository import command

from pipeline.settings.commands.reports import SyncConfig

if __name__ == "__main__":
    command.main(SyncConfig, "pipeline.review.sync", __doc__)
