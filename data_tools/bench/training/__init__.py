"""Speed of a training step beside a plain loop, of the model on a CPU, and what tracking costs a run.

Imports the files of bench/ and what trains. Called by `launch/bench.py`.
"""
