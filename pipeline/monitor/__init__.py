"""What is measured while a run trains: metrics and MLflow, speed and memory, loss spikes, hangs, slow ranks.

Imports the ground floor and settings; tracking.py is the only file that imports MLflow. Called by train/, transfer/, reports.
"""
