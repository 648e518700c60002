"""Bytes by offset from disks and buckets: object store, retries, cache of whole shards.

Imports the ground floor and settings. Called by the other rooms of `data/`, by checkpoints, and by the jobs on data.
"""
