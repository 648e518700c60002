"""Prepares the 19 tasks of VTAB-1k from the published files of their 16 data sets, without TensorFlow, and proves their
splits.

Imports sharding/ and sources/. Called by `launch/vtab_prepare.py`.
"""
