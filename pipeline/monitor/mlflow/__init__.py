"""MLflow as a mirror of run folders: requests to its store, the thread that sends, artifacts and logged models, weights by URI.

store.py, models.py and reading.py are the only files that import mlflow; refusals.py tells what a store refuses from an outage.
Imports files of monitor/, settings/, process/ and data/storage.
Used by most rooms.
"""
