"""Data sets on disk, and the way of a sample from there into a batch. Knows nothing of training or models.

storage/ reads bytes by offset, dataset/ says what a data set is, loading/ turns rows into batches; each may import those
named before it, and `pipeline.settings`.
"""
