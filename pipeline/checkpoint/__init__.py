"""Checkpoints, whole or invisible: the store, tensors by ranges, the copy that training waits for, the writer process.

Imports data/storage for buckets. Knows nothing of DeepSpeed or models. Called by train/ and by whatever reads a run's weights.
"""
