"""Measurements while a run trains: metrics and MLflow, speed and memory, loss spikes, hangs, slow ranks.

May import settings, `distributed` and the ground floor; mlflow/ is the only room that imports MLflow. Called by
train/, estimate/, evaluate/, transfer/ and the benches.
"""
