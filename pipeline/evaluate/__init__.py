"""Scores and reports: accuracy, probes, confusion matrix, comparison of runs, predictions, and verified export.

Takes a loaded model and a split; does not depend on training. May import all rooms up to objectives/. Called by train/ (during
a run), explain/, transfer/ and launch/.
"""
