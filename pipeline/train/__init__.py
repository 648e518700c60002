"""Training. loop.py is the file to read; run.py starts and ends it, setup.py prepares what it uses; zero/ holds DeepSpeed.

May import every room but explain/ and transfer/. Called by `launch/`, fine-tuning grids, VTAB's cells (training_step only) and
the benchmark.
"""
