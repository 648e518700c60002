"""Offline jobs on data, as Ray tasks: raw images to shards, checks, copies of test images, VTAB-1k, benchmarks.

Imports `pipeline`, which never imports it. progress.py and driver.py serve all jobs. Called by `launch/`.
"""
