"""Verification of a data set (verify.py), its statistics (stats.py) and contact sheets.

Imports sources/. Called by `launch/verify.py` and `launch/stats.py`.
"""
