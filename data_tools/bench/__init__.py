"""Benchmarks of data loading, sharding, augmentation and the training step, beside those of other projects.

Imports sharding/ and sources/. Called by `launch/bench.py`.
"""
