"""Is a data set whole, and what is in it: verification, statistics, pages of samples.

Imports sharding/ and sources/. Called by `launch/verify.py` and `launch/stats.py`.
"""
