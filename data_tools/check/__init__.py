"""Verification of a data set (verify.py), its statistics (stats.py) and pictures (figures.py).

Imports sharding/ and sources/. Called by `launch/verify.py` and `launch/stats.py`.
"""
