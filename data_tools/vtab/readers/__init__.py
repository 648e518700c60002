"""Readers of the published files of VTAB's 16 data sets, without TensorFlow.

Imports sources/, and datasets.py and split.py of vtab/. Called by vtab/.
"""
