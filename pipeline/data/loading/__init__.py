"""From rows of a split to batches: sample order, decoding, augmentation, mixing and the loader.

May import storage/ and dataset/ beside it, base/, process/ and pipeline.settings (AugmentConfig is a plain value; a
second type for the same fields would only have to be kept in step). All random numbers are hashed from (seed, epoch,
sample), (seed, epoch, sample, view) or (seed, step). Used by most rooms.
"""
