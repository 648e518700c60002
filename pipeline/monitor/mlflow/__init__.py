"""MLflow as a mirror of run folders: requests to its store, the thread that sends, artifacts and logged models, weights by URI.

store.py, models.py and reading.py are the only files that import mlflow. May import the files of monitor/ above this folder and
what they may import. Called by `Tracker`, review/, transfer/ and the commands that read weights.
"""
