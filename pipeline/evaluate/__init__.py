"""Scores and reports: accuracy, probes, confusion matrix, predictions, features, images to label first, and verified
export.

Takes a loaded model and a split; does not depend on training. Imports objectives/ and rooms above it. Used by explain/,
train/, experiment/, review/ and launch/.
"""
