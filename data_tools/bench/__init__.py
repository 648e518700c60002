"""The fastest exact settings of one GPU: `gpu_bench.py` decides what is measured and says what was found, `gpu_step.py`
measures.

Imports sharding/ and sources/. Called by `launch/bench.py`.
"""
