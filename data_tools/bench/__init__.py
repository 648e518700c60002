"""The benchmark of one GPU is in `gpu/`; here is what tests/measure uses as well: images, a process for each measurement, the record.

Imports sharding/ and sources/. Called by `launch/bench.py`.
"""
