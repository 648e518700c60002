"""Readers of the files that the authors of VTAB's 16 data sets publish, without TensorFlow.

Imports nothing of the other jobs but sources/. Called by the parts of vtab/ that prepare and prove tasks.
"""
