"""The fastest exact settings of one GPU: `gpu_bench.py` decides what is measured, `gpu_step.py` measures, `results.py`
says what was found.

Imports sharding/ and sources/. Called by `launch/bench.py`.
"""
