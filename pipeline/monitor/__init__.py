"""Measurements while a run trains: metrics and MLflow, speed and memory, loss spikes, hangs, slow ranks.

Imports settings/, process/ and base/; mlflow/ is the only room that imports MLflow. Used by most rooms.
"""
