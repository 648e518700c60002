"""Files on disks and in buckets: object store, retries, shard cache, remembered checksums, atomic replacement.

Imports the ground floor only. Called by the other rooms of `data/`, by checkpoints, and by the jobs on data.
"""
