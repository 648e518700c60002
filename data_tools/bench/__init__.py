"""Benchmarks: in `training_step.py` of a step, in `gpu/` of a GPU's settings.

The other files are what these share: images, a process for each measurement, the record. Imports sharding/ and sources/. Called by `launch/bench.py`.
"""
