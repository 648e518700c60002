"""Raw images to shards: the job, its task that writes one shard, classes, held-out images, exact copies, an index of
existing tars.

Imports sources/. A shard is a pure function of (sample table, seed, number). Called by `launch/shard.py`, `launch/index.py` and vtab/.
"""
