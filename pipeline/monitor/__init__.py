"""Measurements while a run trains: metrics and MLflow, speed and memory, loss spikes, hangs, slow ranks.

May import settings, `distributed` and the ground floor; mlflow_store.py is the only file that imports MLflow. Called by
train/, estimate/, evaluate/, transfer/ and the benches.
"""
