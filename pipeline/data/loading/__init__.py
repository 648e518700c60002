"""From rows to batches: order, views, decoding, augmentation, mixing, the loader.

Imports storage/ and dataset/. All randomness comes from (seed, epoch, sample) or (seed, step). Called by training,
evaluation and the benchmarks.
"""
