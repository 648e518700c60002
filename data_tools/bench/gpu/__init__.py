"""The fastest exact settings of one GPU: `gpu_bench.py` decides what is measured, `gpu_step.py` measures, `gpu_report.py` says what was found.

Imports sharding/, sources/ and the files of bench/. Called by `launch/bench.py`.
"""
