"""Training. loop.py is the file to read; run.py starts and ends it, setup.py prepares what it uses.

May import every room but explain/ and transfer/. zero/ holds DeepSpeed. Called by `launch/`, fine-tuning grids, VTAB's cells (the
step alone) and the benchmark.
"""
