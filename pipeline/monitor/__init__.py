"""Measurements while a run trains: metrics and MLflow, speed and memory, loss spikes, hangs, slow ranks.

Imports settings, `distributed` and the ground floor; mlflow/ is the only room that imports MLflow. Used by most rooms.
"""
