"""Scores and reports: accuracy, probes, confusion, comparison of runs, predictions, export compared on both sides.

Takes a loaded model and a split, and knows nothing of training. Called by train/ (during a run), explain/, transfer/ and
commands.
"""
