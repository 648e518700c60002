"""Measurements while a run trains: metrics and MLflow, speed and memory, loss spikes, hangs, slow ranks.

export.py sends a run folder to trackers. Imports settings/, process/ and base/; origin.py (late) model/.
mlflow/ is the only room that imports MLflow. Used by most rooms.
"""
