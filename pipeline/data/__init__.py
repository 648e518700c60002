"""Data sets on disk, and the path of a sample from there into a batch. Knows nothing of training or models.

storage/ reads and writes files and objects, dataset/ opens and writes data sets, loading/ turns rows into batches,
mixture/ joins data sets. Each may import those named before it. Used by most rooms.
"""
