"""Finds images of a data set that are near copies of test images: thumbnails, search, verification of pairs, a sheet of
pairs.

Imports sharding/, sources/ and the modules of `data_tools` itself. Called by `launch/dedup.py`.
"""
